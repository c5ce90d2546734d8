"""configurator.py: values, files, help, and every mistake as one line that names its place."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
from conftest import ROOT

import settings
from configurator import columns, configure, describe
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


@pytest.mark.fault(14, 15)
def test_defaults_and_flags():
    assert make() == Config()
    cfg = make("--n_layer=3", "--lr=1", "--name=a=b=c", "--no_compile", "--kind=b", "--top_k=None")
    assert cfg == Config(3, 1.0, "a=b=c", False, "b", None)
    assert type(cfg.lr) is float
    assert make("--compile=False", "--n_layer=1e3", "--compile") == Config(n_layer=1000)
    assert make("--n_layer=1_000").n_layer == 1000
    assert make(*"--n_layer 3 --lr -1 --compile False --name x".split()) == Config(
        3, -1.0, "x", False
    )


def test_a_home_in_a_path_is_expanded(monkeypatch):
    """The shell expands --key ~/x alone; a prompt keeps its text."""
    from sample import Config as SampleConfig

    monkeypatch.setenv("HOME", "/home/me")
    words = ["--data_dir=~/a:0.5,~/b:0.5", "--init_from=hf:~/w", "--out_dir=~", "--tokenizer=a~/b"]
    cfg = configure(settings.Config, words)
    assert (cfg.data_dir, cfg.init_from) == ("/home/me/a:0.5,/home/me/b:0.5", "hf:/home/me/w")
    assert (cfg.out_dir, cfg.tokenizer) == ("/home/me", "a~/b")
    cfg = configure(SampleConfig, ["--checkpoint=~/x", "--prompt=~/x"])
    assert (cfg.checkpoint, cfg.prompt) == ("/home/me/x", "~/x")


def test_a_number_or_a_word():
    """Also where typing makes typing.Union of it, not types.UnionType, as Python 3.11 does."""

    @dataclass
    class Rows:
        rows: int | Literal["auto"] = 4  # as many

    assert [configure(Rows, [f"--rows={word}"]).rows for word in ("auto", "8", "1e3")] == [
        "auto",
        8,
        1000,
    ]
    for word in ("aut", "0.5", "None"):
        with pytest.raises(UserError, match=f"rows={word} is not an int or auto$"):
            configure(Rows, [f"--rows={word}"])


def test_file_imports_computes_and_is_overridden(tmp_path):
    text = (
        "from math import sqrt\nfrom pathlib import Path\n_half = sqrt(16)\n"
        "n_layer = int(_half * 2)\nlr = 1\nname = 'x'\n"
    )
    (tmp_path / "c.py").write_text(text)
    cfg = make(str(tmp_path / "c.py"), "--name=y")
    assert (cfg.n_layer, cfg.lr, cfg.name) == (8, 1.0, "y")
    assert make(str(tmp_path / "c"), "--name=y") == cfg


PRINTS = r"""
import sys
from dataclasses import dataclass
import configurator
from system import errors

@dataclass
class Config:
    name: str = "x"
    needed: bool = False

def main(cfg):
    for _ in range(3):
        (errors.say if cfg.needed else print)("caf\u00e9 \u6771\u4eac \U0001f642")
    errors.warn("\u6771\u4eac")
    print("to the end", file=sys.stderr)

