"""A batch that grows, and runs of a length in tokens or seconds, by train.py's own loop."""

import itertools
import math
import os
import types

import pytest
import ranks
import torch
from compare import alike, copied, initial_weights, same_run, slow
from conftest import flags, load_checkpoint, losses, read_log, train_here, train_in_rank
from experiments.patch import Patch

import optim
from experiments import plain
from scale import parallel
from settings import Config

# steps 1 to 4 have 128 tokens, 5 to 8 256, 9 to 16 512: in one process 2, 4 and 8 micro-steps
GROWING = dict(
    batch_schedule="128:0.25,256:0.5", batch_size=2, max_steps=16, save_interval=2, keep_last=99
)
GROWING |= dict(eval_interval=8, lr=1e-3, warmup_steps=2)
TOKENS = [128] * 4 + [256] * 4 + [512] * 8
BOUNDARIES = (4, 8)
LAST = "step_00000016"


def train_lines(out_dir):
    return {line["step"]: line for line in read_log(out_dir) if line["kind"] == "train"}


@pytest.fixture(scope="module")
def grown(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    train_here(data_dir, folder, **GROWING)
    return folder


def test_a_batch_grows_and_the_rate_follows(grown, data_dir):
    """Against a plain loop over whole batches, with the rows and rates written out."""
    lines = train_lines(grown)
    assert [line["tokens"] for line in lines.values()] == [*itertools.accumulate(TOKENS)]
    cfg = Config(**load_checkpoint(grown / LAST)[1]["config"])
    root = [math.sqrt(tokens / 512) for tokens in TOKENS]
    whole = Config(max_steps=16, warmup_steps=2, lr=1e-3)
    expected = [root[i] * optim.learning_rate(i, i / 16, whole) for i in range(16)]
    assert [line["lr"] for line in lines.values()] == pytest.approx(expected)
    patch = Patch(
        "", "", {}, (), rows=lambda step: TOKENS[step] // 32, lr=lambda step: expected[step]
    )
    found = plain.train(patch, cfg, data_dir)
    assert losses(read_log(grown)) == pytest.approx(found["losses"], rel=1e-5)
    assert losses(read_log(grown), "val") == pytest.approx(found["val"], rel=1e-5)


@pytest.mark.parametrize("step", [4, 6, slow(12)])
def test_a_resume_in_each_stage_is_bitwise(grown, data_dir, tmp_path, step):
    again = train_here(data_dir, copied(grown, step, tmp_path / "b"), resume="auto", **GROWING)
    expected = {n: loss for n, loss in losses(read_log(grown)).items() if n > step}
    assert losses(again) == expected
    assert train_lines(tmp_path / "b")[16]["tokens"] == sum(TOKENS)
    same_tensors(grown / LAST, tmp_path / "b" / LAST)


def same_tensors(one, other):
    a, b = (load_checkpoint(folder)[0] for folder in (one, other))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


FSDP = dict(parallel="fsdp")
# ranks, settings of the mode, steps after which it is resumed
MODES = [
    pytest.param(2, {}, (6,), id="ddp"),
    slow(2, FSDP, (4, 6), id="fsdp"),
    slow(2, FSDP | dict(context_parallel=2), (), id="context"),
]


@pytest.mark.parametrize("number, mode, resumed", MODES)
def test_ranks_equal_one_process_at_each_boundary(grown, data_dir, tmp_path, number, mode, resumed):
    words = flags(data_dir, tmp_path / "many", **GROWING | mode)
    assert ranks.call(number, train_in_rank, words) == [(0, "")] * number
    same_run(grown, tmp_path / "many")
    for step in BOUNDARIES:
        runs = (tmp_path / "many", grown)
        found, expected = (load_checkpoint(run / f"step_{step:08d}")[0] for run in runs)
        alike(found, expected, initial_weights(grown))
    tokens = [line["tokens"] for line in train_lines(tmp_path / "many").values()]
    assert tokens == [line["tokens"] for line in train_lines(grown).values()]
    for step in resumed:
        out = copied(tmp_path / "many", step, tmp_path / f"from_{step}")
        words = flags(data_dir, out, resume="auto", **GROWING | mode)
        assert ranks.call(number, train_in_rank, words) == [(0, "")] * number
        same_tensors(tmp_path / "many" / LAST, out / LAST)


def test_the_same_tokens_whatever_the_batch(data_dir, tmp_path):
    """4 steps of 512 tokens, or 256 for half of them; the last step may pass the end."""
    options = dict(batch_size=2, max_tokens=2048, warmup_steps=2, eval_interval=100)
    for name, steps, tokens, own in [
        ("large", 4, 2048, {}),
        ("growing", 4 + 2, 2048, dict(batch_schedule="256:0.5", weight_decay=None)),
        ("odd", 5, 5 * 512, dict(max_tokens=2049)),
    ]:
        lines = train_lines_of(data_dir, tmp_path / name, **options | own)
        assert max(lines) == steps and lines[steps]["tokens"] == tokens, name
        assert sorted(losses(read_log(tmp_path / name), "val")) == [0, steps]
    train_here(data_dir, tmp_path / "large", resume="auto", **options)  # it is done
    assert max(train_lines(tmp_path / "large")) == 4
    options |= dict(max_tokens=3000, resume="auto")
    assert sorted(train_lines_of(data_dir, tmp_path / "large", **options)) == [*range(1, 7)]


def train_lines_of(data_dir, out_dir, **settings):
    train_here(data_dir, out_dir, **settings)
    return train_lines(out_dir)


# -- seconds


def clock(put, seconds=1.0, first=60.0):
    """Steps of so many seconds by every clock, the first of a process of `first`."""
    read = []

    def since(self, earlier):
        read.append(1)
        return first if len(read) == 1 else seconds

    put(parallel.Moment, "since", since)


TIMED = dict(max_seconds=10, save_interval=4, keep_last=9, warmup_steps=2, eval_interval=5, lr=1e-3)


def test_a_run_ends_with_its_schedule_after_so_many_seconds(data_dir, tmp_path, monkeypatch):
    """The first step, which compiles, counts as the mean of the others."""
    clock(monkeypatch.setattr)
    lines = train_lines_of(data_dir, tmp_path / "run", **TIMED, max_steps=5)
    assert sorted(lines) == [*range(1, 11)]
    assert sorted(losses(read_log(tmp_path / "run"), "val")) == [0, 5, 10]
    cfg = Config(lr=1e-3, warmup_steps=2, max_steps=10)
    rates = [optim.learning_rate(i, i / 10, cfg) for i in range(10)]
    found = [line["lr"] for line in lines.values()]
    assert found[:2] + found[3:] == pytest.approx(rates[:2] + rates[3:])
    assert found[2] == pytest.approx(1e-3)  # none of the steps but the first is known
    out = copied(tmp_path / "run", 4, tmp_path / "b")
    again = train_lines_of(data_dir, out, resume="auto", **TIMED)
    assert sorted(again) == [*range(5, 11)]
    assert [line["lr"] for line in again.values()] == pytest.approx(found[4:])
    assert load_checkpoint(out / "step_00000010")[1]["seconds"] == 10


def timed_in_rank(words):
    """Each rank's clock has steps of another length, 1 s and 2 s; they agree on the mean."""
    clock(setattr, seconds=1.0 + (os.environ["RANK"] == "1"))
    return train_in_rank(words)


def test_ranks_agree_on_the_time_and_stop_together(data_dir, tmp_path):
    settings = TIMED | dict(max_seconds=15, batch_size=2)
    words = flags(data_dir, tmp_path / "two", **settings)
    assert ranks.call(2, timed_in_rank, words) == [(0, "")] * 2
    lines = train_lines(tmp_path / "two")
    assert max(lines) == 10 and load_checkpoint(tmp_path / "two/step_00000010")[1]["seconds"] == 15
    out = copied(tmp_path / "two", 4, tmp_path / "one")  # goes on in one process, by rank 0's clock
    words = flags(data_dir, out, resume="auto", **settings)
    assert ranks.call(1, timed_in_rank, words) == [(0, "")]
    assert max(train_lines(out)) == 4 + 9


# -- pure functions


@pytest.mark.parametrize("schedule", [None, "100:0.3,200:0.55,300:0.7", "1:0.001"])
@pytest.mark.parametrize("length", [dict(max_steps=997), dict(max_tokens=123_457)])
@pytest.mark.parametrize("begun", [0, 5])
def test_the_plan_is_what_the_loop_does(schedule, length, begun):
    cfg = Config(batch_tokens=400, batch_schedule=schedule, **length)
    state = types.SimpleNamespace(step=begun, tokens=begun * 400, seconds=0.0)
    planned = optim.length_of_run(cfg, state.step, state.tokens)
    while (share := optim.share_done(state, cfg)) < 1:
        state.tokens += optim.batch_tokens(share, cfg)
        state.step += 1
    assert planned == (state.step, state.tokens)
