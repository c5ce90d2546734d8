"""RMSNorm of each head and RoPE, or RoPE alone, in one pass over queries or keys; one backward.

RoPE: https://arxiv.org/abs/2104.09864; norms on queries and keys: https://arxiv.org/abs/2302.05442.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast.hopper import sm_count
from fast.operators import cdiv, dtypes_of, in_dtype, load_float32, operator, power_of_2

ROPE_ELEMENTS = 4096  # of a block of heads
ROPE_WARPS = 4
ROPE_BACK_PROGRAMS = 4  # of a multiprocessor
ROPE_BACK_STAGES = 1


class RopeFunction(torch.autograd.Function):
    """RoPE of the RMSNorm of x: (B, H, T, D) in bf16 -> (B, H, T, D), in memory (B, T, H, D).

    weight: the norm's, (D,); None for RoPE alone. cos, sin: (T, D/2) float32.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        ctx.eps = eps
        return rope_forward(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, cos, sin = ctx.saved_tensors
        dx, dweight = rope_backward(dy, x, weight, ctx.eps, cos, sin)
        return dx, in_dtype(dweight, *dtypes_of(weight)), None, None, None


@operator("rope_forward", lambda x, *_: heads_last(x))
def rope_forward(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    y = heads_last(x)
    x = contiguous_heads(x)
    heads, constants = blocks(x)
    _rope_forward[(cdiv(heads, constants["ROWS"]),)](
        x, weight, cos, sin, y, heads, eps, cos.stride(0), *x.stride()[:3], **constants
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
    dy = contiguous_heads(dy)
    x = dy if x is None else contiguous_heads(x)
    heads, constants = blocks(dy)
    steps = cdiv(heads, constants["ROWS"])
    programs = min(steps, ROPE_BACK_PROGRAMS * sm_count(dy.device))
    parts = dy.new_empty(0 if weight is None else programs, dy.size(3), dtype=torch.float32)
    _rope_backward[(programs,)](
        dy, x, weight, cos, sin, dx, parts, heads, eps, cos.stride(0), *dy.stride()[:3],
        *x.stride()[:3], programs, STEPS=cdiv(steps, programs), STAGES=ROPE_BACK_STAGES,
        **constants,
    )  # fmt: skip
    return dx, no_gradient if weight is None else parts.sum(0)


def contiguous_heads(x):
    return x if x.stride(3) == 1 else x.contiguous()


def heads_last(x):
    """A new tensor of x's shape, (B, H, T, D), in memory (B, T, H, D) as what qkv's GEMM wrote."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, D).transpose(1, 2)


def blocks(x):
    """(B T H, the kernels' constants); a block has as many heads as make up ROPE_ELEMENTS."""
    B, H, T, D = x.shape
    half = power_of_2(D // 2)
    rows = max(1, ROPE_ELEMENTS // (2 * half))
    return B * T * H, dict(H=H, T=T, D=D, HALF=half, ROWS=rows, num_warps=ROPE_WARPS)


@triton.jit
def _rope_forward(
    x, weight, cos, sin, y, heads, eps, row, x_batch, x_head, x_token,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, HALF)
    inside = (n < heads)[:, None] & (cols < D // 2)[None, :]
    first, second, c, s = _halves(
        x, cos, sin, n, cols, inside, row, x_batch, x_head, x_token, H, T, D
    )
    if weight is not None:
        first, second, _ = _normalised(first, second, eps, D)
        w1 = load_float32(weight + cols, cols < D // 2)
        first *= w1[None, :]
        w2 = load_float32(weight + D // 2 + cols, cols < D // 2)
        second *= w2[None, :]
    to = y + (n.to(tl.int64) * D)[:, None] + cols[None, :]
    tl.store(to, first * c - second * s, mask=inside)
    tl.store(to + D // 2, second * c + first * s, mask=inside)


@triton.jit
def _rope_backward(
    dy, x, weight, cos, sin, dx, parts, heads, eps, row,
    dy_batch, dy_head, dy_token, x_batch, x_head, x_token, programs,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, HALF)
    w1 = tl.zeros((HALF,), tl.float32)
    w2 = tl.zeros((HALF,), tl.float32)
    if weight is not None:
        w1 = load_float32(weight + cols, cols < D // 2)
        w2 = load_float32(weight + D // 2 + cols, cols < D // 2)
    # a sum over rows in each step would go through shared memory
    sum1 = tl.zeros((ROWS, HALF), tl.float32)
    sum2 = tl.zeros((ROWS, HALF), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        n = (program + step * programs) * ROWS + tl.arange(0, ROWS)
        inside = (n < heads)[:, None] & (cols < D // 2)[None, :]
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
        tl.store(to, g1, mask=inside)
        tl.store(to + D // 2, g2, mask=inside)
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
    """The halves of the heads numbered n in the order B, T, H, their cosines and sines; float32."""
    t = n // H % T
    b = n // (H * T)
    start = b.to(tl.int64) * batch + t.to(tl.int64) * token + (n % H).to(tl.int64) * head
    at = x + start[:, None] + cols[None, :]
    first = load_float32(at, inside)
    second = load_float32(at + D // 2, inside)
    angle = (t * row)[:, None] + cols[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    return first, second, c, s


@triton.jit
def _normalised(first, second, eps, D: tl.constexpr):
    """(both halves divided by their root mean square, 1 / that)"""
    rstd = 1 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
    return first * rstd[:, None], second * rstd[:, None], rstd
