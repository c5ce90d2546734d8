"""Which kernels a GPU can run, and its best for attention.

Each `no_*` says of a torch.device why it cannot, in words, or None.
"""

import torch


def capability(device):
    """The compute capability of a torch.device that is an NVIDIA GPU; (0, 0) of any other."""
    # ROCm's devices are "cuda" to PyTorch too, and have capabilities
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def no_bf16(device):
    if device.type != "cuda":
        return f"{device.type} has no fast lower precision"
    if (0, 0) < capability(device) < (8, 0):
        return "this GPU has no bf16 matrix units"


def no_fused_kernels(device):
    if capability(device) < (8, 0):
        return "the fused kernels are for NVIDIA GPUs from Ampere on"


def no_fp8(device):
    if capability(device) < (8, 9):
        return "it needs an NVIDIA GPU with fp8 matrix units (Ada, Hopper or later)"


def best_attention(device, precision="bf16"):
    """(backend, reason) for a torch.device; cuDNN's is 1.5 to 2.4 times as fast from Hopper on."""
    found = capability(device)
    if found == (0, 0):
        return "flash", "PyTorch's own"
    if precision in ("fp32", "tf32"):
        return "efficient", "cuDNN and flash take 16-bit numbers only"
    if torch.are_deterministic_algorithms_enabled():
        return "flash", "deterministic: cuDNN's backward adds in no fixed order"
    reason = "fastest on compute capability {}.{}".format(*found)
    if torch.backends.cudnn.is_available() and found >= (9, 0):
        return "cudnn", reason
    return "flash", reason
