"""fp8 over two ranks equals one process. Without an NVIDIA GPU as in test_fp8.py: Triton's interpreter, and PyTorch."""

import functools
import os

import fp8_steps
import pytest
import ranks
import torch

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")
GPU = torch.cuda.is_available()
RUNS = torch.cuda.get_device_capability() >= (8, 9) if GPU else os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not RUNS, reason="needs an NVIDIA GPU with fp8 matrix units or TRITON_INTERPRET=1"),
    pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs, or none"),
]
SHAPE = dict(n_layer=2, n_head=4, vocab_size=200, block_size=8, batch_size=2, batch_tokens=64)
LLAMA = dict(mlp="swiglu", norm="rmsnorm", positions="rope", bias=False, n_kv_head=2, tie_embeddings=False)
SHAPES = {"llama": LLAMA, "gpt2": {}}


def steps(number, **settings):
    unit_mib = settings.pop("unit_mib", None)
    words = ["config/test.py", *(f"--{name}={value}" for name, value in (SHAPE | settings).items())]
    return ranks.call(number, fp8_steps.run, words, unit_mib)[0]


@functools.cache
def one_process(name):
    return steps(0, batch_size=4, **SHAPES[name])  # two micro-steps a step, as of two ranks


@pytest.mark.parametrize(
    "name, mode",
    [
        pytest.param("llama", dict(parallel="fsdp", unit_mib=0), marks=pytest.mark.slow),
        pytest.param(
            "llama", dict(parallel="zero2", remat="selective", compile=True), marks=pytest.mark.slow
        ),
        pytest.param("gpt2", dict(parallel="hsdp", shard_size=2, remat="block"), marks=pytest.mark.slow),
    ],
    ids=["fsdp", "zero2", "hsdp"],
)
def test_two_ranks_step_as_one_process(name, mode):
    two, one = steps(2, **SHAPES[name], **mode), one_process(name)
    for (loss, norm, after), (one_loss, one_norm, one_after) in zip(two, one, strict=True):
        assert abs(loss - one_loss) < 2e-3 * one_loss and abs(norm - one_norm) < 3e-2 * one_norm
        assert abs(after - one_after) < 2e-3 * one_after  # whose weights are in e4m3
