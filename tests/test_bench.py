"""bench.py as a person runs it, on the CPU; the arithmetic of memory against what H200s took."""

import dataclasses
import itertools
import json
import pickle
import re
import runpy

import pytest
import torch
from compare import take_step
from conftest import ROOT
from ranks import call, run
from test_fineweb import refused

import model as models
from bench import COMMANDS, StepConfig, main
from configurator import configure
from measure import step
from run import build
from scale import fsdp, memory, parallel
from settings import Config, check
from system.errors import UserError


def here(name, *words):
    """A command in this process, without the seconds that a new one takes to import torch."""
    main(name, configure(COMMANDS[name], list(words)))


TINY = [str(ROOT / "config/test.py"), "--device=cpu", "--vocab_size=257"]


def recipe(name, *words):
    return configure(Config, [str(ROOT / f"config/{name}.py"), "--precision=bf16", *words])


def test_steps_are_timed_and_traced(capsys, tmp_path):
    """The trace has two steps and the operators in them, of a CPU too."""
    trace = tmp_path / "trace.json"
    here("step", *TINY, "--steps=3", "--settle=1", "--compile=False", f"--trace={trace}")
    said = capsys.readouterr().out
    assert re.search(r"^step +[\d.]+ ms, median of 3 .* [\d,]+ tokens/s", said, re.MULTILINE), said
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event["name"].startswith("Optimizer.step")]
    assert len(steps) == 2 and any(event.get("cat") == "cpu_op" for event in events)


def snapshot_in_rank(path):
    """(Events of the snapshot, the most bytes they held, the allocator's peak)."""
    here("step", TINY[0], "--steps=0", "--settle=1", "--breakdown=False", f"--snapshot={path}")
    events = max(pickle.loads(path.read_bytes())["device_traces"], key=len)
    sizes = {"alloc": 1, "free_requested": -1}
    held = itertools.accumulate(sizes.get(e["action"], 0) * e["size"] for e in events)
    return len(events), max(held), torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_the_snapshot_of_a_gpu_has_the_peak(tmp_path):
    """A process of its own has no tensors of other tests."""
    [(events, most, peak)] = call(0, snapshot_in_rank, tmp_path / "memory.pickle", timeout=200)
    assert events > 100 and 0.5 * peak < most <= 1.01 * peak


def test_step_of_a_sharded_model_with_sequences_over_two_ranks():
    words = "--steps=2 --settle=1 --parallel=fsdp --context_parallel=2 --compile=False".split()
    done = run(2, ["step", *TINY, *words], script="bench.py")
    assert done.returncode == 0 and "median of 2" in done.stdout, done.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("config/*.py")))
def test_parameter_counts_are_those_of_a_real_model(name):
    cfg = recipe(name)
    other = dict(qk_norm=not cfg.qk_norm, bias=not cfg.bias, mlp="relu2", attention_gate=True)
    table_in_last_block = dict(value_embeddings=cfg.n_layer)
    for changes in ({}, other, table_in_last_block):
        varied = dataclasses.replace(cfg, **changes)
        model = models.on_meta(varied)
        counts = [sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0])]
        assert [*memory.total_and_block_parameters(varied)] == counts


MEASURED = """
gpt2_124m 21.4
gpt2_124m 19.7 precision=fp8
gpt2_1558m 65.1
modern_124m 35.2 precision=bf16
modern_124m 41.3 value_embeddings=2 attention_gate=True precision=bf16
gpt3_2700m 66.0
gpt3_2700m 88.6 batch_size=32 batch_tokens=65536 parallel=zero2 offload_states remat=selective
llama3_8b_one_gpu 60.4
llama3_8b_one_gpu 74.4 remat=none
llama3_8b_one_gpu 75.0 remat_every=2 precision=fp8
llama3_8b_one_gpu 62.5 block_size=20480 batch_size=4 batch_tokens=81920 remat=attention remat_offload
llama3_8b_one_gpu 53.9 block_size=32768 batch_tokens=32768 remat=attention
llama3_8b_128k_one_gpu 57.9 init_from=None
llama3_8b_128k_one_gpu 60.9 document_mask=True remat=block
llama3_70b 102.7 n_layer=4 parallel=ddp remat=none batch_size=1 batch_tokens=32768
llama3_8b 63.6 batch_tokens=262144 reduce_dtype=bf16 ranks=4
llama3_8b 77.2 batch_tokens=262144 reduce_dtype=bf16 parallel=zero2 ranks=4
"""  # noqa: E501


@pytest.mark.parametrize("line", MEASURED.strip().splitlines())
def test_memory_is_what_h200s_took(line):
    """Peak GiB that `bench.py step` or train.py printed, on one H200 or on each of four."""
    name, measured, *words = line.removesuffix(" ranks=4").split()
    cfg = recipe(name, *(f"--{word}" for word in words))
    ranks = 4 if line.endswith("ranks=4") else 1
    assert memory.total_bytes(cfg, ranks) / memory.GIB == pytest.approx(float(measured), rel=0.07)


