"""Attention: which backend of scaled_dot_product_attention is fastest, and what cuDNN's backward needs."""

import torch

from fast import chips


def best_attention(device, precision="bf16"):
    """(backend, reason) for a torch.device: cuDNN from Hopper on, where it is 1.5 to 2.4 times as fast."""
    chip = chips.of(device)
    if chip.maker not in ("nvidia", "amd"):
        return "flash", f"PyTorch's own on {chip.maker}"
    if precision in ("fp32", "tf32"):
        return "efficient", "cuDNN and flash take 16-bit numbers only"
    if torch.are_deterministic_algorithms_enabled():
        return "flash", "deterministic: cuDNN's backward adds in no fixed order"
    cudnn = torch.backends.cudnn.is_available() and chips.no_cudnn_attention(chip) is None
    where = "compute capability {}.{}".format(*chip.capability) if chip.maker == "nvidia" else "an AMD GPU"
    return "cudnn" if cudnn else "flash", f"fastest on {where}"


class SameLayout(torch.autograd.Function):
    """Identity; lays the gradient out in memory as the output is.

    PyTorch keeps plans of cuDNN's backward by the layouts of q, k and v alone, and with another layout of dy,
    such as a gate on attention's output may give it, a plan computes wrong numbers.
    """

    @staticmethod
    def forward(ctx, y):
        ctx.strides = y.stride()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        if dy.stride() == ctx.strides:
            return dy
        return torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device).copy_(dy)
