"""precision=fp8: the GEMMs of linear layers and of the head in 8-bit floats while they train.

Activations and weights are cast to e4m3, gradients to e5m2 (https://arxiv.org/abs/2209.05433). Each
tensor has one scale, a power of two, from its amax in the previous call with room to spare (delayed
scaling); in the first call, and for weights that FSDP2 gathers in 8 bits (`ShardIn8Bits`), from its
own. Hopper's fp8 GEMMs need both operands contiguous along K, so every cast tensor is stored
transposed as well, for the gradients. All else is as in bf16. The amax history belongs to a layer
(`train_in_fp8`).
"""

from typing import NamedTuple

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._mode_utils import no_dispatch

from fast import cublas, loss
from fast.linear import empty_product, join_heads, split_heads
from fast.operators import (
    INTERPRETED,
    LOG2E,
    cdiv,
    dtypes_of,
    exp2,
    in_dtype,
    load_float32,
    operator,
    power_of_2,
    reciprocal,
)

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAST_ROWS, CAST_COLS, CAST_WARPS = 64, 64, 4  # of a program
# a program that sums columns takes 8 x 64 rows, in 3 pipeline stages; others 64
SUM_STEPS, SUM_STAGES = 8, 3
TRANSPOSE_TILE, COPY_BLOCK = 128, 8192
# GELU(x) = x (1 + tanh u) / 2 = x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). As a power
# of two e^(-2 u) is 2^(x (GELU_LINEAR + GELU_CUBIC x^2)); 2 u' is SLOPE_CONSTANT + SLOPE_SQUARE x^2
GELU_LINEAR, GELU_CUBIC = tl.constexpr(-2.302208198), tl.constexpr(-0.102943240)
SLOPE_CONSTANT, SLOPE_SQUARE = tl.constexpr(1.595769122), tl.constexpr(0.214064450)
SCALE_PROGRAMS = 64  # programs that share x where its largest value must be found before the cast
# a scale leaves room for so many times the last amax; larger values saturate
ROOM, GRADIENT_ROOM = 2.0, 64.0
# of the logits' gradient, which is in [-1, 1]: e5m2 reaches from 57,344 down to 2^-16
HEAD_SCALE = 2.0**14


def train_in_fp8(layer):
    """Makes a linear layer (the head too) train in fp8, if all its widths are multiples of 16."""
    if all(size % 16 == 0 for p in layer.parameters() for size in p.shape):
        # of its input, weight and output's gradient, four values each: see `_update_scale`
        for name in ("x_amax", "w_amax", "dy_amax"):
            layer.register_buffer(
                name, torch.zeros(4, device=layer.weight.device), persistent=False
            )


def reset(model):
    """Forgets all amax values: the next call of each layer takes its tensors' own."""
    for name, buffer in model.named_buffers():
        if name.endswith("_amax"):
            buffer.zero_()


class Operands(NamedTuple):
    """What the functions below take of a layer that trains in fp8; weight: (N, K), contiguous."""

    weight: Tensor
    bias: Tensor | None
    x_amax: Tensor
    w_amax: Tensor
    dy_amax: Tensor


def operands(layer):
    weight = layer.weight.contiguous()
    return Operands(weight, layer.bias, layer.x_amax, layer.w_amax, layer.dy_amax)


class Saved(NamedTuple):
    """What the backward of a linear layer reads; x: (M, K), W: (N, K)."""

    xt: Tensor  # x^T in fp8
    x_scale: Tensor
    w: Tensor  # W in fp8, with contiguous columns; or gathered as `ShardIn8Bits`
    w_scale: Tensor
    dy_amax: Tensor


