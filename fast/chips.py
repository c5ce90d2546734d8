"""Which fast forms a GPU can run, by its maker and compute capability: asked at run time and by `bench.py support`.

Each `no_*` returns why a Chip cannot, in words, or None. What the machine lacks (a package, NVRTC) is not looked at.
`without_amx` keeps PyTorch from a CPU's matrix unit where a virtual machine announces it and does not describe it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from configurator import UserError


@dataclass(frozen=True)
class Chip:
    maker: str  # nvidia, amd, or another type of device: cpu, mps
    capability: tuple = (0, 0)  # compute capability of NVIDIA's GPUs

    @property
    def number(self):
        """The compute capability as compilers write it: 90 for (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]


NAMED = {
    "a100": Chip("nvidia", (8, 0)),
    "4090": Chip("nvidia", (8, 9)),
    "h100": Chip("nvidia", (9, 0)),
    "h200": Chip("nvidia", (9, 0)),
    "b200": Chip("nvidia", (10, 0)),
    "mi300x": Chip("amd"),
}


def named(name):
    """The Chip of a name of NAMED; raises UserError for another one."""
    if name not in NAMED:
        raise UserError(f"gpu={name}: expected one of {', '.join(NAMED)}, or none for this machine's")
    return NAMED[name]


def without_amx(cpuinfo="/proc/cpuinfo"):
    """Has PyTorch's bf16 products use AVX-512 where this CPU's AMX cannot be used; returns whether that is so.

    Call it before the first product. Some virtual machines announce AMX, but their CPUID ends before leaf 0x1D, which
    has the sizes of its tiles. oneDNN takes them to be zero, and its first bf16 product ends the process with SIGILL.
    """
    info = Path(cpuinfo).read_text() if Path(cpuinfo).is_file() else ""
    lines = dict(
        map(str.strip, line.split(":", 1)) for line in info.partition("\n\n")[0].splitlines() if ":" in line
    )
    unusable = "amx_tile" in lines.get("flags", "").split() and int(lines.get("cpuid level", 0x1D)) < 0x1D
    if unusable:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    return unusable


imitated = (
    None  # the Chip as which every CUDA device counts, to take its forms on another GPU (bench.py step --gpu)
)


def of(device):
    """The Chip of a torch.device."""
    if device.type != "cuda":
        return Chip(device.type)
    if imitated:
        return imitated
    if (
        torch.version.cuda is None
    ):  # ROCm's devices are "cuda" to PyTorch too, and have capabilities of their own
        return Chip("amd")
    return Chip("nvidia", tuple(torch.cuda.get_device_capability(device)))


def no_bf16(chip):
    if chip.maker not in ("nvidia", "amd"):
        return f"{chip.maker} has no fast lower precision"
    return None if chip.maker == "amd" or chip.capability >= (8, 0) else "this GPU has no bf16 matrix units"


def no_fast_forms(chip):
    if chip.maker != "nvidia":
        return "the fast forms are for NVIDIA GPUs"
    return None if chip.capability >= (8, 0) else "the fast forms are for NVIDIA GPUs from Ampere on"


def no_fp8(chip):
    if reason := no_fast_forms(chip):
        return f"it needs the fast forms, and {reason}"
    return (
        None if chip.capability >= (8, 9) else "it needs a GPU with fp8 matrix units (Ada, Hopper or later)"
    )


def no_hopper_kernels(chip):
    fits = chip.maker == "nvidia" and chip.capability == (9, 0)
    return None if fits else "they are for Hopper GPUs (compute capability 9.0)"


def no_cudnn_attention(chip):
    fits = chip.maker == "nvidia" and chip.capability >= (9, 0)
    return (
        None
        if fits
        else "flash is fastest before Hopper"
        if chip.maker == "nvidia"
        else "it is for NVIDIA GPUs"
    )
