"""run/logger.py: figures, the time that is left, warnings, and a log that stays readable."""

import json
import math
import os
import runpy
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import ranks
import saved
import torch
from conftest import flags, read_log, train_here

from run import logger
from run.logger import SETTLED, Logger, progress
from scale.parallel import World
from settings import Config

WORLD = World(0, 1, torch.device("cpu"))


def make(tmp_path, log_interval=1, settings=None, **options):
    cfg = Config(max_steps=1000, log_interval=log_interval, **settings or {})
    log = Logger(WORLD, cfg, max_skipped=0)
    (tmp_path / "run").mkdir(exist_ok=True)
    log.analysis = SimpleNamespace(mfu=lambda tokens_per_s, devices: None)
    log.open(tmp_path / "run", {"log_interval": log_interval}, **options)
    return log


def take(log, step, seconds, loss=3.0, norm=1.0, tokens=None, **extras):
    """A step of 1,000 tokens in `seconds`; the last figure is the time of the step before."""
    began = SimpleNamespace(time=0.0, event=None)
    moment = SimpleNamespace(since=lambda earlier: seconds)
    means = SimpleNamespace(get=lambda: (loss, norm, extras, [0.0]), moment=moment)
    log._read(logger.Launched(step, tokens or 1000 * step, 1e-3, began, means))


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]


def test_the_first_step_of_a_process_is_left_out_of_the_time_that_is_left(tmp_path, capsys):
    log = make(tmp_path)
    log.tokens = 500_000
    # a resumed run, whose first step compiles
    for step, seconds in ((501, 60.0), (502, 0.5), (503, 0.5)):
        take(log, step, seconds)
    ends = [line.split("eta ")[1] for line in capsys.readouterr().out.splitlines() if "eta" in line]
    assert ends == ["n/a", "04:09", "04:08"]
    take(log, 504, 1.0)  # the mean is 0.67 s
    assert capsys.readouterr().out.endswith("eta 05:30\n")


@pytest.mark.parametrize("graph, expected", [(False, 6 * (30.0 + 4) / 5), (True, 6.0)])
def test_steps_that_compile_or_capture_count_as_the_mean_of_the_others(tmp_path, graph, expected):
    log = make(tmp_path, settings=dict(cuda_graph=graph, max_seconds=100.0))
    assert log.elapsed(3) == 0
    # compiles; captures in the fourth
    for step, seconds in enumerate((60.0, 1.0, 1.0, 30.0, 1.0, 1.0), 1):
        take(log, step, seconds)
    assert log.elapsed(6) == pytest.approx(expected) and log.elapsed(7) == pytest.approx(
        expected * 7 / 6
    )


def test_a_step_that_compiles_a_larger_micro_batch_is_not_timed(tmp_path):
    """batch_schedule: from step 3 on a micro-batch has two rows of 500 tokens."""
    size = dict(block_size=500, batch_size=2, batch_tokens=1000, batch_schedule="500:0.5")
    log = make(tmp_path, settings=dict(max_seconds=100.0, **size))
    for step, seconds, tokens in ((1, 9.0, 500), (2, 1.0, 1000), (3, 13.0, 2000), (4, 2.0, 3000)):
        take(log, step, seconds, tokens=tokens)
    assert log.elapsed(4) == 4 * (1.0 + 2.0) / 2


