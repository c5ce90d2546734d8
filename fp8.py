"""precision=fp8: linear layers and head in 8-bit floats, put in from outside after fused.swap.

A tensor has one scale, a power of two, so that it decides what overflows but not how numbers are rounded. Activations
and weights are e4m3, gradients e5m2 (https://arxiv.org/abs/2209.05433). A scale comes from the largest magnitude at the
call before, with room to spare; the first, and that of a gathered weight, from the tensor itself. Hopper multiplies fp8
along contiguous rows only, so that what is cast is transposed as well, for the gradients. All else is as in bf16: the
weights that are trained, residual stream, norms, attention, softmax. FSDP2 gathers the blocks' weights in 8 bits
(`Rows`). What does not train (validation, HellaSwag, samples) runs in bf16.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils._mode_utils import no_dispatch

import cublas
import fused

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
COPY, GELU, RELU2, SWIGLU = "copy", "gelu", "relu2", "swiglu"  # what `cast` computes on the way
DGELU, DRELU2, DSWIGLU = "dgelu", "drelu2", "dswiglu"
CAST_ROWS, CAST_COLS, CAST_PROGRAMS, CAST_STAGES, CAST_WARPS = 8, 256, 8, 3, 4  # programs: a multiprocessor's
TRANSPOSE_TILE, COPY_BLOCK = 128, 8192
ROOM, GRADIENT_ROOM = 2.0, 64.0  # times what the call before saw are held, at least; what is beyond is cut off
HEAD_SCALE = 2.0**14  # of the gradient of the logits, which is in [-1, 1]: e5m2 reaches from 57,344 down to 2^-16


def swap(model):
    """Puts the classes below in place of fused.py's where all widths are multiples of 16; parameters stay.

    A layer whose weight is read by a module that stays as it is, stays too.
    """
    kinds = {fused.Linear: Linear, fused.DeferredBias: DeferredBias, fused.GeluMLP: GeluMLP, fused.Head: Head}
    kinds |= {fused.Attention: Attention, fused.SwiGLU: SwiGLU, fused.Relu2MLP: Relu2MLP}
    stay = set()
    for module in list(model.modules()):  # each before its layers
        if any(size % 16 for p in module.parameters() for size in p.shape):
            if isinstance(module, fused.Attention):
                stay.add(module.qkv)
            if isinstance(module, (fused.GeluMLP, fused.Relu2MLP, fused.SwiGLU)):
                stay.update(module.children())
            continue
        if module in stay:
            continue
        if isinstance(module, nn.Linear) and type(module) in kinds:
            for name in ("x_top", "w_top", "dy_top"):  # see `cast`
                module.register_buffer(name, torch.zeros(2, device=module.weight.device), persistent=False)
        module.__class__ = kinds.get(type(module), type(module))
    return model


def reset_tops(layer):
    """No magnitudes are known yet: the next call takes its tensors' own."""
    for top in (layer.x_top, layer.w_top, layer.dy_top):
        top.zero_()


def bf16_matrix(layer):
    """Its weight for what runs in bf16: of `Rows` what was gathered."""
    return layer.weight if layer.w_top.dim() else Widened.apply(layer.weight, layer.w_top)


class Linear(fused.Linear):
    reset_tables, matrix = reset_tops, bf16_matrix

    def forward(self, x):
        return apply(self, x, self.bias) if self.training else super().forward(x)


class DeferredBias(fused.DeferredBias):
    reset_tables, matrix = reset_tops, bf16_matrix

    def forward(self, x):
        return apply(self, x, None) if self.training else super().forward(x)


class GeluMLP(fused.GeluMLP):
    """The GELU and its derivative are computed where their results are cast."""

    def forward(self, x):
        return mlp(x, self.up, self.proj, GELU, DGELU) if self.training else super().forward(x)


class Relu2MLP(fused.Relu2MLP):
    """As GeluMLP."""

    def forward(self, x):
        return mlp(x, self.up, self.proj, RELU2, DRELU2) if self.training else super().forward(x)


class SwiGLU(fused.SwiGLU):
    """As GeluMLP."""

    def forward(self, x):
        return mlp(x, self.gate_up, self.proj, SWIGLU, DSWIGLU) if self.training else super().forward(x)


class Attention(fused.Attention):
    def split(self, x):
        if not self.training:
            return super().split(x)
        if not suits(x):
            return tuple(t[:, :, : x.size(1)] for t in self.split(padded(x)))
        qkv = self.qkv
        tops = (qkv.x_top, qkv.w_top, qkv.dy_top)
        return QKV.apply(x, qkv.weight, qkv.bias, self.heads, self.head_dim, *tops)


