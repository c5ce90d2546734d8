"""Backwards in plain PyTorch that are faster, or safer, than those of autograd."""

import torch


class Rotation(torch.autograd.Function):
    """kernels.rotated, whose backward turns by the opposite angle; no gradient of cos and sin.

    The backward that torch.compile makes takes 3 times as long.
    """

    @staticmethod
    def forward(ctx, rotated, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.rotated = rotated
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return None, ctx.rotated(dy, cos, -sin), None, None


class SameLayout(torch.autograd.Function):
    """Identity of (B, T, H, D); lays the gradient out in memory as the output is.

    PyTorch keeps plans of cuDNN's backward by the layouts of q, k and v alone; with another layout
    of dy, as after an edit's gate, a plan computes wrong numbers. A compiled dy is contiguous, so
    rarely copied.
    """

    @staticmethod
    def forward(ctx, y):
        ctx.strides = y.stride()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        if dy.stride() == ctx.strides:
            return dy
        dx = torch.empty_strided(dy.shape, ctx.strides, dtype=dy.dtype, device=dy.device)
        return dx.copy_(dy)


def same_layout(y):
    """y: (B, H, T, D), as it is; its gradient gets the layout that y has (SameLayout)."""
    return SameLayout.apply(y.transpose(1, 2)).transpose(1, 2)