class LinearFunction(torch.autograd.Function):
    """x W^T + b; x: (..., K) in bf16; layer: its `Operands`, one by one, as autograd needs them."""

    @staticmethod
    def forward(ctx, x, *layer):
        return linear_forward(ctx, x, Operands(*layer)).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        flat = dy.flatten(0, -2).contiguous()
        dx, dw, _ = gradients([flat], Saved(*ctx.saved_tensors), ctx.dtypes, sums=False)
        db = None
        bias_dtype = ctx.dtypes[1]
        if bias_dtype is not None:
            # not by the cast: if dy is from a norm's backward, fusion.py has that kernel add it up
            db = flat.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx.unflatten(0, dy.shape[:-1]), dw, db, None, None, None


class QKV(torch.autograd.Function):
    """As fast.linear.QKV."""

    @staticmethod
    def forward(ctx, x, heads, head_dim, *layer):
        y = linear_forward(ctx, x, Operands(*layer))
        return split_heads(y, x.shape[:-1], heads, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        saved = Saved(*ctx.saved_tensors)
        dx, dw, db = gradients(join_heads(dq, dk, dv), saved, ctx.dtypes)
        return dx.unflatten(0, (dq.size(0), dq.size(2))), None, None, dw, db, None, None, None


class MLPFunction(torch.autograd.Function):
    """As fast.mlp.MLPFunction; casts compute the activation and its derivative."""

    @staticmethod
    def forward(ctx, kind, x, *layers):
        up, down = Operands(*layers[:5]), Operands(*layers[5:])
        ctx.kind = kind
        ctx.dtypes = dtypes_of(up.weight, up.bias, down.weight, down.bias)
        before, of_up, _ = forward_product(x.flatten(0, -2), up)
        y, of_down, act8 = forward_product(before, down, kind)
        beside = [before]
        if kind == "relu2":
            beside = [act8, of_down.x_scale]
        ctx.save_for_backward(*of_up, *of_down, *beside)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved = ctx.saved_tensors  # asked once: a checkpoint does not answer again
        up = Saved(*saved[:5])
        down = Saved(*saved[5:10])
        beside = saved[10:]
        dact, dw2, db2 = gradients([dy.flatten(0, -2).contiguous()], down, ctx.dtypes[2:])
        dx, dw1, db1 = gradients([dact], up, ctx.dtypes[:2], beside, "d" + ctx.kind)
        nones = None, None, None
        return None, dx.unflatten(0, dy.shape[:-1]), dw1, db1, *nones, dw2, db2, *nones


def linear_forward(ctx, x, layer):
    """The GEMM of a linear layer, (..., K) -> (M, N); saves the operands of `gradients` in ctx."""
    y, saved, _ = forward_product(x.flatten(0, -2), layer)
    ctx.save_for_backward(*saved)
    ctx.dtypes = dtypes_of(layer.weight, layer.bias)
    return y


def forward_product(x, layer, what="copy"):
    """(a W^T + b, Saved, a in fp8) of the layer's `Operands`; a: what `cast` makes of x."""
    x8, x8t, x_scale, _ = cast([x], layer.x_amax, [], what)
    if layer.w_amax.dim() == 0:  # gathered as `ShardIn8Bits`
        w = layer.weight
        wt = layer.weight.t()
        w_scale = layer.w_amax
    else:
        w8, w8t, w_scale, _ = cast([layer.weight], layer.w_amax, [])
        w = w8t.t()
        wt = w8.t()
    y = product(x8, wt, in_dtype(layer.bias, x.dtype), x.dtype, x_scale, w_scale, True)
    return y, Saved(x8t, x_scale, w, w_scale, layer.dy_amax), x8


def gradients(dy, saved, dtypes, beside=(), what="copy", sums=True):
    """(dx, dw, db or None) of a linear layer from dy: (M, N) in parts; beside, what: see `cast`."""
    w_dtype, b_dtype = dtypes
    sums = sums and b_dtype is not None
    dy8, dy8t, dy_scale, columns = cast(dy, saved.dy_amax, list(beside), what, e5m2=True, sums=sums)
    dx = product(dy8, saved.w, None, dy[0].dtype, dy_scale, saved.w_scale, True)
    dw = product(dy8t, saved.xt.t(), None, w_dtype, dy_scale, saved.x_scale)
    return dx, dw, in_dtype(columns, b_dtype)


@operator("product8", empty_product)
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    a_scale: Tensor,
    b_scale: Tensor,
    fast: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """a @ b * a_scale * b_scale + bias + added.

    a: (M, K) in fp8 with contiguous rows; b: (K, N) in fp8 with contiguous columns, or a gathered
    weight (`ShardIn8Bits`) or its transpose. fast: see cublas.matmul; for outputs and input
    gradients, not for weight gradients.
    """
    out = empty_product(a, b, bias, dtype)
    if b.dtype == torch.bfloat16:  # gathered as `ShardIn8Bits`, the transpose for x W^T
        if b.stride(0) == 1:
            b = halves(b.t())[0].t()
        else:
            b = halves(b)[1].t()
    return cublas.matmul(a, b, out, bias=bias, added=added, scales=(a_scale, b_scale), fast=fast)


def cast_results(parts, amax, beside, what="copy", e5m2=False, sums=False):
    dtype = E5M2 if e5m2 else E4M3
    x = parts[0]
    M = x.size(0)
    N = sum(part.size(1) for part in parts)
    if what == "swiglu":
        N //= 2
    if what == "dswiglu":
        N *= 2
    out = x.new_empty(M, N, dtype=dtype)
    out_t = x.new_empty(N, M, dtype=dtype)
    scale = x.new_empty((), dtype=torch.float32)
    columns = x.new_empty(N if sums else 0, dtype=torch.float32)
    return out, out_t, scale, columns


@operator("cast8", cast_results, mutates=["amax"])
def cast(
    parts: list[Tensor],
    amax: Tensor,
    beside: list[Tensor],
    what: str = "copy",
    e5m2: bool = False,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the result in fp8, its transpose, the factor that undoes the scale, float32 column sums).

    parts: x, (M, N), M a multiple of 16; with copy, gelu and relu2 up to three contiguous (M, N_i)
    that make up x. amax: the values that the scale is made from and that this call sees, updated in
    place, four of them (`_update_scale`); one buffer for each operand. Without `sums` the column
    sums are empty. what: the result, which is with these tensors `beside`:

    copy []                     x
    gelu [], dgelu [y]          gelu(x), x gelu'(y)
    relu2 []                    relu2(x)
    drelu2 [act, factor]        x relu2'(y); act: relu2(y) in fp8, factor: what undoes its scale
    swiglu []                   silu(gate) up; x: gate and up side by side, (M, 2 N)
    dswiglu [gate and up]       their gradients, (M, N); x: that of silu(gate) up, (M, N / 2)
    gate [gates: (M, heads)]    each head of x times its gate
    norm [stats, weight]        the norm of x; stats: norm_forward's
    shifted_norm [stats, weight, shift]     likewise
    """
    x = parts[0]
    assert x.size(0) % 16 == 0
    out, out_t, scale, columns = cast_results(parts, amax, beside, what, e5m2, sums)
    M, N = out.shape
    widths = [part.size(1) for part in parts] + [0] * (3 - len(parts))
    if what == "swiglu":
        widths[0] //= 2
    strips = sum(cdiv(width, CAST_COLS) for width in widths)
    steps, stages = (SUM_STEPS, SUM_STAGES) if sums else (1, 1)
    programs = cdiv(M, CAST_ROWS * steps)
    partial = out.new_empty(programs if sums else 0, N, dtype=torch.float32)
    limit = torch.finfo(out.dtype).max
    room = GRADIENT_ROOM if e5m2 else ROOM
    first_beside, *more = beside or [None]
    heads = first_beside.size(1) if what == "gate" else 1
    inputs = [*parts, *more]
    inputs += [x] * (3 - len(inputs))  # which the kernels do not read
    inputs.append(first_beside)
    _update_scale[(SCALE_PROGRAMS,)](
        *inputs, amax, scale, M, limit / room, *widths, heads, what, BLOCK=4096, num_warps=8
    )
    _cast[(strips, programs)](
        *inputs, out, out_t, partial, amax, scale, M // 4, limit, *widths, heads, what,
        SUMS=sums, ROWS=CAST_ROWS, COLS=CAST_COLS, STEPS=steps, STAGES=stages, num_warps=CAST_WARPS,
    )  # fmt: skip
    return out, out_t, scale, partial.sum(0) if sums else columns


@triton.jit
def _rounded(x, limit, dtype: tl.constexpr):
    """x in fp8, at most `limit` from 0. NaN, of which tl.clamp alone makes -limit, stays NaN."""
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)


# In the kernels below x is in up to three parts, `first` to `third`. `beside` is the first tensor
# that `cast` has beside x. Where x is `first` alone, `second` and `third` are the others: a norm's
# weight and shift, or "drelu2"'s factor.


@triton.jit
def _values(
    x, beside, second, third, rows, cols, inside, M, rest, width, HEADS: tl.constexpr,
    WHAT: tl.constexpr,
):  # fmt: skip
    """Two float32 tensors: the values to cast, and for "dswiglu" the gradients of up.

    The first are then those of gate; for others both are the same. x and beside point to row 0 of
    `rows`. M: the rows of the whole matrix; rest: those from there to its end.
    """
    in_gate = rows * (2 * width) + cols  # where gate and up are side by side
    in_row = rows * width + cols
    if WHAT == "swiglu":
        gate = load_float32(x + in_gate, inside)
        s = _sigmoid2(gate * -LOG2E)
        up = load_float32(x + in_gate + width, inside)
        value = gate * (s * up)
    else:
        value = load_float32(x + in_row, inside)
    of_up = value
    if WHAT == "dswiglu":
        gate = load_float32(beside + in_gate, inside)
        up = load_float32(beside + in_gate + width, inside)
        s = _sigmoid2(gate * -LOG2E)
        of_up = value * gate * s
        value *= up * (s + s * ((1 - s) * gate))
    elif WHAT == "gelu":
        value *= _sigmoid2(value * (GELU_LINEAR + GELU_CUBIC * (value * value)))
    elif WHAT == "dgelu":
        y = load_float32(beside + in_row, inside)
        square = y * y
        s = _sigmoid2(y * (GELU_LINEAR + GELU_CUBIC * square))
        value *= s + s * ((1 - s) * (y * (SLOPE_CONSTANT + SLOPE_SQUARE * square)))
    elif WHAT == "relu2":
        value = tl.where(value < 0, 0.0, value * value)  # unlike tl.maximum it keeps NaN
    elif WHAT == "drelu2":
        act = load_float32(beside + in_row, inside) * tl.load(second)
        value *= 2 * tl.sqrt(act)
    elif WHAT == "gate":
        value *= load_float32(beside + rows * HEADS + cols // (width // HEADS), inside)
    elif WHAT == "norm" or WHAT == "shifted_norm":
        value -= tl.load(beside + rows, mask=rows < rest, other=0.0)  # the row's mean
        value *= tl.load(beside + M + rows, mask=rows < rest, other=0.0)  # 1 / its deviation
        value *= load_float32(second + cols, cols < width)
        if WHAT == "shifted_norm":
            value = tl.where(inside, value + load_float32(third + cols, cols < width), 0.0)
    return value, of_up


@triton.jit
def _sigmoid2(x):
    """1 / (1 + 2^x)"""
    return reciprocal(1 + exp2(x))


@triton.jit
def _update_scale(
    first, second, third, beside, amax, scale, M, limit,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, HEADS: tl.constexpr,
    WHAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scale of this call, from the amax that the last call saw.

    Where that call saw zeros alone, the amax that its own scale came from is used again. Where
    there is none either (at the first call, and in the first steps of a model whose projections
    start at zero), the amax of x itself is taken: each program looks at a part of x, and the last
    one to end writes the result.
    """
    used = amax  # what the last call's scale came from
    seen = amax + 1  # the amax of the last call itself, then of this one
    largest = amax + 2  # of x, over all programs; 0 between the calls
    ended = amax + 3  # how many programs have ended; 0 between the calls
    known = tl.load(seen)
    if known == 0.0:
        known = tl.load(used)
    if known == 0.0:
        most = _largest(first, beside, second, third, M, FIRST, HEADS, WHAT, BLOCK)
        if SECOND > 0:
            of_second = _largest(second, beside, second, third, M, SECOND, HEADS, WHAT, BLOCK)
            most = tl.maximum(most, of_second)
        if THIRD > 0:
            of_third = _largest(third, beside, second, third, M, THIRD, HEADS, WHAT, BLOCK)
            most = tl.maximum(most, of_third)
        tl.atomic_max(largest, most)
    before = tl.atomic_add(ended, 1.0)
    if before == tl.num_programs(0) - 1:  # the last of the programs
        if known == 0.0:
            known = tl.atomic_max(largest, 0.0)  # reads it
        tl.store(used, known)
        tl.store(seen, 0.0)
        tl.store(largest, 0.0)
        tl.store(ended, 0.0)
        tl.store(scale, tl.exp2(-_scale_exponent(known, limit)))


@triton.jit
def _scale_exponent(amax, limit):
    """The exponent of the largest power of two whose product with `amax` is at most `limit`."""
    return tl.minimum(tl.floor(tl.log2(limit / tl.maximum(amax, 1e-30))), 100.0)


@triton.jit
def _largest(
    x, beside, second, third, M,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, WHAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest magnitude in this program's share of a part of x."""
    most = tl.zeros((BLOCK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    size = tl.cast(M, tl.int64) * WIDTH
    while start < size:
        at = start + tl.arange(0, BLOCK)
        row = at // WIDTH
        col = at % WIDTH
        value, more = _values(
            x, beside, second, third, row, col, at < size, M, M, WIDTH, HEADS, WHAT
        )
        most = tl.maximum(most, tl.abs(value))
        if WHAT == "dswiglu":
            most = tl.maximum(most, tl.abs(more))
        start += tl.num_programs(0) * BLOCK
    return tl.max(most)


@triton.jit
def _cast(
    first, second, third, beside, out, out_t, partial, amax, scale, quads, limit,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, HEADS: tl.constexpr,
    WHAT: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program casts COLS columns, STEPS times ROWS rows; amax and column sums stay in registers.

    Rows are taken in quads, since Triton transposes words faster than bytes: the bytes of four rows
    become one word of the transpose. quads: the rows of all programs, divided by four.
    """
    N: tl.constexpr = 2 * FIRST if WHAT == "dswiglu" else FIRST + SECOND + THIRD  # of the result
    strip = tl.program_id(0)
    program = tl.program_id(1)
    # the part of x that has this strip of columns, and how many columns are left of the part
    x, width, left = first, FIRST, 0
    if SECOND > 0:
        if strip >= (FIRST + COLS - 1) // COLS:
            x, width, left = second, SECOND, FIRST
            strip -= (FIRST + COLS - 1) // COLS
    if THIRD > 0:
        if (left == FIRST) & (strip >= (SECOND + COLS - 1) // COLS):
            x, width, left = third, THIRD, FIRST + SECOND
            strip -= (SECOND + COLS - 1) // COLS
    quad = tl.arange(0, ROWS // 4)[:, None]
    cols = strip * COLS + tl.arange(0, COLS)[None, :]
    out_t = out_t.to(tl.pointer_type(tl.int32), bitcast=True) + tl.cast(left, tl.int64) * quads
    factor = 1 / tl.load(scale)
    most = tl.zeros((ROWS // 4, COLS), tl.float32)
    sums = tl.zeros((ROWS // 4, COLS), tl.float32)
    sums_of_up = tl.zeros((ROWS // 4, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        tile = program * STEPS + step
        start = tl.cast(tile, tl.int64) * ROWS
        row = 4 * quad
        inside = (tile * (ROWS // 4) + quad < quads) & (cols < width)
        here = x + start * (2 * width if WHAT == "swiglu" else width)
        beside_x = beside
        if beside is not None:
            beside_x += start * _width_beside(width, HEADS, WHAT)
        M = 4 * quads
        rest = M - start
        # all loads are before the first store, since the compiler does not move them across one
        v0, w0 = _values(
            here, beside_x, second, third, row, cols, inside, M, rest, width, HEADS, WHAT
        )
        v1, w1 = _values(
            here, beside_x, second, third, row + 1, cols, inside, M, rest, width, HEADS, WHAT
        )
        v2, w2 = _values(
            here, beside_x, second, third, row + 2, cols, inside, M, rest, width, HEADS, WHAT
        )
        v3, w3 = _values(
            here, beside_x, second, third, row + 3, cols, inside, M, rest, width, HEADS, WHAT
        )
        to = out + start * N + left
        to_t = out_t + tile * (ROWS // 4)
        values = v0, v1, v2, v3
        _store(values, factor, limit, to, to_t, quad, cols, inside, quads, N)
        most = tl.maximum(most, _amax(values))
        if SUMS:
            sums += (v0 + v1) + (v2 + v3)
        if WHAT == "dswiglu":
            to += width
            to_t += tl.cast(width, tl.int64) * quads
            of_up = w0, w1, w2, w3
            _store(of_up, factor, limit, to, to_t, quad, cols, inside, quads, N)
            most = tl.maximum(most, _amax(of_up))
            if SUMS:
                sums_of_up += (w0 + w1) + (w2 + w3)
    tl.atomic_max(amax + 1, tl.max(most))
    if SUMS:
        at = partial + program * N + left + cols
        tl.store(at, tl.sum(sums, 0)[None, :], mask=cols < width)
        if WHAT == "dswiglu":
            tl.store(at + width, tl.sum(sums_of_up, 0)[None, :], mask=cols < width)


@triton.jit
def _width_beside(width, HEADS: tl.constexpr, WHAT: tl.constexpr):
    """How many numbers of the first tensor beside x belong to a row of x."""
    numbers = width
    if WHAT == "norm" or WHAT == "shifted_norm":
        numbers = 1
    elif WHAT == "gate":
        numbers = HEADS
    elif WHAT == "dswiglu":
        numbers = 2 * width
    return numbers


@triton.jit
def _amax(quad):
    v0, v1, v2, v3 = quad
    return tl.maximum(tl.maximum(tl.abs(v0), tl.abs(v1)), tl.maximum(tl.abs(v2), tl.abs(v3)))


@triton.jit
def _store(values, factor, limit, out, out_t, quad, cols, inside, quads, N: tl.constexpr):
    """Stores the four rows of quads in fp8, and their transpose."""
    dtype: tl.constexpr = out.dtype.element_ty
    v0 = values[0] * factor
    v1 = values[1] * factor
    v2 = values[2] * factor
    v3 = values[3] * factor
    at = out + (4 * quad * N + cols)
    tl.store(at, _rounded(v0, limit, dtype), mask=inside)
    tl.store(at + N, _rounded(v1, limit, dtype), mask=inside)
    tl.store(at + 2 * N, _rounded(v2, limit, dtype), mask=inside)
    tl.store(at + 3 * N, _rounded(v3, limit, dtype), mask=inside)
    at = out_t + tl.trans(cols.to(tl.int64) * quads + quad)
    tl.store(at, tl.trans(_word(v0, v1, v2, v3, limit, dtype)), mask=tl.trans(inside))


@triton.jit
def _word(v0, v1, v2, v3, limit, dtype: tl.constexpr):
    """The fp8 bytes of four numbers in one 32-bit word, v0's the lowest.

    In PTX, since ptxas 12.8 drops a byte of Triton's own conversion that is both packed and stored
    alone.
    """
    if INTERPRETED:
        low = _bits(v0, limit, dtype) | _bits(v1, limit, dtype) << 8
        return low | _bits(v2, limit, dtype) << 16 | _bits(v3, limit, dtype) << 24
    kind: tl.constexpr = "e5m2" if dtype == tl.float8e5 else "e4m3"
    cvt: tl.constexpr = "cvt.rn.satfinite." + kind + "x2.f32 "
    pairs: tl.constexpr = cvt + "lower, $2, $1; " + cvt + "upper, $4, $3; "
    code: tl.constexpr = "{ .reg .b16 lower, upper; " + pairs + "mov.b32 $0, {lower, upper}; }"
    return tl.inline_asm_elementwise(
        code, "=r,f,f,f,f", [v0, v1, v2, v3], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _bits(v, limit, dtype: tl.constexpr):
    return _rounded(v, limit, dtype).to(tl.uint8, bitcast=True).to(tl.int32)


def transpose(x, out):
    """out = x.T, of bytes."""
    M, N = x.shape
    _transpose[cdiv(M, TRANSPOSE_TILE), cdiv(N, TRANSPOSE_TILE)](
        x.view(torch.uint8), out.view(torch.uint8), M, N, TILE=TRANSPOSE_TILE, num_warps=8
    )


@triton.jit
def _transpose(x, out, M, N, TILE: tl.constexpr):
    first_row = tl.program_id(0) * TILE
    first_col = tl.program_id(1) * TILE
    down = tl.arange(0, TILE)[:, None]
    across = tl.arange(0, TILE)[None, :]
    inside = (first_row + down < M) & (first_col + across < N)
    x += tl.cast(first_row, tl.int64) * N + first_col
    out += tl.cast(first_col, tl.int64) * M + first_row
    tile = tl.load(x + down * N + across, mask=inside)
    tl.store(out + (down * M + across), tl.trans(tile), mask=tl.trans(inside))


# -- gathered weights


def gather_in_8_bits(layers, ranks):
    """Before fully_shard: weights of layers in fp8 become `ShardIn8Bits`, their w_amax the scale.

    A weight whose rows cannot be divided among the ranks stays as it is.
    """
    for layer in layers:
        if hasattr(layer, "w_amax") and layer.weight.size(0) % ranks == 0:
            before = layer.weight
            shard = before.detach().as_subclass(ShardIn8Bits)
            layer.weight = nn.Parameter(shard, before.requires_grad)
            vars(layer.weight).update(vars(before))  # an edit's attributes
            layer.w_amax = layer.w_amax.new_zeros(())


class ShardIn8Bits(Tensor):
    """A rank's rows of a weight, gathered in e4m3 through FSDP2's hooks, the two fsdp_* methods.

    The gathered parameter is nominally a bf16 tensor (N, K), so that its gradient is bf16; its
    bytes hold the weight in e4m3 and then its transpose, both made once per gather. `product` and
    `Widened` alone understand them: fsdp.shard gathers in bf16 the weight of a layer that other
    code reads.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        """The tensor's own operations; copies and views that FSDP2 makes remain `ShardIn8Bits`."""
        with no_dispatch():
            out = operation(*args, **(kwargs or {}))
        kept = (aten.new_zeros, aten.slice, aten.detach, aten.empty_like)
        return out.as_subclass(cls) if operation.overloadpacket in kept else out

    def fsdp_pre_all_gather(self, mesh, size, stride, layer, policy):
        rows = self.as_subclass(Tensor)
        amax = torch.linalg.vector_norm(rows, float("inf"), dtype=torch.float32).view(1)
        rows8 = torch.empty_like(rows, dtype=E4M3)
        total = rows.numel()
        _shrink[(cdiv(total, COPY_BLOCK),)](rows, amax, rows8, total, BLOCK=COPY_BLOCK, num_warps=8)
        return (rows8, amax), layer.w_amax

    def fsdp_post_all_gather(self, gathered, scale, dtype, *, out=None):
        rows8, amaxes = gathered
        both = torch.empty_like(rows8, dtype=dtype) if out is None else out.detach()
        straight, across = halves(both)
        ranks = amaxes.numel()
        each = rows8.numel() // ranks
        _align[(ranks, cdiv(each, COPY_BLOCK))](
            rows8, amaxes, straight, scale, each,
            RANKS=ranks, ALL=power_of_2(ranks), BLOCK=COPY_BLOCK, num_warps=8,
        )  # fmt: skip
        transpose(straight, across)
        # FSDP2 would keep it as long as `both`, and allocates it again
        rows8.untyped_storage().resize_(0)
        if out is None:
            return both, (both,)


class Widened(torch.autograd.Function):
    """A weight that was gathered as `ShardIn8Bits`, in bf16."""

    @staticmethod
    def forward(ctx, both, scale):
        return widened(both, scale)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@operator("widened", lambda both, scale: torch.empty_like(both))
def widened(both: Tensor, scale: Tensor) -> Tensor:
    return halves(both)[0].to(both.dtype) * scale


def halves(both):
    """(N, K) and (K, N) in e4m3: the bytes of a tensor (N, K) in bf16."""
    N, K = both.shape
    first, second = both.view(E4M3).view(2, N * K)
    return first.view(N, K), second.view(K, N)


@triton.jit
def _shrink(x, amax, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = load_float32(x + at, at < size)
    v *= tl.exp2(_scale_exponent(tl.load(amax), 448.0))
    tl.store(out + at, _rounded(v, 448.0, out.dtype.element_ty), mask=at < size)


@triton.jit
def _align(
    x, amaxes, out, scale, each, RANKS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr
):
    """Brings the ranks' shards, `each` numbers long, to the scale of the rank with most amax."""
    rank = tl.program_id(0)
    ranks = tl.arange(0, ALL)
    power = _scale_exponent(tl.max(tl.load(amaxes + ranks, mask=ranks < RANKS, other=0.0)), 448.0)
    start = rank.to(tl.int64) * each
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = load_float32(x + start + at, at < each)
    v *= tl.exp2(power - _scale_exponent(tl.load(amaxes + rank), 448.0))
    tl.store(out + start + at, v, mask=at < each)
    tl.store(scale, tl.exp2(-power))  # the same from all


# -- the head


@operator(
    "cross_entropy_chunks8",
    lambda x, weight, *_: loss.empty_results(x, weight),
    mutates=["x_amax", "w_amax"],
)
def cross_entropy_chunks8(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    V: int,
    x_amax: Tensor,
    w_amax: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss.cross_entropy_chunks, always with gradients, without factors; N must divide by 16."""
    N, P = x.size(0), weight.size(0)
    rows = min(N, loss.chunk_rows(P))
    losses, dx, dw = loss.empty_results(x, weight)
    x8, x8t, x_scale, _ = cast([x], x_amax, [])
    w8, w8t, w_scale, _ = cast([weight], w_amax, [])
    grad_scale = torch.full((), 1 / HEAD_SCALE, device=x.device)
    all_logits = x.new_empty(rows, P)
    all_grads = x.new_empty(rows, P, dtype=E5M2)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        logits = all_logits[: N - start]
        grads = all_grads[: N - start]
        grads_t = x.new_empty(P, grads.size(0), dtype=E5M2)
        cublas.matmul(x8[chunk], w8.t(), logits, scales=(x_scale, w_scale), fast=True)
        loss.cross_entropy_rows(logits, targets[chunk], losses[chunk], grads, V, HEAD_SCALE)
        transpose(grads, grads_t)
        cublas.matmul(grads, w8t.t(), dx[chunk], scales=(grad_scale, w_scale))
        before = dw if start else None
        cublas.matmul(grads_t, x8t[:, chunk].t(), dw, added=before, scales=(grad_scale, x_scale))
    return losses, dx, dw


HeadFunction = loss.summed_loss(cross_entropy_chunks8)