class Head(fused.Head):
    """Logits and both their gradients in fp8, softmax and loss in float32."""

    reset_tables = reset_tops

    def forward(self, x, targets, reduction):
        trains = self.training and torch.is_grad_enabled()
        if not trains or reduction == "none" or not suits(x):
            return super().forward(x, targets, reduction)
        x = x.to(torch.bfloat16)
        loss = HeadFunction.apply(x, self.weight, targets, self.options(), self.x_top, self.w_top)
        return fused.reduced(loss, targets, reduction)


def suits(x):
    """Whether x: (..., T, K) has as many rows as the backward's products, which sum over them, want."""
    return x.shape[:-1].numel() % 16 == 0


def padded(x):
    """x: (..., T, K) with zeros appended to T, so that it suits."""
    return F.pad(x, (0, 0, 0, -x.size(-2) % 16))


def mlp(x, up, proj, act, dact):
    if not suits(x):
        return mlp(padded(x), up, proj, act, dact)[..., : x.size(-2), :]
    bias = None if isinstance(proj, fused.DeferredBias) else proj.bias
    tops = (up.x_top, up.w_top, up.dy_top, proj.x_top, proj.w_top, proj.dy_top)
    return MLPFunction.apply(act, dact, x.to(torch.bfloat16), up.weight, up.bias, proj.weight, bias, *tops)


def apply(layer, x, bias):
    if not suits(x):
        return apply(layer, padded(x), bias)[..., : x.size(-2), :]
    return LinearFunction.apply(x.to(torch.bfloat16), layer.weight, bias, layer.x_top, layer.w_top, layer.dy_top)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, x_top, w_top, dy_top):
        return linear_forward(ctx, x, weight, bias, x_top, w_top, dy_top).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        dx, dw, db = linear_backward(ctx, [dy.flatten(0, -2).contiguous()])
        return dx.unflatten(0, dy.shape[:-1]), dw, db, None, None, None


class QKV(torch.autograd.Function):
    """As fused.QKV."""

    @staticmethod
    def forward(ctx, x, weight, bias, heads, head_dim, x_top, w_top, dy_top):
        y = linear_forward(ctx, x, weight, bias, x_top, w_top, dy_top)
        return fused.split_heads(y, x.shape[:-1], heads, head_dim)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dx, dw, db = linear_backward(ctx, fused.join_heads(dq, dk, dv))
        return dx.unflatten(0, (dq.size(0), dq.size(2))), dw, db, None, None, None, None, None


def linear_forward(ctx, x, weight, bias, x_top, w_top, dy_top):
    """(..., K) -> (M, N), with what linear_backward needs kept in ctx."""
    x8, x8t, xs, _ = cast([x.flatten(0, -2)], x_top, None, COPY, False, False)
    w, wt, ws = operands(weight, w_top)
    ctx.save_for_backward(x8t, xs, w, ws, dy_top)
    ctx.dtypes = fused.dtypes_of(weight, bias)
    return product(x8, wt, xs, ws, None if bias is None else bias.to(x.dtype), x.dtype, True)


def operands(weight, top):
    """(right operand of the gradient's product, of the forward's, scale) of a weight, which `Rows` may have cast."""
    if top.dim() == 0:
        return weight, weight.t(), top
    w8, w8t, scale, _ = cast([weight], top, None, COPY, False, False)
    return w8t.t(), w8.t(), scale


def linear_backward(ctx, dy):
    """(dx, dw, db or None) of dy: (M, N), a list as `cast` takes it."""
    x8t, xs, w, ws, dy_top = ctx.saved_tensors
    w_dtype, b_dtype = ctx.dtypes
    dy8, dy8t, ds, sums = cast(dy, dy_top, None, COPY, True, b_dtype is not None)
    dx = product(dy8, w, ds, ws, None, dy[0].dtype, True)
    dw = product(dy8t, x8t.t(), ds, xs, None, w_dtype)
    return dx, dw, None if b_dtype is None else sums.to(b_dtype)


