"""Which kernels a GPU can run, and its best for attention; and CPUs whose AMX cannot be used.

Each `no_*` maps a Chip to why it cannot, in words, or None.
"""

import os
import re
from pathlib import Path
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
no_cudnn_attention = nvidia_from((9, 0), "it is the fastest on NVIDIA GPUs from Hopper on alone")


def best_attention(device, precision="bf16"):
    """(backend, reason) for a torch.device; cuDNN's is 1.5 to 2.4 times as fast from Hopper on."""
    chip = of(device)
    if chip.maker not in ("nvidia", "amd"):
        return "flash", f"PyTorch's own on {chip.maker}"
    if precision in ("fp32", "tf32"):
        return "efficient", "cuDNN and flash take 16-bit numbers only"
    if torch.are_deterministic_algorithms_enabled():
        return "flash", "deterministic: cuDNN's backward adds in no fixed order"
    if chip.maker == "amd":
        return "flash", "fastest on an AMD GPU"
    reason = "fastest on compute capability {}.{}".format(*chip.capability)
    if torch.backends.cudnn.is_available() and no_cudnn_attention(chip) is None:
        return "cudnn", reason
    return "flash", reason


def without_amx(cpuinfo="/proc/cpuinfo"):
    """Whether this CPU's AMX cannot be used; bf16 products then use AVX-512 in this process.

    Some virtual machines announce AMX, but their CPUID ends before leaf 0x1D with the sizes of its
    tiles: oneDNN takes them to be zero, and its first bf16 product ends the process.
    """
    if not Path(cpuinfo).is_file():
        return False
    first_processor = Path(cpuinfo).read_text().partition("\n\n")[0]
    level = re.search(r"cpuid level\s*: (\d+)", first_processor)
    if "amx_tile" not in first_processor or level is None or int(level[1]) >= 0x1D:
        return False
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    return True