def three_steps_in_rank(words):
    """(Losses of three steps on one GPU, bytes of its memory at the peak, bytes by the estimate).

    A single rank in DDP has the buckets that each of two has; the estimate of one rank is without
    DDP.
    """
    fsdp.room = lambda *_: 0  # no unit of FSDP2 stays gathered, which the estimate does not count
    cfg = configure(StepConfig, words)
    world = parallel.join(cfg)
    own, _, job = step.build(cfg, world)
    next_batch = step.synthetic(own, world)
    found = [take_step(job, next_batch, own.lr)[0].item() for _ in range(3)]
    ranks = 2 if own.parallel == "ddp" else 1
    own = dataclasses.replace(own, batch_tokens=ranks * own.batch_tokens)
    return found, torch.cuda.max_memory_allocated(), memory.total_bytes(own, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mode", ["ddp", *(f"{kind} --offload_states" for kind in ("fsdp", "zero2", "hsdp"))]
)
def test_a_gpu_takes_the_estimated_memory(mode):
    """Each mode that one GPU can run, with two micro-steps a step and heads that are 80 wide."""
    words = "--n_layer=6 --n_head=16 --n_embd=1280 --vocab_size=50304 --batch_size=16 --lr=1e-4"
    words += " --block_size=1024 --batch_tokens=32768 --remat=selective --precision=bf16"
    words += f" --device=cuda --parallel={mode}"
    [(losses, peak, estimate)] = call(1, three_steps_in_rank, words.split(), timeout=200)
    assert peak == pytest.approx(estimate, rel=0.15)
    assert losses[0] == pytest.approx(11, abs=0.6) and losses[2] < losses[0]


@pytest.mark.parametrize("name, ranks, words", [
    ("gpt2_124m", 8, []),
    ("modern_124m", 1, ["--precision=fp8"]),
    ("gpt2_1558m", 4, ["--parallel=fsdp", "--remat=block", "--offload_states"]),
    ("llama3_8b", 8, ["--context_parallel=2"]),
    ("llama3_8b_one_gpu", 1, []),
])  # fmt: skip
def test_the_batch_that_is_chosen_divides_and_is_the_largest_that_fits(name, ranks, words):
    """Of cards of 8 to 24, 80 and 141 GB some fit, and a larger one never has a smaller batch."""
    cfg, chosen = recipe(name, "--batch_size=auto", *words), []
    rows = cfg.batch_tokens // cfg.block_size // (ranks // cfg.context_parallel)
    for free in (gib * memory.GIB for gib in (7.5, 11, 15, 23, 78, 138)):
        takes = lambda n: 1.1 * memory.total_bytes(dataclasses.replace(cfg, batch_size=n), ranks)
        larger = [n for n in range(1, rows + 1) if rows % n == 0]
        if takes(1) > free:
            with pytest.raises(UserError, match="^batch_size=auto: not one row "):
                memory.choose(cfg, ranks, free)
            continue
        own, reasons = memory.choose(cfg, ranks, free)
        found = own.batch_size
        assert "batch_size" in reasons
        chosen.append(found)
        assert rows % found == 0 and takes(found) <= free
        assert all(takes(n) > free for n in larger if n > found)
        check(dataclasses.replace(cfg, batch_size=found), ranks)
    assert chosen == sorted(chosen) and chosen[-1] > 1
    if name == "gpt2_124m":
        assert len(chosen) == 6 and len(set(chosen)) > 3


def test_the_gpu_with_the_least_memory_decides(monkeypatch):
    """Of any rank; `bench.py step` may use a part of it."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(build, "pick_precision", lambda *_: ("bf16", "a test"))
    monkeypatch.setattr(build, "pick_ops", lambda *_: ("fused", "a test"))
    monkeypatch.setattr(build, "best_attention", lambda *_: ("cudnn", "a test"))
    free = lambda device: (23 * memory.GIB, 24 * memory.GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    share = iter([1.0, 11 / 24, 1.0])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: next(share))
    cfg = recipe("gpt2_124m", "--batch_size=auto")
    chosen = lambda cfg: build.choose(cfg, cuda)[0].batch_size
    assert chosen(cfg) == 32
    assert chosen(cfg) == 16
    monkeypatch.setattr(parallel, "gather_objects", lambda free: [free, 7.5 * memory.GIB])
    assert chosen(cfg) == 8


@pytest.mark.parametrize("words, message", [
    (["memory", "--world=0"], "world=0"),
    (["memory", "--precision=fp32"], "precision=fp32"),
    (["memory", "--ops=torch"], "ops=torch"),
    (["memory", "--world=8", "--n_head=7"], "n_head=7"),
    (["step", *TINY, "--precision=fp8"], "precision=fp8"),
    (["step", *TINY, "--steps=-1"], "steps=-1"),
])  # fmt: skip
def test_mistakes_are_one_line(words, message):
    refused(UserError, message, here, *words)


@pytest.mark.gpu
def test_tables_on_a_gpu(capsys):
    here("step", TINY[0], "--steps=2", "--settle=1")
    runpy.run_path(str(ROOT / "results/speed/ops.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"\n +[\d.]+ ms  all kernels", said) and re.search(
        r"ours +[\d.]+ +\d+", said
    ), said
