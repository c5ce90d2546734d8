"""A backward in plain PyTorch that is safer than that of autograd."""

import torch


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
