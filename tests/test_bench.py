"""bench.py as a person runs it, on the CPU."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import ROOT, train_ranks

import memory
import plan
import train
from configurator import UserError, configure


def bench(*words, ranks=0):
    return train_ranks(ranks, words, script="bench.py")


def test_step_is_timed_over_two_ranks():
    done = bench("step", "config/test.py", "--device=cpu", "--steps=3", "--settle=1", "--vocab_size=257", ranks=2)
    assert done.returncode == 0, done.stderr
    line = re.search(r"^step +([\d.]+) ms, median of 3 .* ([\d,]+) tokens/s, MFU n/a$", done.stdout, re.MULTILINE)
    assert line, done.stdout
    assert "first step" in done.stdout


def test_step_of_a_sharded_model_with_sequences_over_two_ranks():
    words = ["--device=cpu", "--steps=2", "--settle=1", "--vocab_size=257", "--parallel=fsdp", "--context_parallel=2"]
    done = bench("step", "config/test.py", *words, ranks=2)
    assert done.returncode == 0 and "median of 2" in done.stdout, done.stderr


def test_the_first_step_alone():
    done = bench("step", "config/test.py", "--device=cpu", "--steps=0", "--settle=0", "--vocab_size=257")
    assert done.returncode == 0 and re.search(r"^first step +[\d.]+ s", done.stdout, re.MULTILINE), done.stderr
    assert not re.search("^step ", done.stdout, re.MULTILINE)


def test_collectives_over_two_ranks():
    done = bench("comm", "--device=cpu", "--max_mib=1", ranks=2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1 .*\d+\.\d \( +\d+\)", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("precision, measured", [("bf16", 21.4), ("fp8", 19.7)])
def test_memory_is_what_an_h200_took(precision, measured):
    """The peak that `bench.py step config/gpt2_124m.py` printed on one H200, in GiB."""
    cfg = configure(train.Config, [str(ROOT / "config/gpt2_124m.py"), f"--precision={precision}"])
    assert sum(memory.estimate(cfg, 1).values()) / memory.GIB == pytest.approx(measured, rel=0.05)


LLAMA, LONG = ["config/llama3_8b.py"], ["--block_size=131072", "--batch_tokens=131072"]
MICRO_STEPS, SIXTH = ["--batch_tokens=262144", "--reduce_dtype=bf16"], ["--remat=selective", "--remat_every=6"]
LONGER = ["--block_size=262144", "--batch_tokens=262144", "--remat=block", "--remat_offload=True", "--remat_tile=16384"]
HELD = ["--remat=attention", "--remat_offload=True", "--remat_tile=16384"]


@pytest.mark.parametrize(
    "ranks, words, gib, rate",
    [
        (1, ["config/gpt2_124m.py"], 21.4, 622_705),
        (4, ["config/gpt2_124m.py"], None, 593_195),
        (4, [*LLAMA, *MICRO_STEPS], 63.6, 10_189),
        (4, [*LLAMA, *MICRO_STEPS, "--parallel=zero2"], 77.2, 10_920),
        (4, [*LLAMA, *MICRO_STEPS, "--precision=fp8"], 68.6, 14_170),
        (4, [*LLAMA, *MICRO_STEPS, "--precision=fp8", "--parallel=zero2", *SIXTH], 77.3, 15_150),
        (4, [*LLAMA, *LONG, "--context_parallel=4", "--remat=selective"], 75.5, 3_179),
        (1, ["config/llama3_8b_one_gpu.py", *LONG, *HELD], 62.2, 3_169),
        (1, ["config/llama3_8b_one_gpu.py", *LONGER], 74.5, None),
    ],
)
def test_memory_and_speed_are_what_h200s_showed(ranks, words, gib, rate):
    """GiB and tokens/s a GPU that `bench.py step` printed; memory is to be known, speed only to be compared."""
    cfg = configure(train.Config, [str(ROOT / words[0]), "--precision=bf16", *words[1:]])
    if gib:
        assert sum(memory.estimate(cfg, ranks).values()) / memory.GIB == pytest.approx(gib, rel=0.05)
    if rate:
        assert cfg.batch_tokens / sum(plan.seconds(cfg, ranks).values()) / ranks == pytest.approx(rate, rel=0.1)


def test_plan_finds_what_fits_and_is_fastest():
    """A batch that fits is kept; a model that does not fit one GPU is sharded; a long context is recomputed."""
    budget = 80 * memory.GIB

    def best(ranks, *words):
        cfg = configure(train.Config, [str(ROOT / words[0]), *words[1:], "--precision=bf16"])
        found = plan.search(cfg, ranks, budget)
        assert all(takes <= budget for _, takes, _ in found)
        assert [s for s, _, _ in found] == sorted(s for s, _, _ in found)
        return cfg, found[0][2] if found else None

    cfg, first = best(1, "config/gpt2_124m.py")
    assert first.batch_size >= 64 and first.remat == "none"
    assert best(1, *LLAMA, "--parallel=ddp")[1] is None
    cfg, first = best(8, *LLAMA)
    assert first.parallel in ("fsdp", "zero2")
    again = configure(train.Config, [str(ROOT / LLAMA[0]), "--precision=bf16", *plan.as_flags(first, cfg).split()])
    assert again == first
    assert best(1, "config/llama3_8b_one_gpu.py", *LONG)[1].remat == "attention"
    assert best(1, *LLAMA, "--offload_states=True")[1].parallel in ("fsdp", "zero2")


def test_memory_falls_as_it_must():
    cfg = configure(train.Config, [str(ROOT / "config/llama3_8b.py"), "--precision=bf16"])
    takes = {}
    for kind in ("ddp", "zero2", "fsdp"):
        for remat in ("none", "selective", "block"):
            other = dataclasses.replace(cfg, parallel=kind, remat=remat)
            takes[kind, remat] = sum(memory.estimate(other, 8).values())
    assert takes["ddp", "none"] > takes["zero2", "none"] > takes["fsdp", "none"]
    assert takes["fsdp", "none"] > takes["fsdp", "selective"] > takes["fsdp", "block"]
    budget = 80 * memory.GIB
    rows = memory.largest_batch(dataclasses.replace(cfg, remat="block"), 8, budget)
    fits, over = (dataclasses.replace(cfg, remat="block", batch_size=b) for b in (rows, rows + 1))
    assert sum(memory.estimate(fits, 8).values()) <= budget < sum(memory.estimate(over, 8).values())
    length = memory.longest_row(dataclasses.replace(cfg, remat="block"), 8, budget)
    fits, over = (dataclasses.replace(cfg, remat="block", block_size=t) for t in (length, length + 1024))
    assert memory.takes(fits, 8) <= budget < memory.takes(over, 8)
    assert memory.longest_row(cfg, 8, 2 * memory.GIB) == 0


def test_out_of_memory_says_what_would_fit(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 24 * memory.GIB))
    cfg = configure(train.Config, [str(ROOT / "config/gpt2_124m.py"), "--batch_size=128", "--device=cpu"])
    with pytest.raises(UserError, match=r"^out of memory: .* of 24.0 a GPU by estimate; try --batch_size=") as error:
        train.main(cfg)
    rows = int(re.search(r"try --batch_size=(\d+) or", str(error.value))[1])
    assert sum(memory.estimate(dataclasses.replace(cfg, batch_size=rows), 1).values()) <= 24 * memory.GIB
    assert 64 <= rows < 128 and "--batch_size=128 --remat=block" in str(error.value)
    assert "another process" not in str(error.value)
    assert "another process" in memory.advice(cfg, 1, 200 * memory.GIB, train.legal)


def test_mistakes_are_one_line():
    mistakes = [
        (["steps"], "error: bench.py steps: expected one of step, ops, comm, memory"),
        (["memory", "--world=0"], "error: world=0 must be at least 1"),
        (["memory", "--precision=fp32"], "error: precision=fp32: the arithmetic is for bf16 and fp8"),
        (["plan", "config/llama3_8b.py", "--world=8", "--n_head=7"], "n_embd=4096 must be divisible by n_head=7"),
        (["plan", "config/llama3_8b.py", "--parallel=ddp", "--gpu_gib=8"], "error: nothing fits 8 GiB on 1 GPUs"),
        (["memory", "--n_head=0"], "error: n_head=0 must be at least 1"),
        (["ops"], "error: bench.py ops needs an NVIDIA GPU"),
        (["comm"], "error: bench.py comm needs several ranks"),
        (["step", "--stepss=3"], "unknown setting --stepss; did you mean steps?"),
        (["step", "config/test.py", "--precision=fp8", "--device=cpu"], "error: precision=fp8 needs a CUDA device"),
    ]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda mistake: bench(*mistake[0]), mistakes))
    for (_, expected), done in zip(mistakes, ended, strict=True):
        assert done.returncode != 0 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr
