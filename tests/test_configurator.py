"""configurator.py: values, files, help, and every mistake as one line that names its place."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from conftest import ROOT

import settings
from configurator import configure
from system.errors import UserError


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
    assert make("--name=~/a,~b:~").name == f"{Path.home()}/a,~b:{Path.home()}"
    cfg = make(*"--n_layer 3 --lr -1 --compile=False --name x".split())
    assert cfg == Config(3, -1.0, "x", False)


def test_a_number_or_a_word():
    """Also where typing makes typing.Union of it, not types.UnionType, as Python 3.11 does."""

    @dataclass
    class Rows:
        rows: int | Literal["auto"] = 4  # as many

    found = [configure(Rows, [f"--rows={word}"]).rows for word in ("auto", "8", "1e3")]
    assert found == ["auto", 8, 1000]
    with pytest.raises(UserError, match="rows=0.5 .*auto"):
        configure(Rows, ["--rows=0.5"])


def test_file_imports_computes_and_is_overridden(tmp_path):
    text = "from math import sqrt\n_half = sqrt(16)\nn_layer = int(_half * 2)\nlr = 1\nname = 'x'\n"
    (tmp_path / "c.py").write_text(text)
    cfg = make(str(tmp_path / "c.py"), "--name=y")
    assert (cfg.n_layer, cfg.lr, cfg.name) == (8, 1.0, "y")
    assert make(str(tmp_path / "c"), "--name=y") == cfg


@pytest.mark.parametrize("word, message", [
    ("--n_layers=1", "n_layer?"),
    ("--lr=abc", "lr=abc"),
    ("--n_layer=0.5", "n_layer=0.5"),
    ("--n_layer=inf", "n_layer=inf"),
    ("--kind=c", "kind=c"),
    ("--compile=maybe", "compile=maybe"),
    ("--lr", "--lr=VALUE"),
    ("no/such.py", "no/such.py"),
    ("config/gpt2_124", "gpt2_124m"),
    ("lr=1", "--name=value"),
])  # fmt: skip
def test_bad_words(word, message):
    with pytest.raises(UserError) as error:
        make(word)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("n_layer = 'two'\nn_head = 3\n")
    with pytest.raises(UserError) as error:
        make(str(path))
    unknown, mistyped = sorted(error.value.args, reverse=True)
    assert "c.py: unknown setting n_head" in unknown and "c.py: n_layer=two" in mistyped


def test_a_recipe_by_its_name_alone_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configure(settings.Config, ["llama_124m", "--seed", "3"]).mlp == "swiglu"
    assert configure(settings.Config, ["--wandb", "llama_124m"]).wandb


def script(words, code="", name="train.py", **env):
    """A script, then `code` in the same process; its CompletedProcess."""
    before = f"import runpy, sys\nsys.argv = [{name!r}, *{words!r}]\ncode = 0\n"
    run = f"try:\n    runpy.run_path({name!r}, run_name='__main__')\n"
    run += "except SystemExit as stop:\n    code = stop.code\n"
    words = [sys.executable, "-c", f"{before}{run}{code}\nsys.exit(code)"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env}
    )


NO_TORCH = "assert not {'torch', 'datasets'}.intersection(sys.modules)"  # slow to import


@pytest.mark.parametrize(
    "name", "train fineweb sample hellaswag validate convert plot bench".split()
)
def test_help_of_every_script_is_instant_and_fits_the_terminal(name):
    done = script(["--help"], NO_TORCH, name=f"{name}.py")
    assert done.returncode == 0 and f"python {name}.py" in done.stdout, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_shards_and_the_estimate_of_memory_need_no_torch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 40)
    words = [f"--dataset={tmp_path}/a.jsonl", "--tokenizer=bytes", f"--out_dir={tmp_path}/d"]
    code = "assert 'torch' not in sys.modules"
    done = script(words, code, name="fineweb.py", HF_DATASETS_CACHE=str(tmp_path / "hf"))
    assert done.returncode == 0 and (tmp_path / "d/manifest.json").exists(), done.stderr
    done = script(["memory", "config/gpt2_124m.py"], NO_TORCH, name="bench.py")
    assert done.returncode == 0 and "GiB" in done.stdout, done.stderr


def test_a_mistake_needs_no_torch():
    done = script(["config/test", "--n_head=5"], NO_TORCH)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "n_head=5" in done.stderr
    done = script(["mem"], NO_TORCH, name="bench.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
