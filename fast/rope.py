"""RMSNorm of each head and RoPE in one pass over queries or keys, and their backward in one; also
RoPE alone.

https://arxiv.org/abs/2104.09864 (RoPE), https://arxiv.org/abs/2302.05442 (norms on queries and
keys)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast.hopper import sm_count
from fast.operators import cdiv, operator, power_of_2

ROPE_ELEMENTS, ROPE_WARPS = 4096, 4  # of a block of heads
ROPE_BACK_STAGES, ROPE_BACK_PROGRAMS = 1, 4  # programs a multiprocessor


class RopeFunction(torch.autograd.Function):
    """RoPE of the RMSNorm of x: (B, H, T, D) in bf16; weight: the norm's, (D,), or None for RoPE
    alone.

    cos, sin: (T, D) float32, both halves of a row equal. Returns (B, H, T, D), in memory (B, T, H,
    D).
    """

    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        ctx.save_for_backward(x if weight is not None else None, weight, cos, sin)
        ctx.eps = eps
        return rope_forward(x, weight, eps, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        x, weight, cos, sin = ctx.saved_tensors
        dx, dweight = rope_backward(dy, x, weight, ctx.eps, cos, sin)
        return dx, None if weight is None else dweight.to(weight.dtype), None, None, None


@operator("rope_forward", lambda x, *_: heads_last(x))
def rope_forward(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    x, y = side_by_side(x), heads_last(x)
    size, options = blocks(x)
    _rope_forward[(cdiv(size, options["ROWS"]),)](
        x,
        weight,
        cos,
        sin,
        y,
        size,
        eps,
        cos.stride(0),
        *x.stride()[:3],
        H=x.size(1),
        T=x.size(2),
        **options,
    )
    return y


def rope_gradients(dy, x, weight, *_):
    return heads_last(dy), dy.new_empty(0 if weight is None else dy.size(3), dtype=torch.float32)


@operator("rope_backward", rope_gradients)
def rope_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, the gradient of weight in float32, empty without one); x: None without weight."""
    dx, no_gradient = rope_gradients(dy, x, weight)
    dy, x = side_by_side(dy), side_by_side(dy if x is None else x)
    size, options = blocks(dy)
    steps = cdiv(size, options["ROWS"])
    programs = min(steps, ROPE_BACK_PROGRAMS * sm_count(dy.device))
    parts = dy.new_empty(0 if weight is None else programs, dy.size(3), dtype=torch.float32)
    _rope_backward[(programs,)](
        dy, x, weight, cos, sin, dx, parts, size, eps, cos.stride(0), *dy.stride()[:3],
        *x.stride()[:3], programs, H=dy.size(1), T=dy.size(2), STEPS=cdiv(steps, programs),
        STAGES=ROPE_BACK_STAGES, **options,
    )  # fmt: skip
    return dx, no_gradient if weight is None else parts.sum(0)


def side_by_side(x):
    return x if x.stride(3) == 1 else x.contiguous()


def heads_last(x):
    """A new (B, H, T, D) tensor which is (B, T, H, D) in memory:
    the layout of what qkv's GEMM wrote.
    """
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def blocks(x):
    """(B T H, the kernels' constants): a block has as many heads as
    have about ROPE_ELEMENTS numbers.
    """
    B, H, T, D = x.shape
    half = power_of_2(D // 2)
    return B * T * H, dict(
        D=D, HALF=half, ROWS=max(1, ROPE_ELEMENTS // (2 * half)), num_warps=ROPE_WARPS
    )


@triton.jit
def _rope_forward(
    x, weight, cos, sin, y, size, eps, row, x_batch, x_head, x_token,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, HALF)
    inside = (n < size)[:, None] & (cols < D // 2)[None, :]
    first, second, c, s = _halves(
        x, cos, sin, n, cols, inside, row, x_batch, x_head, x_token, H, T, D
    )
    if weight is not None:
        first, second, _ = _normalised(first, second, eps, D)
        first *= tl.load(weight + cols, mask=cols < D // 2, other=0.0).to(tl.float32)[None, :]
        second *= tl.load(weight + D // 2 + cols, mask=cols < D // 2, other=0.0).to(tl.float32)[
            None, :
        ]
    to = y + (n.to(tl.int64) * D)[:, None] + cols[None, :]
    tl.store(to, (first * c - second * s).to(y.dtype.element_ty), mask=inside)
    tl.store(to + D // 2, (second * c + first * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rope_backward(
    dy, x, weight, cos, sin, dx, parts, size, eps, row,
    dy_batch, dy_head, dy_token, x_batch, x_head, x_token, programs,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, HALF)
    w1 = tl.zeros((HALF,), tl.float32)
    w2 = tl.zeros((HALF,), tl.float32)
    if weight is not None:
        w1 = tl.load(weight + cols, mask=cols < D // 2, other=0.0).to(tl.float32)
        w2 = tl.load(weight + D // 2 + cols, mask=cols < D // 2, other=0.0).to(tl.float32)
    # a sum over rows in each step would go through shared memory
    sum1 = tl.zeros((ROWS, HALF), tl.float32)
    sum2 = tl.zeros((ROWS, HALF), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        n = (program + step * programs) * ROWS + tl.arange(0, ROWS)
        inside = (n < size)[:, None] & (cols < D // 2)[None, :]
        d1, d2, c, s = _halves(
            dy, cos, sin, n, cols, inside, row, dy_batch, dy_head, dy_token, H, T, D
        )
        g1 = d1 * c + d2 * s  # the rotation by the opposite angle
        g2 = d2 * c - d1 * s
        if weight is not None:
            x1, x2, _, _ = _halves(
                x, cos, sin, n, cols, inside, row, x_batch, x_head, x_token, H, T, D
            )
            x1, x2, rstd = _normalised(x1, x2, eps, D)
            sum1 += g1 * x1
            sum2 += g2 * x2
            g1 *= w1[None, :]
            g2 *= w2[None, :]
            mean = (tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / D
            g1 = (g1 - x1 * mean[:, None]) * rstd[:, None]
            g2 = (g2 - x2 * mean[:, None]) * rstd[:, None]
        to = dx + (n.to(tl.int64) * D)[:, None] + cols[None, :]
        tl.store(to, g1.to(dx.dtype.element_ty), mask=inside)
        tl.store(to + D // 2, g2.to(dx.dtype.element_ty), mask=inside)
    if weight is not None:
        tl.store(parts + program * D + cols, tl.sum(sum1, 0), mask=cols < D // 2)
        tl.store(parts + program * D + D // 2 + cols, tl.sum(sum2, 0), mask=cols < D // 2)


@triton.jit
def _halves(
    x,
    cos,
    sin,
    n,
    cols,
    inside,
    row,
    batch,
    head,
    token,
    H: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
):
    """The halves of the heads numbered n, in the order B, T, H,
    and their cosines and sines; float32.
    """
    t, b = n // H % T, n // (H * T)
    start = b.to(tl.int64) * batch + t.to(tl.int64) * token + (n % H).to(tl.int64) * head
    at = x + start[:, None] + cols[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
    angle = (t * row)[:, None] + cols[None, :]
    c, s = (
        tl.load(cos + angle, mask=inside, other=0.0),
        tl.load(sin + angle, mask=inside, other=0.0),
    )
    return first, second, c, s


@triton.jit
def _normalised(first, second, eps, D: tl.constexpr):
    """(both halves divided by their root mean square, 1 / that)"""
    rstd = 1 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
    return first * rstd[:, None], second * rstd[:, None], rstd
