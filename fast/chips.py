"""Which kernels a GPU can run, and its best for attention.

Each `no_*` maps a Chip to why it cannot, in words, or None.
"""

from typing import NamedTuple

import torch


class Chip(NamedTuple):
    maker: str  # nvidia, amd, or another type of device: cpu, mps
    capability: tuple = (0, 0)  # compute capability of NVIDIA's GPUs


def of(device):
    """The Chip of a torch.device."""
    if device.type != "cuda":
        return Chip(device.type)
    # ROCm's devices are "cuda" to PyTorch too, and have capabilities
    if torch.version.cuda is None:
        return Chip("amd")
    return Chip("nvidia", tuple(torch.cuda.get_device_capability(device)))


def no_bf16(chip):
    if chip.maker not in ("nvidia", "amd"):
        return f"{chip.maker} has no fast lower precision"
    if chip.maker == "nvidia" and chip.capability < (8, 0):
        return "this GPU has no bf16 matrix units"


def nvidia_from(least, reason):
    """A function of a Chip: `reason`, or None for NVIDIA's from this compute capability on."""

    def obstacle(chip):
        if chip.maker != "nvidia" or chip.capability < least:
            return reason

    return obstacle


no_fused_kernels = nvidia_from((8, 0), "the fused kernels are for NVIDIA GPUs from Ampere on")
no_fp8 = nvidia_from((8, 9), "it needs an NVIDIA GPU with fp8 matrix units (Ada, Hopper or later)")


def best_attention(device, precision="bf16"):
    """(backend, reason) for a torch.device; cuDNN's is 1.5 to 2.4 times as fast from Hopper on."""
    chip = of(device)
    if chip.maker != "nvidia":
        return "flash", f"PyTorch's own on {chip.maker}"
    if precision in ("fp32", "tf32"):
        return "efficient", "cuDNN and flash take 16-bit numbers only"
    if torch.are_deterministic_algorithms_enabled():
        return "flash", "deterministic: cuDNN's backward adds in no fixed order"
    reason = "fastest on compute capability {}.{}".format(*chip.capability)
    if torch.backends.cudnn.is_available() and chip.capability >= (9, 0):
        return "cudnn", reason
    return "flash", reason
