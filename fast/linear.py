"""Linear layers in bf16: GEMMs by cuBLASLt or hopper.py; the projection to q, k, v has its own backward."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast import cublas, hopper
from fast.hopper import sm_count
from fast.operators import cdiv, dtypes_of, on_hopper, operator, power_of_2

PACK_PROGRAMS, PACK_COLS, PACK_STAGES = 8, 4096, 3  # programs a multiprocessor, most columns a warp
QKV_WAYS = {}  # shape -> the faster of the two ways of qkv_gradients


def linear(x, weight, bias, tune=True):
    """x W^T + b; x: (..., K) in 16 bits, weight and bias in any dtype -> (..., N) in x's dtype.

    Gradients have the parameters' dtypes, straight from float32. tune: see cublas.matmul.
    """
    return LinearFunction.apply(x, weight, bias, tune)


def qkv(x, weight, bias, heads, head_dim, tune=True):
    """The linear layer before attention: x: (B, T, C) -> q, k, v: (B, H, T, D) each, views of one tensor."""
    return QKV.apply(x, weight, bias, heads, head_dim, tune)


@operator("product", lambda a, b, bias, dtype, tune: a.new_empty(a.size(0), b.size(1), dtype=dtype))
def product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, tune: bool) -> Tensor:
    return cublas.matmul(a, b, a.new_empty(a.size(0), b.size(1), dtype=dtype), bias=bias, tune=tune)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tune):
        return linear_forward(ctx, x, weight, bias, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        dx = product(flat, w, None, flat.dtype, True).unflatten(0, dy.shape[:-1])
        dw, db = weight_gradients(flat, x, *ctx.dtypes)
        return dx, dw, db, None


def linear_forward(ctx, x, weight, bias, tune):
    """The GEMM of a linear layer, (..., K) -> (M, N); saves its operands for the backward in ctx."""
    flat, w, b = operands(ctx, x, weight, bias)
    ctx.save_for_backward(flat, w)
    return product(flat, w.t(), b, x.dtype, tune)


def operands(ctx, x, *parameters):
    """(x: (..., K) as rows, the parameters in x's dtype); keeps the dtypes of their gradients in ctx."""
    ctx.dtypes = dtypes_of(*parameters)
    return x.flatten(0, -2), *[None if p is None else p.to(x.dtype) for p in parameters]


def weight_gradients(dy, x, weight_dtype, bias_dtype, sums=None):
    """(dW, db) of y = x W^T + b, from dy: (M, N) and x: (M, K); sums: column sums of dy, if not empty."""
    dw = product(dy.t(), x, None, weight_dtype, True)
    if bias_dtype is None:
        return dw, None
    return dw, (dy.sum(0, dtype=torch.float32) if sums is None or not len(sums) else sums).to(bias_dtype)


class QKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, heads, head_dim, tune):
        return split_heads(linear_forward(ctx, x, weight, bias, tune), x.shape[:-1], heads, head_dim)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x, w = ctx.saved_tensors
        dx, dw, db = qkv_gradients(*join_heads(dq, dk, dv), x, w, ctx.dtypes[0])
        dx = dx.unflatten(0, (dq.size(0), dq.size(2)))
        return dx, dw, None if ctx.dtypes[1] is None else db.to(ctx.dtypes[1]), None, None, None


def empty_gradients(dq, dk, dv, x, w, weight_dtype):
    dw, sums = torch.empty_like(w, dtype=weight_dtype), w.new_empty(w.size(0), dtype=torch.float32)
    return torch.empty_like(x), dw, sums


@operator("qkv_gradients", empty_gradients)
def qkv_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, w: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, float32 column sums of dy) of y = x w^T, where dy is dq, dk and dv side by side.

    On Hopper, if all widths suit its tiles, the faster of two ways, timed at the first call of a shape; the
    first in a deterministic run, since hopper.linear_backward adds in no fixed order.
    """
    parts, ways = (dq, dk, dv), (packed_gradients, parts_gradients)
    fits = on_hopper(x) and all(part.size(1) % hopper.PART == 0 for part in parts)
    if not fits or torch.are_deterministic_algorithms_enabled():
        return packed_gradients(parts, x, w, weight_dtype)
    key = x.device, *x.shape, *w.shape, weight_dtype
    if key not in QKV_WAYS:
        tried = [functools.partial(way, parts, x, w, weight_dtype) for way in ways]
        QKV_WAYS[key] = ways[cublas.fastest(tried, x.device)]
    return QKV_WAYS[key](parts, x, w, weight_dtype)


def parts_gradients(parts, x, w, weight_dtype):
    dx, dw, sums = hopper.linear_backward(parts, x, w)
    return dx, dw.to(weight_dtype), sums


def packed_gradients(parts, x, w, weight_dtype):
    dy, sums = pack(*parts)
    dw = cublas.matmul(dy.t(), x, torch.empty_like(w, dtype=weight_dtype))
    return cublas.matmul(dy, w, torch.empty_like(x)), dw, sums


def split_heads(y, shape, heads, head_dim):
    """(B * T, C), with shape = (B, T) -> q, k, v: (B, H, T, D)."""
    return y.view(*shape, sum(heads), head_dim).transpose(1, 2).split(heads, dim=1)


def join_heads(*parts):
    """The reverse for gradients: (B, H, T, D) each -> [(B * T, H * D), ...], each contiguous."""
    return [d.transpose(1, 2).flatten(0, 1).flatten(1).contiguous() for d in parts]


def pack(a, b, c):
    """(torch.cat((a, b, c), 1), its column sums in float32) of contiguous (N, A), (N, B) and (N, C)."""
    N, A, B, C = a.size(0), a.size(1), b.size(1), c.size(1)
    programs, block = min(N, PACK_PROGRAMS * sm_count(a.device)), power_of_2(max(A, B, C))
    out, parts = a.new_empty(N, A + B + C), a.new_empty(programs, A + B + C, dtype=torch.float32)
    _pack[(programs, 3)](
        a, b, c, out, parts, N, A=A, B=B, C=C, BLOCK=block, PROGRAMS=programs, STEPS=cdiv(N, programs),
        STAGES=PACK_STAGES, num_warps=max(1, block // PACK_COLS),
    )  # fmt: skip
    return out, parts.sum(0)


@triton.jit
def _pack(
    a, b, c, out, parts, N, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, which = tl.program_id(0), tl.program_id(1)
    source, width, start = a, A, 0
    if which == 1:
        source, width, start = b, B, A
    if which == 2:
        source, width, start = c, C, A + B
    cols = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = tl.cast(program + step * PROGRAMS, tl.int64)
        inside = (cols < width) & (row < N)
        x = tl.load(source + row * width + cols, mask=inside, other=0.0)
        tl.store(out + (row * (A + B + C) + start) + cols, x, mask=inside)
        sums += x.to(tl.float32)
    tl.store(parts + program * (A + B + C) + start + cols, sums, mask=cols < width)