def test_lines_at_an_interval_and_all_in_the_log(tmp_path, capsys):
    log = make(tmp_path, log_interval=5)
    for step in range(1, 11):
        take(log, step, 0.5)
    shown = [line[:14] for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert shown == ["step    1/1000", "step    5/1000", "step   10/1000"]
    found = lines(tmp_path)
    assert [line["step"] for line in found] == list(range(1, 11)) and found[0]["tok_per_s"] == 2000
    assert found[3]["tokens"] == 4000 and found[0]["mfu"] is None
    assert json.loads((tmp_path / "run" / "config.json").read_text())["log_interval"] == 5


def test_extras_have_a_line_of_their_own(tmp_path, capsys):
    log = make(tmp_path, log_interval=2)
    for step in (1, 2, 3):
        take(log, step, 0.5, entropy=step / 4, z=math.inf)
    said = capsys.readouterr().out.splitlines()
    assert said[1::2] == [f"     entropy {value} | z inf" for value in (0.25, 0.5)]
    assert [line["extras"] for line in lines(tmp_path)] == [
        {"entropy": step / 4, "z": None} for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("step, words", [(10, ""), (1000, "a larger --max_steps and ")])
def test_the_summary_says_how_to_go_on(tmp_path, capsys, step, words):
    log = make(tmp_path)
    log.saved(step, tmp_path)
    log.close(step, step < 1000)
    assert (
        f"{step}; to go on, the same command with {words}--resume=auto\n" in capsys.readouterr().out
    )


def test_a_log_that_was_cut_short_stays_readable_and_has_no_nan(tmp_path):
    make(tmp_path).record("train", 1, loss=1.0)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "tr')
    make(tmp_path).record("train", 2, loss=float("inf"), norm=float("nan"))
    assert lines(tmp_path)[1:] == [{"kind": "train", "step": 2, "loss": None, "norm": None}]


@pytest.mark.fault(61)
def test_a_full_disk_under_the_log_costs_its_lines(tmp_path, capsys):
    log = make(tmp_path)
    log.record("train", 1, loss=1.0)
    kept, log.file = log.file, open("/dev/full", "ab", buffering=0)
    for step in (2, 3):
        log.record("train", step, loss=1.0)
    log.file = kept
    log.record("val", 4, loss=1.0, folders={"a": {"stderr": math.nan}})
    out = capsys.readouterr().out
    assert out.count("warning: /dev/full: No space left on device; training goes on") == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 4]
    assert lines(tmp_path)[1]["folders"] == {"a": {"stderr": None}}


class FailingWandb:
    id = "1"

    def finish(self):
        raise RuntimeError

    def init(self, **settings):
        raise ConnectionError


def test_wandb_has_the_names_of_its_own_variables(tmp_path, monkeypatch):
    given = []
    run = SimpleNamespace(id="1", define_metric=lambda *names, **options: None)
    init = lambda **options: (
        given.append([options[key] for key in ("project", "name", "dir")]) or run
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for own in (
        {},
        dict(WANDB_PROJECT="ours", WANDB_NAME="gate"),
        dict(WANDB_PROJECT=""),
    ):
        for key in ("WANDB_PROJECT", "WANDB_NAME"):
            monkeypatch.delenv(key, raising=False)
        for key, value in own.items():
            monkeypatch.setenv(key, value)
        make(tmp_path, wandb=True)
    usual = ["pretrain", "run", tmp_path / "run"]
    assert given == [usual, ["ours", "gate", tmp_path / "run"], usual]


@pytest.mark.fault(33, 61)
def test_wandb_that_fails_without_a_word_costs_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FailingWandb())
    log = make(tmp_path, wandb=True)
    assert (
        "wandb is off (ConnectionError: ConnectionError); log.jsonl goes on"
        in capsys.readouterr().out
    )
    log.wandb = FailingWandb()
    log.close(1, False)
    assert "wandb is off (RuntimeError: RuntimeError)" in capsys.readouterr().out


@pytest.mark.fault(32)
def test_a_spike_is_told_and_noise_is_not(tmp_path, capsys):
    log = make(tmp_path)
    log.saved(150, tmp_path)
    for step in range(1, 4 * SETTLED):
        log._look_for_spike(step, 8 / math.sqrt(step) + 0.05 * math.sin(step**2))
    assert "warning" not in capsys.readouterr().out
    log._look_for_spike(400, 2.0)
    log._look_for_spike(401, 2.0)
    [warning] = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: step 400: loss 2.0000 is ")
    assert warning.endswith("last checkpoint: step 150")
    _, line = lines(tmp_path)
    assert (line["kind"], line["step"]) == ("spike", 400) and line["z"] > 6


def test_a_spike_before_the_first_checkpoint(tmp_path, capsys):
    log = make(tmp_path)
    for step in range(SETTLED):
        log._look_for_spike(step, 1.0)
    log._look_for_spike(SETTLED, 2.0)
    assert capsys.readouterr().out.endswith("last checkpoint: none yet\n")


@pytest.mark.parametrize("terminal, silent", [(True, 60), (True, 0.02), (False, 0.02)])
def test_a_slow_loop_says_how_far_it_is_and_stops_when_asked(monkeypatch, capsys, terminal, silent):
    monkeypatch.setattr(logger, "SILENT", silent)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    seen = []
    for item in progress(range(50), "validation", stop=lambda: len(seen) == 10, bar=False):
        seen.append(item)
        time.sleep(0.01)
    said = capsys.readouterr().err
    assert seen == list(range(10))
    assert ("/50 [" in said) == (terminal and silent < 1)
    assert said or not terminal or silent > 1


def test_a_narrow_terminal_gets_shorter_lines_and_a_pipe_whole_ones(tmp_path, monkeypatch, capsys):
    log = make(tmp_path)
    take(log, 1, 0.5)
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    take(log, 2, 0.5)
    logger.show([("device", "word " * 40)])
    lines = capsys.readouterr().out.splitlines()
    assert "| lr 1.00e-03 |" in whole and "mfu" not in whole
    assert all(len(line) <= 80 for line in lines) and "lr" not in lines[0] and "tok/s" in lines[0]
    assert len(lines) == 5 and lines[2].startswith(" " * 13 + "word")


def train_without_a_reader(words):
    """For ranks.attempt: train.py on an ASCII console whose reader, such as a tee, is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="ascii")
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="ascii")
    sys.argv = ["train.py", *map(str, words)]
    runpy.run_path("train.py", run_name="__main__")


@pytest.mark.fault(93)
def test_a_run_outlives_its_console(data_dir, tmp_path):
    """The samples of an untrained model are not ASCII."""
    words = flags(data_dir, tmp_path / "run", max_steps=2, sample_interval=1, compile=False)
    assert ranks.attempt(0, train_without_a_reader, words)[0].codes == [0]
    kinds = [entry["kind"] for entry in read_log(tmp_path / "run")]
    assert kinds.count("train") == 2 and kinds.count("sample") == 2 and kinds[-1] == "done"


@pytest.mark.fault(103)
def test_a_run_whose_folder_is_removed_ends_at_its_next_save(data_dir, tmp_path, monkeypatch):
    log = Logger.step

    def step(self, state, *more):
        if state.step == 3:
            shutil.rmtree(self.out_dir)
        return log(self, state, *more)

    monkeypatch.setattr(Logger, "step", step)
    with pytest.raises(saved.Error, match="cannot be written"):
        train_here(data_dir, tmp_path / "run", max_steps=5, save_interval=2)
