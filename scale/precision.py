"""Precision: its choice for a device, autocast and TF32, and whether fused kernels serve it."""

import contextlib
from threading import Thread

import torch
from torch.utils._triton import triton_hash_with_backend

from fast import chips, forms, hopper
from system.errors import UserError

# the dtypes of GEMMs under autocast
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def pick_precision(name, device, weights="fp32", fp16=True):
    """(precision, reason), with auto and auto8 resolved by the device and the weights' dtype.

    fp16: whether the other settings go with it; else auto is fp32 on a GPU without bf16.
    """
    on_gpu = device.type == "cuda"
    if name == "auto8" and not (chips.no_fp8(device) or forms.load()):
        return "fp8", "this GPU has fp8 matrix units"
    if name.startswith("auto"):
        if weights == "bf16":
            return "bf16", "the weights are in bf16"
        missing = chips.no_bf16(device)
        if not missing:
            return "bf16", "this GPU has bf16 matrix units"
        return "fp16" if on_gpu and fp16 else "fp32", missing
    if name in ("tf32", "fp16", "fp8") and not on_gpu:
        raise UserError(
            f"precision={name} needs a CUDA device, this is {device.type}; try --precision=fp32"
        )
    if name == "fp8" and (missing := chips.no_fp8(device)):
        raise UserError(f"precision=fp8: {missing}; try --precision=bf16")
    return name, "as set"


def pick_ops(name, device, precision):
    """(torch or fused, reason), auto resolved; switches fused kernels on or off for the device."""
    missing = forms.enable(device, name)
    if not missing and precision not in ("bf16", "fp8"):
        missing = f"fused kernels are for bf16 and fp8, precision is {precision}"
    if not missing:  # the first step would wait for these: a hash of 400 MB, and NVRTC
        Thread(target=triton_hash_with_backend).start()
        if hopper.available(device):
            hopper.compiling()
        return "fused", "fused kernels: cuBLASLt, Triton, on Hopper CUDA"
    if name == "fused":
        raise UserError(f"ops=fused needs the fused kernels: {missing}; try --ops=torch")
    if precision == "fp8":
        raise UserError(f"precision=fp8 needs the fused kernels: {missing}; try --precision=bf16")
    return "torch", missing


def autocast(precision, device):
    """The autocast context of a forward, which may not be entered again within itself.

    With any precision but fp32, float32 GEMMs use TF32.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    if precision not in DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])