configurator.run(main, Config)
"""


def printed(redirect, *words, **environment):
    """(exit code, stdout, stderr) of PRINTS in a shell; UNREAD is a pipe whose reader is gone."""
    reader, unread = os.pipe()
    os.close(reader)
    command = [
        "bash",
        "-c",
        f'"$0" -c "$@" {redirect.replace("UNREAD", str(unread))}',
        sys.executable,
        PRINTS,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([*command, *words], env=env, capture_output=True, pass_fds=[unread])
    os.close(unread)
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.fault(93)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_what_a_console_cannot_show_is_escaped(encoding):
    code, out, err = printed("", "--needed", PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C")
    assert code == 0 and err.endswith("to the end\n")
    words = "caf\u00e9 \u6771\u4eac \U0001f642\n" * 3
    assert out == words.encode(encoding, "backslashreplace")


@pytest.mark.fault(93)
def test_a_script_ends_quietly_where_nobody_reads():
    assert printed(">&UNREAD", "--needed")[::2] == (141, "")


def test_a_config_file_is_utf_8_in_any_locale(tmp_path):
    (tmp_path / "c.py").write_text("name = 'caf\u00e9'  # \u6771\u4eac\n", "utf-8")
    ascii = dict(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    assert printed("", str(tmp_path / "c.py"), **ascii)[0] == 0


@pytest.mark.parametrize("word, message", [
    ("--n_layers=1", "did you mean n_layer?"),
    ("--lr=abc", "lr=abc is not a float"),
    ("--n_layer=0.5", "n_layer=0.5 is not an int"),
    ("--n_layer=None", "n_layer=None is not an int"),
    ("--n_layer=inf", "n_layer=inf is not an int"),
    ("--kind=c", "kind=c is not a or b"),
    ("--compile=maybe", "compile=maybe is not a bool"),
    ("--lr", "--lr needs a value, written --lr=VALUE"),
    ("no/such.py", "no/such.py: no such config file"),
    ("config/gpt2_124", "config/gpt2_124: no such config file; recipes: gpt2_124m, "),
    ("lr=1", "lr=1: no such config file; a setting is written --lr=1"),
    ("--config=config/test.py", "did you mean the file's path alone, without --config=?"),
])  # fmt: skip
@pytest.mark.fault(13, 14, 15)
def test_bad_words(word, message):
    with pytest.raises(UserError, match="command line|no such") as error:
        make(word)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("n_layer = 2\nlr = (\n", "c.py:2: "),
    ("n_layer = 2\nn_head = 3\n", "c.py: unknown setting n_head"),
    ("n_layer = 'two'\n", "c.py: n_layer=two is not an int"),
    ("\nlr = 1 / 0\n", "c.py:2: ZeroDivisionError"),
    ("\nlr = x\n", "c.py:2: NameError"),
    ("lr = float('nan')", "c.py: lr=nan is not a float"),
    ("\0", "c.py:1: source code"),
])  # fmt: skip
@pytest.mark.fault(17)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.py"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        make(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_by_its_name_alone_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configure(settings.Config, ["llama_124m", "--seed", "3"]).mlp == "swiglu"
    assert configure(settings.Config, ["--wandb", "llama_124m"]).wandb


@pytest.mark.fault(15, 16)
def test_words_that_are_no_config_files():
    @dataclass
    class Words(Config):
        words = ()

    cfg = configure(Words, ["a", "--compile", "b", "--name", "c", "d"])
    assert cfg.words == ["a", "b", "d"] and cfg.name == "c"


@pytest.mark.fault(18)
def test_all_mistakes_at_once(tmp_path):
    (tmp_path / "c.py").write_text("n_layer = 'two'\nlerning_rate = 1\nlr = 2\n")
    with pytest.raises(UserError) as error:
        make(str(tmp_path / "c.py"), "--lr=abc", "no/such.py", "--kind", "--zzz=1")
    text = str(error.value)
    found = ["c.py: n_layer=two", "c.py: unknown setting lerning_rate"]
    places = [
        text.index(word) for word in [*found, "lr=abc", "no/such.py", "--kind needs", "setting zzz"]
    ]
    assert places == sorted(places) and "\n" not in text


def test_sections_and_comments_of_the_class_before_those_of_its_base():
    @dataclass
    class More(Config):
        alone: int = 1
        # Second
        lr: float = 1e-3  # another default
        kind: Literal["a", "b"] = "b"  # another one

    rows = describe(More, "What it is.").splitlines()
    assert rows[:3] == ["What it is.", "", "Settings:"] and rows[3].split() == ["--alone=1"]
    assert rows[5] == "Second:" and "--lr=0.001" in rows[6] and rows[6].endswith(" another default")
    assert "a|b: another one" in rows[7] and rows[9] == "Settings:" and "--n_layer=12" in rows[10]
    assert sum("--lr=" in row for row in rows) == 1


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


def test_a_setting_of_none_needs_no_none_in_its_type():
    """As nanoGPT's users write it."""

    @dataclass
    class Plain:
        name: str = None  # of a thing
        size: int = None  # of it

    assert configure(Plain, ["--name=None", "--size=3"]) == Plain(None, 3)
    assert configure(Plain, ["--size", "None"]) == Plain()
    assert re.search(r"--size=None +int: of it", describe(Plain))


@pytest.mark.parametrize(
    "name", "fineweb sample hellaswag validate convert plot bench bench:step".split()
)
def test_help_of_every_script_is_instant_and_fits_the_terminal(name):
    name, *command = name.split(":")
    done = script([*command, "--help"], NO_TORCH, name=f"{name}.py")
    assert done.returncode == 0 and f"python {name}.py" in done.stdout, done.stderr
    rows = [*done.stdout.splitlines(), ""]
    assert max(map(len, rows)) <= 80
    # a formatter may move a comment from its setting's line
    for row, below in itertools.pairwise(rows):
        if row.startswith("  --"):
            assert row[28:].strip() and " " in row.strip() or below.startswith(" " * 28), row
    done = script([*command, "--lr=x", "--limit=x"], NO_TORCH, name=f"{name}.py")
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: "), done


def test_making_shards_needs_no_torch(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 40)
    words = [
        f"--dataset={tmp_path / 'a.jsonl'}",
        "--tokenizer=bytes",
        f"--out_dir={tmp_path / 'd'}",
    ]
    code = "assert 'torch' not in sys.modules"
    done = script(words, code, name="fineweb.py", HF_DATASETS_CACHE=str(tmp_path / "hf"))
    assert done.returncode == 0 and (tmp_path / "d/manifest.json").exists(), done.stderr


def test_help_and_mistakes_of_train_need_no_torch():
    done = script(["--help"], NO_TORCH)
    said = done.stdout
    assert done.returncode == 0 and "torchrun" in said and "--n_layer=12" in said, done.stderr
    assert max(map(len, said.splitlines())) <= 80
    wide = script(["--help"], COLUMNS="200").stdout.splitlines()
    assert 100 < max(map(len, wide)) <= 110
    done = script(["config/test", "--lerning_rate=1"], NO_TORCH)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr == "error: command line: unknown setting lerning_rate; did you mean lr?\n"
    done = script(["config/test", "--n_head=5"], NO_TORCH)
    assert (
        done.returncode == 2 and done.stderr == "error: n_embd=64 must be divisible by n_head=5\n"
    )


