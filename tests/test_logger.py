"""run/logger.py: figures, the time that is left, warnings, and the end of a console or folder."""

import math
import os
import re
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
import ranks
import saved
import torch
from conftest import ROOT, flags, read_log, train_here

import plot
from run.evaluate import TAKEN
from run.figures import Figures
from run.logger import SETTLED, Logger
from scale.parallel import World
from settings import Config

WORLD = World(0, 1, torch.device("cpu"))


def make(tmp_path, saved_at=None, **settings):
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    cfg = Config(max_steps=1000, out_dir=str(run), **settings)
    log = Logger(WORLD, cfg)
    analysis = SimpleNamespace(mfu=lambda tokens_per_s, devices: None)
    log.training = SimpleNamespace(analysis=analysis)
    log.open(saved_at)
    return log


def take(log, step, seconds, loss=3.0, norm=1.0, tokens=None, **extras):
    """A step of 1,000 tokens in `seconds`; the last figure is the time of the step before."""
    began = SimpleNamespace(time=0.0, event=None)
    moment = SimpleNamespace(since=lambda earlier: seconds)
    log.training.figures = SimpleNamespace(means=lambda later: (loss, norm, extras, [0.0]))
    state = SimpleNamespace(step=step, tokens=tokens or 1000 * step)
    log.step(state, 1e-3, SimpleNamespace(moment=moment), began)


def lines(tmp_path):
    return read_log(tmp_path / "run")


@pytest.mark.parametrize("graph, expected", [(False, 6 * (30.0 + 4) / 5), (True, 6.0)])
def test_steps_that_compile_or_capture_count_as_the_mean_of_the_others(tmp_path, graph, expected):
    log = make(tmp_path, cuda_graph=graph, max_seconds=100.0)
    assert log.elapsed(3) == 0
    # compiles; captures in the fourth
    for step, seconds in enumerate((60.0, 1.0, 1.0, 30.0, 1.0, 1.0), 1):
        take(log, step, seconds)
    assert log.elapsed(6) == pytest.approx(expected)
    assert log.elapsed(7) == pytest.approx(expected * 7 / 6)


def test_a_resumed_run_goes_on_in_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = set()
    for saved_at in (None, 1):
        log = make(tmp_path, saved_at, wandb=True)
        found.add(log.wandb.id)
        log.close(1, stopped=True)
    assert found == {(tmp_path / "run/wandb_id").read_text()}


def test_a_step_without_a_target_has_no_loss(tmp_path):
    figures = Figures(batch_tokens=1000, ranks=1)
    totals = figures.sums(torch.tensor(0.0), 0, {"aux": 1.0})
    later = figures.over_ranks(totals, torch.tensor(0.0), {"own": 2.0})
    loss, norm, extras, own = figures.means(later)
    assert (loss, norm, extras, own) == (None, 0.0, {"aux": 0.0}, {"own": 2.0})
    take(make(tmp_path), 1, 1.0, loss=loss)
    assert lines(tmp_path)[-1]["loss"] is None


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
    assert warning.endswith("150")
    _, line = lines(tmp_path)
    assert (line["kind"], line["step"]) == ("spike", 400) and line["z"] > 6


def without_a_reader(script, words):
    """For ranks.attempt: a script on an ASCII console whose reader, such as a tee, is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="ascii")
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="ascii")
    sys.argv = [script, *map(str, words)]
    runpy.run_path(script, run_name="__main__")


def test_a_run_outlives_its_console_and_another_script_ends(data_dir, tmp_path):
    """The samples of an untrained model are not ASCII."""
    words = flags(data_dir, tmp_path / "run", max_steps=2, sample_interval=1, compile=False)
    assert ranks.attempt(0, without_a_reader, "train.py", words)[0].codes == [0]
    kinds = [entry["kind"] for entry in read_log(tmp_path / "run")]
    assert kinds.count("train") == 2 and kinds.count("sample") == 2 and kinds[-1] == "done"
    words = ["memory", "config/test.py", "--precision=bf16"]
    assert ranks.attempt(0, without_a_reader, "bench.py", words)[0].codes == [141]


@pytest.mark.fault(103)
def test_a_run_whose_folder_is_removed_ends_at_its_next_save(data_dir, tmp_path, monkeypatch):
    log = Logger.step

    def step(self, state, *more):
        if state.step == 3:
            shutil.rmtree(self.cfg.out_dir)
        return log(self, state, *more)

    monkeypatch.setattr(Logger, "step", step)
    with pytest.raises(saved.Error, match="cannot be written"):
        train_here(data_dir, tmp_path / "run", max_steps=5, save_interval=2)


def test_no_evaluation_has_the_name_of_a_line_of_the_log():
    """Nor does plot.py draw such lines as somebody's own evaluation."""
    written = set(re.findall(r'record\("(\w+)"', (ROOT / "run/logger.py").read_text()))
    assert {"train", "skipped", "spike"} <= written <= TAKEN < {*plot.OURS}