class MLPFunction(torch.autograd.Function):
    """what, dwhat: GELU and DGELU, RELU2 and DRELU2, or SWIGLU and DSWIGLU."""

    @staticmethod
    def forward(ctx, what, dwhat, x, w1, b1, w2, b2, x_top, w1_top, dbefore_top, act_top, w2_top, dy_top):
        x8, x8t, xs, _ = cast([x.flatten(0, -2)], x_top, None, COPY, False, False)
        ctx.dwhat, ctx.dtypes = dwhat, fused.dtypes_of(w1, b1, w2, b2)
        w1, w1t, w1s = operands(w1, w1_top)
        w2, w2t, w2s = operands(w2, w2_top)
        b1, b2 = (None if b is None else b.to(x.dtype) for b in (b1, b2))
        before = product(x8, w1t, xs, w1s, b1, x.dtype, True)
        act8, act8t, acts, _ = cast([before], act_top, None, what, False, False)
        ctx.save_for_backward(x8t, xs, w1, w1s, w2, w2s, before, act8t, acts, dbefore_top, dy_top)
        return product(act8, w2t, acts, w2s, b2, x.dtype, True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x8t, xs, w1, w1s, w2, w2s, before, act8t, acts, dbefore_top, dy_top = ctx.saved_tensors
        w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
        dy8, dy8t, ds, db2 = cast([dy.flatten(0, -2).contiguous()], dy_top, None, COPY, True, b2_dtype is not None)
        dact = product(dy8, w2, ds, w2s, None, dy.dtype, True)
        dw2 = product(dy8t, act8t.t(), ds, acts, None, w2_dtype)
        db8, db8t, bs, db1 = cast([dact], dbefore_top, before, ctx.dwhat, True, b1_dtype is not None)
        dx = product(db8, w1, bs, w1s, None, dy.dtype, True).unflatten(0, dy.shape[:-1])
        dw1 = product(db8t, x8t.t(), bs, xs, None, w1_dtype)
        db1 = None if b1_dtype is None else db1.to(b1_dtype)
        return (None, None, dx, dw1, db1, dw2, None if b2_dtype is None else db2.to(b2_dtype)) + (None,) * 6


@fused.operator("product8")
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:
    """a @ b * a_scale * b_scale + bias, of contiguous rows of a and columns of b, or what `operands` made of `Rows`.

    fast: as for cublas.matmul; a layer's results and the gradients of what it was given are, those of weights are not.
    """
    if b.dtype == torch.bfloat16:
        straight, across = halves(b.t() if b.stride(0) == 1 else b)
        b = straight.t() if b.stride(0) == 1 else across.t()
    out = a.new_empty(a.size(0), b.size(1), dtype=dtype)
    return cublas.matmul(a, b, out, bias=bias, scales=(a_scale, b_scale), fast=fast)


@product.register_fake
def _(a, b, a_scale, b_scale, bias, dtype, fast=False):
    return a.new_empty(a.size(0), b.size(1), dtype=dtype)


@fused.operator("cast8")
def cast(
    parts: list[torch.Tensor], top: torch.Tensor, before: torch.Tensor | None, what: str, e5m2: bool, sums: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x in fp8, its transpose, what they are to be multiplied with, float32 column sums if asked for) of x: (M, N).

    parts: x, or, with COPY, GELU and RELU2, up to three tensors (M, N1), (M, N2), (M, N3) that are x side by side;
    contiguous. what: COPY; GELU: of gelu(x); DGELU: of x gelu'(before); RELU2 and DRELU2 likewise; SWIGLU: of
    silu(gate) up, x being gate and up side by side, (M, 2 N); DSWIGLU: of both's gradients, (M, N), x being that of
    silu(gate) up, (M, N / 2), and `before` both.
    top: the largest magnitudes [that the scale is made from, that this call saw]; it belongs to this caller alone and
    is updated, which the compiler need not know.
    """
    assert what in (COPY, GELU, RELU2) or len(parts) == 1
    dtype = E5M2 if e5m2 else E4M3
    out, out_t, scale, columns = cast_results(parts, top, before, what, e5m2, sums)
    M, N = out.shape
    device, widths = out.device, [x.size(1) // (1 + (what == SWIGLU)) for x in parts] + [0] * (3 - len(parts))
    strips = sum(triton.cdiv(width, CAST_COLS) for width in widths)
    programs = min(triton.cdiv(M, CAST_ROWS), triton.cdiv(CAST_PROGRAMS * fused.sm_count(device), strips))
    partial = torch.empty(programs if sums else 0, N, dtype=torch.float32, device=device)
    limit = torch.finfo(dtype).max
    room = GRADIENT_ROOM if e5m2 else ROOM
    abc = *parts, *[parts[0]] * (3 - len(parts))
    _prepare[(1,)](*abc, before, top, scale, M, limit / room, *widths, WHAT=what, BLOCK=4096, num_warps=8)
    _cast[(programs, strips)](
        *abc, before, out, partial, top, scale, M, limit, *widths, WHAT=what, SUMS=sums, ROWS=CAST_ROWS,
        COLS=CAST_COLS, PROGRAMS=programs, STEPS=triton.cdiv(M, programs * CAST_ROWS), STAGES=CAST_STAGES,
        num_warps=CAST_WARPS,
    )  # fmt: skip
    transpose(out, out_t)
    return out, out_t, scale, partial.sum(0) if sums else columns


@cast.register_fake
def cast_results(parts, top, before, what, e5m2, sums):
    x, dtype = parts[0], E5M2 if e5m2 else E4M3
    M, N = x.size(0), sum(x.size(1) for x in parts)
    N = {SWIGLU: N // 2, DSWIGLU: 2 * N}.get(what, N)
    out, out_t = x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)
    return out, out_t, x.new_empty((), dtype=torch.float32), x.new_empty(N if sums else 0, dtype=torch.float32)


@triton.jit
def _values(x, before, rows, cols, inside, width, WHAT: tl.constexpr):
    """What is cast, in float32; of DSWIGLU the gradients of gate and up, else the same twice. Rows are `width` long."""
    wide = rows * (2 * width) + cols  # in what has gate and up
    at = wide if WHAT == "swiglu" else rows * width + cols
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = v
    if WHAT == "gelu":
        v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))  # x sigmoid(2 u) = x (1 + tanh u) / 2
    if WHAT == "dgelu":
        b = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(1.5957691216057308 * (b + 0.044715 * b * b * b))
        v *= s + b * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * b * b)
    if WHAT == "relu2":
        v = tl.maximum(v, 0.0) * tl.maximum(v, 0.0)
    if WHAT == "drelu2":
        v *= 2 * tl.maximum(tl.load(before + at, mask=inside, other=0.0).to(tl.float32), 0.0)
    if WHAT == "swiglu":
        v *= tl.sigmoid(v) * tl.load(x + wide + width, mask=inside, other=0.0).to(tl.float32)
    if WHAT == "dswiglu":
        gate = tl.load(before + wide, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(before + wide + width, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        w = v * gate * s
        v *= up * (s + gate * s * (1 - s))
    return v, w


@triton.jit
def _prepare(
    a, b, c, before, top, scale, M, limit,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, WHAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scale of this call: from what the last one saw, at the first from x."""
    seen = tl.load(top + 1)
    if seen == 0.0:
        seen = tl.load(top)
    if seen == 0.0:
        seen = _largest(a, before, M, A, WHAT, BLOCK)
        if B > 0:
            seen = tl.maximum(seen, _largest(b, before, M, B, WHAT, BLOCK))
        if C > 0:
            seen = tl.maximum(seen, _largest(c, before, M, C, WHAT, BLOCK))
    tl.store(top, seen)
    tl.store(top + 1, 0.0)
    tl.store(scale, tl.exp2(-_power(seen, limit)))


@triton.jit
def _power(top, limit):
    """The exponent of the largest power of two that, times `top`, is within `limit`."""
    return tl.minimum(tl.floor(tl.log2(limit / tl.maximum(top, 1e-30))), 100.0)


@triton.jit
def _largest(x, before, M, WIDTH: tl.constexpr, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    most = tl.zeros((BLOCK,), tl.float32)
    start, size = tl.cast(0, tl.int64), tl.cast(M, tl.int64) * WIDTH
    while start < size:
        at = start + tl.arange(0, BLOCK)
        v, w = _values(x, before, at // WIDTH, at % WIDTH, at < size, WIDTH, WHAT)
        most = tl.maximum(most, tl.abs(v))
        if WHAT == "dswiglu":
            most = tl.maximum(most, tl.abs(w))
        start += BLOCK
    return tl.max(most)


@triton.jit
def _cast(
    a, b, c, before, out, partial, top, scale, M, limit,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, WHAT: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program casts a strip of COLS columns, ROWS rows at a time; maximum and column sums stay in registers."""
    N: tl.constexpr = 2 * A if WHAT == "dswiglu" else A + B + C
    program, strip = tl.program_id(0), tl.program_id(1)
    x, width, left = a, A, 0
    if B > 0:
        if strip >= (A + COLS - 1) // COLS:
            x, width, left = b, B, A
            strip -= (A + COLS - 1) // COLS
    if C > 0:
        if (left == A) & (strip >= (B + COLS - 1) // COLS):
            x, width, left = c, C, A + B
            strip -= (B + COLS - 1) // COLS
    rows, cols = tl.arange(0, ROWS), strip * COLS + tl.arange(0, COLS)
    factor = 1 / tl.load(scale)
    most = tl.zeros((ROWS, COLS), tl.float32)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    more = tl.zeros((ROWS, COLS), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        first = tl.cast((program + step * PROGRAMS) * ROWS, tl.int64)
        inside = (first + rows < M)[:, None] & (cols < width)[None, :]
        here = x + first * (2 * width if WHAT == "swiglu" else width)
        beside = before
        if before is not None:
            beside += first * (2 * width if WHAT == "dswiglu" else width)
        v, w = _values(here, beside, rows[:, None], cols[None, :], inside, width, WHAT)
        to = out + (first * N + left) + (rows[:, None] * N + cols[None, :])
        tl.store(to, tl.clamp(v * factor, -limit, limit).to(out.dtype.element_ty), mask=inside)
        most = tl.maximum(most, tl.abs(v))
        if SUMS:
            sums += v
        if WHAT == "dswiglu":
            tl.store(to + width, tl.clamp(w * factor, -limit, limit).to(out.dtype.element_ty), mask=inside)
            most = tl.maximum(most, tl.abs(w))
            if SUMS:
                more += w
    tl.atomic_max(top + 1, tl.max(most))
    if SUMS:
        tl.store(partial + program * N + left + cols, tl.sum(sums, 0), mask=cols < width)
        if WHAT == "dswiglu":
            tl.store(partial + program * N + width + cols, tl.sum(more, 0), mask=cols < width)


def transpose(x, out):
    """out = x.T, of bytes. In `_cast` itself it took longer and, with Triton 3.6 on Hopper, mixed values up."""
    M, N = x.shape
    grid = triton.cdiv(M, TRANSPOSE_TILE), triton.cdiv(N, TRANSPOSE_TILE)
    _transpose[grid](x.view(torch.uint8), out.view(torch.uint8), M, N, TILE=TRANSPOSE_TILE, num_warps=8)


@triton.jit
def _transpose(x, out, M, N, TILE: tl.constexpr):
    first_row, first_col = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    rows, cols = first_row + tl.arange(0, TILE), first_col + tl.arange(0, TILE)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tile = tl.load(x + tl.cast(first_row, tl.int64) * N + first_col
                   + tl.arange(0, TILE)[:, None] * N + tl.arange(0, TILE)[None, :], mask=inside)  # fmt: skip
    across = tl.cast(first_col, tl.int64) * M + first_row
    at = tl.arange(0, TILE)[:, None] * M + tl.arange(0, TILE)[None, :]
    tl.store(out + across + at, tl.trans(tile), mask=tl.trans(inside))


# -- gathered weights


def gather_in_8_bits(model, ranks):
    """Before fully_shard among so many ranks: the weights of the blocks' layers become `Rows`, w_top their scale."""
    for layer in model.blocks.modules():
        if isinstance(layer, (Linear, DeferredBias)) and layer.weight.size(0) % ranks == 0:
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Rows))
            layer.w_top = layer.w_top.new_zeros(())


class Rows(torch.Tensor):
    """A rank's rows of a weight, which FSDP2's extension, the two functions, gathers in e4m3.

    What it gathers into is a bf16 tensor (N, K) by name, so that the gradient is one; its bytes are the weight in e4m3
    and then its transpose. Both are made where the weight is gathered: with zero2 once a step.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        """As of any tensor; what FSDP2 makes of it remains one."""
        with no_dispatch():
            out = operation(*args, **(kwargs or {}))
        kept = (aten.new_zeros, aten.slice, aten.detach, aten.empty_like)
        return out.as_subclass(cls) if operation.overloadpacket in kept else out

    def fsdp_pre_all_gather(self, mesh, size, stride, layer, policy):
        rows = self.as_subclass(torch.Tensor)
        top = torch.linalg.vector_norm(rows, float("inf"), dtype=torch.float32).view(1)
        rows8 = torch.empty_like(rows, dtype=E4M3)
        _shrink[(triton.cdiv(rows.numel(), COPY_BLOCK),)](rows, top, rows8, rows.numel(), BLOCK=COPY_BLOCK, num_warps=8)
        return (rows8, top), layer.w_top

    def fsdp_post_all_gather(self, gathered, scale, dtype, *, out=None):
        rows8, tops = gathered
        both = torch.empty_like(rows8, dtype=dtype) if out is None else out.detach()
        straight, across = halves(both)
        ranks, each = tops.numel(), rows8.numel() // tops.numel()
        more = triton.next_power_of_2(ranks)
        grid = ranks, triton.cdiv(each, COPY_BLOCK)
        _align[grid](rows8, tops, straight, scale, each, RANKS=ranks, MORE=more, BLOCK=COPY_BLOCK, num_warps=8)
        transpose(straight, across)
        rows8.untyped_storage().resize_(0)  # FSDP2 would keep it as long as `both`, and allocates it again
        return None if out is not None else (both, (both,))


class Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, scale):
        return widened(both, scale)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@fused.operator("widened")
def widened(both: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What `Rows` were gathered into, as numbers in bf16."""
    return halves(both)[0].to(both.dtype) * scale


@widened.register_fake
def _(both, scale):
    return torch.empty_like(both)


def halves(both):
    """(N, K) and (K, N) in e4m3: the bytes of a tensor (N, K) in bf16."""
    N, K = both.shape
    first, second = both.view(E4M3).view(2, N * K)
    return first.view(N, K), second.view(K, N)


@triton.jit
def _shrink(x, top, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * tl.exp2(_power(tl.load(top), 448.0))
    tl.store(out + at, tl.clamp(v, -448.0, 448.0).to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _align(x, tops, out, scale, each, RANKS: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers of ranks, `each` of one after the other, to one scale: that of the rank with the largest."""
    rank, ranks = tl.program_id(0), tl.arange(0, MORE)
    power = _power(tl.max(tl.load(tops + ranks, mask=ranks < RANKS, other=0.0)), 448.0)
    start = rank.to(tl.int64) * each
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + start + at, mask=at < each, other=0.0).to(tl.float32)
    v *= tl.exp2(power - _power(tl.load(tops + rank), 448.0))
    tl.store(out + start + at, v.to(out.dtype.element_ty), mask=at < each)
    tl.store(scale, tl.exp2(-power))  # the same from all


# -- the head


class HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, options, x_top, w_top):
        flat = x.flatten(0, -2)
        losses, dx, dw = cross_entropy_chunks8(flat, weight, targets.flatten(), *options, x_top, w_top)
        fused.keep_gradients(ctx, x, weight, dx, dw)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        return fused.kept_gradients(ctx, grad) + (None,) * 4


@fused.operator("cross_entropy_chunks8")
def cross_entropy_chunks8(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    x_top: torch.Tensor,
    w_top: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As fused.cross_entropy_chunks with gradients and no factors, the products in fp8; the number of tokens is a
    multiple of 16."""
    N, P = x.size(0), weight.size(0)
    rows = min(N, fused.chunk_rows(P))
    losses, dx, dw = fused.empty_results(x, weight, fused.sum_dtype(weight))
    x8, x8t, xs, _ = cast([x], x_top, None, COPY, False, False)
    w8, w8t, ws, _ = cast([weight], w_top, None, COPY, False, False)
    gs = head_scale(x.device)
    logits, small = x.new_empty(rows, P), x.new_empty(rows, P, dtype=E5M2)
    for i in range(0, N, rows):
        xi, ti = x8[i : i + rows], targets[i : i + rows]
        n = xi.size(0)
        li, gi = logits[:n], small[:n]
        cublas.matmul(xi, w8.t(), li, scales=(xs, ws), fast=True)
        options = (vocab_size, softcap, smoothing, z_loss, True)
        fused.cross_entropy_rows(li, ti, losses[i : i + n], gi, HEAD_SCALE, *options)
        git = x.new_empty(P, n, dtype=E5M2)
        transpose(gi, git)
        cublas.matmul(gi, w8t.t(), dx[i : i + n], scales=(gs, ws))
        xit = x8t[:, i : i + n]
        cublas.matmul(git, xit.t(), dw, scales=(gs, xs), accumulate=i > 0)
    return losses, dx, dw


@cross_entropy_chunks8.register_fake
def _(x, weight, targets, vocab_size, softcap, smoothing, z_loss, x_top, w_top):
    return fused.empty_results(x, weight, fused.sum_dtype(weight))


@functools.cache
def head_scale(device):
    return torch.tensor(1 / HEAD_SCALE, device=device)
