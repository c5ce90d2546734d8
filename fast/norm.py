"""LayerNorm and RMSNorm to bf16 in one pass over memory, and their backward in one.

In compiled graphs fusion.py adds to the same passes: hence update, dtotal, first and column sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast.hopper import sm_count
from fast.operators import cdiv, dtypes_of, in_dtype, load_float32, operator, power_of_2

NORM_WIDTH = 1024  # columns of a row for each warp
NORM_BACK_WARPS = 8  # of a multiprocessor
NORM_BACK_STAGES = 3


class Norm(torch.autograd.Function):
    """LayerNorm (centred) or RMSNorm in bf16 of x: (..., C) in any dtype; weight, shift: (C,)."""

    @staticmethod
    def forward(ctx, x, weight, shift, eps, centred):
        _, h, stats = norm_forward(x, None, weight, shift, eps, centred)
        ctx.save_for_backward(x, stats, weight)
        ctx.centred = centred
        ctx.dtypes = dtypes_of(weight, shift)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, dh):
        dx, sums = norm_backward(None, dh, *ctx.saved_tensors, ctx.centred)
        dweight, dshift, _ = sums.unbind()
        weight_dtype, shift_dtype = ctx.dtypes
        return dx, in_dtype(dweight, weight_dtype), in_dtype(dshift, shift_dtype), None, None


def norm_results(x, update=None, weight=None, shift=None, eps=None, centred=None, keep=True):
    if update is None:
        total = x.new_empty(0)
    else:
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = x.new_empty(x.shape if keep else 0, dtype=torch.bfloat16)
    stats = x.new_empty(2, x.numel() // x.size(-1), dtype=torch.float32)
    return total, h, stats


@operator("norm_forward", norm_results)
def norm_forward(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    eps: float,
    centred: bool,
    keep: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + update, its norm in bf16, stats: each row's mean and 1 / deviation, (2, rows) float32).

    Without update the sum is empty, with keep=False the norm, which fp8.cast computes from stats.
    """
    total, h, stats = norm_results(x, update, keep=keep)
    C, N = x.size(-1), stats.size(1)
    block = power_of_2(C)
    rows = max(1, 4096 // block)
    if update is not None:
        update = update.contiguous()
    _norm_forward[(cdiv(N, rows),)](
        x.contiguous(), update, weight, shift, total, h, stats, N, eps, keep,
        C=C, CENTRED=centred, BLOCK=block, ROWS=rows, num_warps=max(2, block // NORM_WIDTH),
    )  # fmt: skip
    return total, h, stats


def norm_gradients(dtotal, dh, total, *_, **__):
    return torch.empty_like(total), total.new_empty(3, total.size(-1), dtype=torch.float32)


@operator("norm_backward", norm_gradients)
def norm_backward(
    dtotal: Tensor | None,
    dh: Tensor,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    centred: bool,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, sums) of the norm of `total`; sums, (3, C) float32: dweight, dshift, column sums of dx.

    dtotal: the gradient that reaches the sum by the residual path, added to dx; None: there is
    none. first: more gradient of the norm's first columns, added to dh.
    """
    C, N = total.size(-1), stats.size(1)
    block = power_of_2(C)
    warps = max(1, block // NORM_WIDTH)
    programs = min(N, max(1, NORM_BACK_WARPS // warps) * sm_count(total.device))
    dx = torch.empty_like(total)
    parts = total.new_empty(programs, 3, C, dtype=torch.float32)
    if dtotal is not None:
        dtotal = dtotal.contiguous()
    if first is not None:
        first = first.contiguous()
    _norm_backward[(programs,)](
        dtotal, dh.contiguous(), total, stats, weight, dx, parts, first, N,
        FIRST=0 if first is None else first.size(-1), C=C, CENTRED=centred, BLOCK=block,
        PROGRAMS=programs, STEPS=cdiv(N, programs), STAGES=NORM_BACK_STAGES, num_warps=warps,
    )  # fmt: skip
    return dx, parts.sum(0)


@triton.jit
def _norm_forward(
    x, update, weight, shift, total, h, stats, N, eps, KEEP: tl.constexpr,
    C: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    start = tl.cast(first, tl.int64) * C  # 64 bits once, not for each element
    cols = tl.arange(0, BLOCK)
    rows = first + tl.arange(0, ROWS)
    inside = (rows < N)[:, None] & (cols < C)[None, :]
    at = tl.arange(0, ROWS)[:, None] * C + cols[None, :]
    x += start
    total += start
    h += start
    if update is not None:
        update += start
    value = load_float32(x + at, inside)
    if update is not None:
        value += load_float32(update + at, inside)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the backward reads
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        mean = tl.sum(value, 1) / C
        value = tl.where(inside, value - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(value * value, 1) / C + eps)
    tl.store(stats + rows, mean, mask=rows < N)
    tl.store(stats + N + rows, rstd, mask=rows < N)
    if KEEP:
        out = value * rstd[:, None] * tl.load(weight + cols, mask=cols < C).to(tl.float32)[None, :]
        if shift is not None:
            out += tl.load(shift + cols, mask=cols < C).to(tl.float32)[None, :]
        tl.store(h + at, out, mask=inside)


@triton.jit
def _norm_backward(
    dtotal, dh, total, stats, weight, dx, parts, first, N, FIRST: tl.constexpr, C: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    w = load_float32(weight + cols, cols < C)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    column = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = program + step * PROGRAMS
        inside = (cols < C) & (row < N)
        start = tl.cast(row, tl.int64) * C
        given = load_float32(dh + start + cols, inside)
        if first is not None:
            more = first + tl.cast(row, tl.int64) * FIRST + cols
            given += load_float32(more, inside & (cols < FIRST))
        value = load_float32(total + start + cols, inside)
        rstd = tl.load(stats + N + row, mask=row < N, other=0.0)
        if CENTRED:
            value = tl.where(inside, value - tl.load(stats + row, mask=row < N, other=0.0), 0.0)
        value *= rstd
        dweight += given * value
        dshift += given
        given *= w
        grad = given - value * (tl.sum(given * value) / C)
        if CENTRED:
            grad -= tl.sum(given) / C
        grad *= rstd
        if dtotal is not None:
            grad += load_float32(dtotal + start + cols, inside)
        column += grad
        tl.store(dx + start + cols, grad, mask=inside)
    parts += program * 3 * C + cols
    tl.store(parts, dweight, mask=cols < C)
    tl.store(parts + C, dshift, mask=cols < C)
    tl.store(parts + 2 * C, column, mask=cols < C)
