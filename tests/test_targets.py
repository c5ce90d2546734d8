"""Kernels for GPUs that are not at hand: they compile, and fit."""

import os
import subprocess
import sys

import pytest
from compare import repeated, slow
from conftest import ROOT

pytest.importorskip("triton", reason="Triton is installed with PyTorch's CUDA builds only")

# of a block, by compute capability: A100, RTX 4090 and L40, H100, B200, RTX 5090
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
BF16 = (
    "_norm_forward _norm_backward _cross_entropy _swiglu _swiglu_backward _relu2 _relu2_backward "
)
BF16 += "_rope_forward _rope_backward"
FP8 = " _update_scale _cast _transpose _shrink _align"
HOPPER = " _target_logits _exponential_rows"


# other GPUs when asked for: 14 s each
@pytest.mark.long
@pytest.mark.parametrize(
    "capability", [slow(c) if c in (80, 90) else repeated(c) for c in SHARED_KIB]
)
def test_kernels_of_a_step_compile_and_fit(capability):
    command, env = [sys.executable, "tests/targets.py", str(capability)], {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    expected = BF16 + FP8 * (capability >= 89) + HOPPER * (capability == 90)
    assert {name for name, *_ in lines} == set(expected.split())
    for name, _, shared, warps, registers, stack in lines:
        assert int(shared) <= SHARED_KIB[capability] * 1024, (name, shared)
        assert 32 * int(warps) * int(registers) <= 65_536, (name, registers)
        assert int(stack) <= 64, (name, stack)  # bytes of spilled registers a thread
