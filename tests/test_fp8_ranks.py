"""fp8 over two ranks equals one process; without an NVIDIA GPU by Triton's interpreter, as in test_fp8.py."""

import dataclasses
import functools
import os

import conftest
import pytest
import ranks
import torch

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
GPU = torch.cuda.is_available()
RUNS = torch.cuda.get_device_capability() >= (8, 9) if GPU else os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.device,
    pytest.mark.skipif(not RUNS, reason="needs an NVIDIA GPU with fp8 matrix units or TRITON_INTERPRET=1"),
    pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none"),
]
SHAPE = dict(n_layer=2, n_head=4, vocab_size=200, block_size=8, batch_size=2, batch_tokens=64)
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False, n_kv_head=2, tie_embeddings=False)
SHAPES = {"llama": LLAMA, "gpt2": {}}


def train(words, unit_mib):
    """[[loss, gradient norm, validation loss] of two of train.py's steps on random rows], on every rank."""
    import kernels
    import train
    from configurator import configure
    from scale import memory, parallel
    from settings import Config

    cfg = configure(Config, words)
    world = parallel.join(cfg)
    attention = "flash"
    if world.device.type == "cpu":
        attention = "math"
        conftest.stand_in_for_cublas()
        kernels.served.add("cpu")
    if unit_mib is not None:
        memory.UNIT_MIB = unit_mib
    cfg = dataclasses.replace(cfg, precision="fp8", ops="fused", attention=attention)
    job = train.Training(cfg, world)
    torch.manual_seed(1)
    rows = torch.randint(0, cfg.vocab_size, (2, cfg.batch_tokens // cfg.block_size, cfg.block_size + 1))
    found = []
    for mine in rows[:, world.rank :: world.size].to(world.device):
        micros = [(batch[:, :-1], batch[:, 1:]) for batch in mine.split(cfg.batch_size)]
        loss, norm = job.step(functools.partial(next, iter(micros)), cfg.lr)
        job.raw.eval()
        with torch.no_grad(), job.autocast:
            after = torch.stack([job.raw(*micro, "none").mean() for micro in micros]).mean()
        job.raw.train()
        loss, after = (parallel.sum_over_ranks(value).item() / world.size for value in (loss, after))
        found.append([loss, norm.item(), after])
    parallel.stop()
    return found


def steps(number, unit_mib=None, **settings):
    words = ["config/test.py", *(f"--{name}={value}" for name, value in (SHAPE | settings).items())]
    return ranks.call(number, train, words, unit_mib)[0]


@functools.cache
def one_process(name):
    return steps(0, batch_size=4, **SHAPES[name])  # two micro-steps a step, as of two ranks


@pytest.mark.parametrize(
    "name, mode",
    [
        ("llama", dict(parallel="fsdp", unit_mib=0)),
        ("llama", dict(parallel="zero2", remat="selective", compile=True)),
        ("gpt2", dict(parallel="hsdp", shard_size=2, remat="block")),
    ],
    ids=["fsdp", "zero2", "hsdp"],
)
def test_two_ranks_step_as_one_process(name, mode):
    two, one = steps(2, **SHAPES[name], **mode), one_process(name)
    for (loss, norm, after), (one_loss, one_norm, one_after) in zip(two, one, strict=True):
        assert abs(loss - one_loss) < 2e-3 * one_loss and abs(norm - one_norm) < 3e-2 * one_norm
        assert abs(after - one_after) < 2e-3 * one_after  # whose weights are in e4m3
