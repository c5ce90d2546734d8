"""configurator.py: values, files, help, and every mistake as one line that names its place."""

from dataclasses import dataclass
from typing import Literal

import pytest

from configurator import UserError, changed, configure, describe


@dataclass
class Config:
    n_layer: int = 12  # blocks
    lr: float = 6e-4  # peak learning rate
    name: str = "run"  # what it is called
    compile: bool = True  # use torch.compile
    kind: Literal["a", "b"] = "a"  # which one
    top_k: int | None = 50  # None: all


def make(*argv):
    return configure(Config, list(argv))


def test_defaults_and_flags():
    assert make() == Config()
    cfg = make("--n_layer=3", "--lr=1", "--name=a=b=c", "--no_compile", "--kind=b", "--top_k=None")
    assert cfg == Config(3, 1.0, "a=b=c", False, "b", None)
    assert type(cfg.lr) is float
    assert make("--compile=False", "--n_layer=1e3", "--compile") == Config(n_layer=1000)
    assert make("--n_layer=1_000").n_layer == 1000
    assert changed(make("--lr=1e-3")) == {"lr": 1e-3}


def test_file_imports_computes_and_is_overridden(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("import math\nfrom pathlib import Path\n_half = 4\nn_layer = _half * 2\nlr = 1\nname = 'x'\n")
    cfg = make(str(path), "--name=y")
    assert (cfg.n_layer, cfg.lr, cfg.name) == (8, 1.0, "y")


@pytest.mark.parametrize(
    "word, message",
    [
        ("--lerning_rate=1", "unknown setting --lerning_rate; did you mean lr?"),
        ("--zzz=1", "unknown setting --zzz"),
        ("--n_layers=1", "did you mean n_layer?"),
        ("--lr=abc", "lr=abc is not a float"),
        ("--n_layer=0.5", "n_layer=0.5 is not an int"),
        ("--n_layer=None", "n_layer=None is not an int"),
        ("--n_layer=inf", "n_layer=inf is not an int"),
        ("--kind=c", "kind=c is not one of a, b"),
        ("--compile=maybe", "compile=maybe is not a bool"),
        ("--lr", "--lr needs a value, written --lr=VALUE"),
        ("no/such.py", "no/such.py: no such config file"),
    ],
)
def test_bad_words(word, message):
    with pytest.raises(UserError, match="command line|no such") as error:
        make(word)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("n_layer = 2\nlr = (\n", "c.py:2: "),
        ("n_layer = 2\nn_head = 3\n", "c.py:2: unknown setting n_head"),
        ("n_layer = 'two'\n", "c.py:1: n_layer=two is not an int"),
        ("\nlr = 1 / 0\n", "c.py:2: ZeroDivisionError"),
        ("\nlr = x\n", "c.py:2: NameError"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        make(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_help_lists_every_setting():
    text = describe(Config)
    assert "--n_layer=12" in text and "an int: blocks" in text
    assert "--kind=a" in text and "one of a, b: which one" in text and "an int or None: None: all" in text