def test_help_breaks_between_words():
    rows = describe(Config, "", 40).splitlines()
    assert rows[:3] == [
        "Settings:",
        "  --n_layer=12              blocks",
        "  --lr=0.0006               peak",
    ]
    assert rows[3:5] == [" " * 28 + "learning", " " * 28 + "rate"]


def test_the_folder_of_a_run_as_a_word_and_a_missing_package_are_one_line(tmp_path):
    done = script([str(tmp_path)], name="sample.py")
    assert done.stderr.endswith(
        f"no such config file; a run's folder is given as --checkpoint={tmp_path}\n"
    )
    words = [sys.executable, "-S", "train.py", "--help"]  # -S: without the installed packages
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.endswith("./setup.sh, then . .venv/bin/activate\n")


def test_nanogpts_names_suggest_ours(tmp_path):
    (tmp_path / "train_x.py").write_text("seed = 1\nmax_iters = 600000\n")
    with pytest.raises(UserError) as error:
        configure(
            settings.Config, [str(tmp_path / "train_x.py"), "--learning_rate", "1e-3", "--n_head=x"]
        )
    assert [text.rpartition("/")[2] for text in error.value.args] == [
        "train_x.py: unknown setting max_iters; did you mean max_steps?",
        "command line: unknown setting learning_rate; did you mean lr?",
        "command line: n_head=x is not an int",
    ]


def test_a_rank_tells_its_mistake_and_its_report_has_it(tmp_path):
    """Another rank than 0 tells it later: torchrun may end it before."""
    for rank, said in (("0", "error: command"), ("1", "error: rank 1: command")):
        report = tmp_path / rank
        done = script(["--lr=x"], RANK=rank, WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(report))
        assert done.returncode == 2 and done.stderr == f"{said} line: lr=x is not a float\n"
        message = json.loads(report.read_text())["message"]  # as torch.distributed.elastic reads it
        assert message["message"] == "command line: lr=x is not a float"
        assert int(message["extraInfo"]["timestamp"]) > 0


def test_ctrl_c_is_one_line_and_130():
    code = "import configurator, dataclasses, signal\n"
    # a background job ignores it
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "empty = dataclasses.make_dataclass('Config', [])\n"
    code += "configurator.run(lambda cfg: signal.raise_signal(signal.SIGINT), empty)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (130, "stopped by SIGINT")


@pytest.mark.fault(106)
def test_ctrl_c_in_the_imports_is_one_line_and_130():
    code = "import configurator, signal\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "signal.raise_signal(signal.SIGINT)"
    for rank, said in (("0", "stopped by SIGINT"), ("1", "")):
        pipes = dict(env=os.environ | {"RANK": rank}, capture_output=True, text=True, timeout=60)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, **pipes)
        assert (done.returncode, done.stderr.strip()) == (130, said)


def test_a_report_on_a_full_disk_costs_itself_alone():
    done = script(["--lr=x"], RANK="0", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE="/dev/full")
    assert done.returncode == 2 and done.stderr == "error: command line: lr=x is not a float\n"


@dataclass
class Several:
    words = ()
    against: tuple[str, ...] = ()  # other folders
    dark: bool = False


def test_a_setting_may_take_all_words_up_to_the_next_setting():
    for line, words, against in [
        ("a b --against c d --dark", ["a", "b"], ("c", "d")),
        ("--against c d --dark a", ["a"], ("c", "d")),
        ("--against=c a b --dark", ["a", "b"], ("c",)),
    ]:
        cfg = configure(Several, line.split())
        assert (cfg.words, cfg.against, cfg.dark) == (words, against, True)
    with pytest.raises(UserError, match="--against needs a value, written --against=VALUE"):
        configure(Several, ["a", "--against", "--dark"])
    assert re.search(r"--against=\.\.\. +other folders", describe(Several))


ON_WINDOWS = """
import configurator, runpy, sys
import matplotlib.figure, matplotlib.ticker, numpy
del sys.modules["configurator"], sys.modules["system.errors"]
sys.modules |= {"resource": None, "fcntl": None}
sys.platform = "win32"
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code)
"""


def test_windows_gets_one_line_that_names_wsl2():
    """Every script, before it imports what Windows lacks."""
    scripts = sorted(path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text())
    words = [sys.executable, "-c", ON_WINDOWS, *scripts]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (
        done.stdout.split() == [word for script in scripts for word in (script, "2")]
        and len(scripts) > 7
    )
    [line] = {*done.stderr.splitlines()}
    assert line.startswith("error: Windows lacks") and "WSL2" in line


def test_a_terminal_may_be_narrow(monkeypatch):
    """Comments begin at column 28, which leaves them no width in a terminal of as many."""
    monkeypatch.setenv("COLUMNS", "28")
    assert "--out_dir" in describe(settings.Config, "", columns())
