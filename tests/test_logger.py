"""run/logger.py: figures, peaks by device, the time that is left, and a log that stays readable."""

import json
import sys

import pytest
import torch

from run import logger
from run.logger import Logger
from scale.parallel import World
from settings import Config

CPU = torch.device("cpu")


def make(tmp_path, **settings):
    cfg = Config(out_dir=str(tmp_path / "run"), batch_tokens=1000, max_steps=1000, **settings)
    return Logger(cfg, World(0, 1, CPU), flops_per_token=1e6, precision="fp32")


def test_the_first_step_of_a_process_is_left_out_of_the_time_that_is_left(tmp_path, capsys):
    log = make(tmp_path)
    for step, seconds in ((501, 60.0), (502, 0.5), (503, 0.5)):  # a resumed run, whose first step compiles
        log.step(step, 3.0, 1e-3, 1.0, seconds)
    ends = [line.split("eta ")[1] for line in capsys.readouterr().out.splitlines()]
    assert ends == ["n/a", "4m09s", "4m08s"]
    log.step(504, 3.0, 1e-3, 1.0, 1.0)  # a running average: 0.55 s
    assert capsys.readouterr().out.endswith("eta 4m32s\n")
    assert make(tmp_path).eta(0) == "0.0s"


def test_lines_at_an_interval_and_all_in_the_log(tmp_path, capsys):
    log = make(tmp_path, log_interval=5)
    for step in range(1, 11):
        log.step(step, 3.0, 1e-3, 1.0, 0.5)
    assert [line[:14] for line in capsys.readouterr().out.splitlines()] == [
        "step    5/1000",
        "step   10/1000",
    ]
    log.close(10, None, 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11)) and lines[0]["tok_per_s"] == 2000
    assert lines[3]["tokens"] == 4000 and lines[0]["mfu"] is None
    assert json.loads((tmp_path / "run" / "config.json").read_text())["log_interval"] == 5


@pytest.mark.parametrize("step, words", [(10, ""), (1000, "a larger --max_steps and ")])
def test_the_summary_says_how_to_go_on(tmp_path, capsys, step, words):
    make(tmp_path).close(step, step, 5)
    assert (
        f"at step {step}; to go on, the same command with {words}--resume=auto\n" in capsys.readouterr().out
    )


def test_a_loss_that_is_no_number_is_null_in_the_log(tmp_path):
    log = make(tmp_path)
    log.step(1, float("nan"), 1e-3, float("inf"), 0.1)
    log.close(1, None, 1)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = [
        json.loads(text, parse_constant=refuse)
        for text in (tmp_path / "run/log.jsonl").read_text().splitlines()
    ][-1]
    assert (line["kind"], line["loss"], line["norm"], line["lr"]) == ("train", None, None, 1e-3)


def test_a_log_that_was_cut_short_stays_readable(tmp_path):
    make(tmp_path).record("train", 1, loss=1.0)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "tr')
    make(tmp_path).record("train", 2, loss=float("inf"))
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.fault(61)
def test_a_full_disk_under_the_log_costs_its_lines(tmp_path, capsys):
    log = make(tmp_path)
    log.record("train", 1, loss=1.0)
    kept, log.file = log.file, open("/dev/full", "ab", buffering=0)
    for step in (2, 3):
        log.record("train", step, loss=1.0)
    log.file = kept
    log.record("train", 4, loss=1.0)
    out = capsys.readouterr().out
    assert out.count("warning: /dev/full: No space left on device; training goes on") == 1
    assert [json.loads(line)["step"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()] == [
        1,
        4,
    ]


class FailingWandb:
    id = "1"

    def log(self, values):
        pass

    def finish(self):
        raise RuntimeError

    def init(self, **settings):
        raise ConnectionError


@pytest.mark.fault(33, 61)
def test_wandb_that_fails_without_a_word_costs_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FailingWandb())
    log = make(tmp_path, wandb=True)
    assert "wandb is off (ConnectionError: ConnectionError); log.jsonl goes on" in capsys.readouterr().out
    log.wandb = FailingWandb()
    log.close(1, None, 5)
    assert "wandb did not finish (RuntimeError: RuntimeError)" in capsys.readouterr().out


def test_words():
    assert [logger.human(n) for n in (12, 12_345_678, 3e12)] == ["12", "12.35M", "3T"]
    assert [logger.duration(s) for s in (1.24, 61, 7320)] == ["1.2s", "1m01s", "2h02m"]
