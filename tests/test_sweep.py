"""measure/sweep.py: a list's runs, side by side and over ranks, their small logs, and what it refuses."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, stdlib_bytes, write_shard

from configurator import UserError
from measure import sweep
from run.history import read

LIST = """
# two runs that share words, and one that cannot train
* config/test.py --device=cpu --tokenizer=bytes --vocab_size=257 --max_steps=12 --eval_tokens=256
plain_0.1         --dropout=0.1
two      ranks=2  --seed=7  # over gloo
wrong             --lr=-1
"""


def run_sweep(folder, *words):
    command = [sys.executable, "measure/sweep.py", folder / "list.txt", f"--out_dir={folder}/out"]
    command += [f"--data_dir={folder}", f"--keep={folder}/kept", "--gpus=2", "--lines=3", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_runs_of_a_list(tmp_path, capsys):
    write_shard(tmp_path / "py_val_000000.bin", stdlib_bytes(3_000))
    write_shard(tmp_path / "py_train_000001.bin", stdlib_bytes(20_000))
    (tmp_path / "list.txt").write_text(LIST)
    done = run_sweep(tmp_path)
    assert done.returncode == 1 and "wrong" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert (
        not (tmp_path / "kept/wrong.jsonl").exists() and "lr" in (tmp_path / "out/wrong.console").read_text()
    )

    whole, small = read(tmp_path / "out/two"), read(tmp_path / "kept/two.jsonl")
    start = small["start"][0]
    assert start["seed"] == 7 and start["step_ms"] > 0 and "2 x cpu" in dict(start["rows"])["device"]
    assert str(tmp_path) not in json.dumps(start)  # a path says nothing on another machine
    assert small["val"].keys() == whole["val"].keys() and max(small["train"]) == 12
    assert all(abs(small["val"][step]["loss"] - line["loss"]) < 1e-5 for step, line in whole["val"].items())
    assert f"loss {whole['val'][12]['loss']:.4f}" in done.stdout

    (tmp_path / "list.txt").write_text(LIST + "* \nmemory bench.py memory config/test.py --world=2")
    again = run_sweep(tmp_path)  # only what has no small log
    assert (
        again.stdout.count("GPU") == 2 and "config/test.py" in again.stdout and "--seed=7" not in again.stdout
    )
    log = (tmp_path / "kept/memory.log").read_text().splitlines()
    assert log[0].startswith("$ python bench.py memory") and log[-1] in again.stdout
    kept = dict(
        out_dir=str(tmp_path / "out"), keep=str(tmp_path / "kept"), gpus=1
    )  # with show they do not matter
    assert sweep.main(sweep.Config(show=True, **kept), [tmp_path / "list.txt"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:2] == again.stdout.splitlines()[-4:-2] and "GPU" not in shown
    (tmp_path / "list.txt").write_text("memory bench.py memory config/test.py --world=2")
    assert sweep.main(sweep.Config(**kept), [tmp_path / "list.txt"]) == 0  # every run has its log


@pytest.mark.parametrize(
    ("text", "words"),
    [("a\na --lr=1", "two runs are named a"), ("a ranks=x", "list.txt:1"), (None, "a list")]
    + [("a\nb --lr='1", "list.txt:2: No closing quotation"), ("a code=nowhere", "a: no train.py in nowhere")],
)
def test_a_wrong_list(tmp_path, text, words):
    if text is not None:
        (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError, match=words):
        sweep.main(sweep.Config(gpus=2, keep=str(tmp_path / "kept")), [tmp_path / "list.txt"])
    assert not (tmp_path / "kept").exists()


def test_a_run_over_more_gpus_than_there_are_is_left_out(tmp_path, capsys):
    (tmp_path / "list.txt").write_text("a ranks=3")
    assert sweep.main(sweep.Config(gpus=2, keep=str(tmp_path / "kept")), [tmp_path / "list.txt"]) == 1
    assert capsys.readouterr().out.startswith(
        "a                            left out: it needs 3 GPUs, gpus=2\n"
    )


def test_a_list_without_runs_is_done(tmp_path, capsys):
    (tmp_path / "list.txt").write_text("# nothing yet\n")
    assert sweep.main(sweep.Config(keep=str(tmp_path / "kept")), [tmp_path / "list.txt"]) == 0
    assert not capsys.readouterr().out


def test_the_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep.visible(sweep.Config(gpus=3)) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert sweep.visible(sweep.Config(gpus=2)) == ["4", "6"] and len(sweep.visible(sweep.Config(gpus=8))) == 3


def test_the_lists_in_the_repository_are_of_settings_that_exist():
    from configurator import configure
    from settings import Config, check

    runs = [run for path in sorted((ROOT / "results/modern").glob("*.txt")) for run in sweep.read_list(path)]
    assert len({run.name for run in runs}) == len(runs) > 40
    for run in runs:
        configure(Config, run.words[1:], check)
