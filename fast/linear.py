"""Linear layers in bf16, with GEMMs by cuBLASLt or hopper.py; the projection to q, k and v."""

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast import cublas, hopper
from fast.operators import dtypes_of, in_dtype, on_hopper, operator

QKV_WAYS = {}  # shape -> the faster of the two ways of qkv_gradients


def empty_product(a, b, bias=None, dtype=None, *_, **__):
    return a.new_empty(a.size(0), b.size(1), dtype=dtype)


@operator("product", empty_product)
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tune: bool,
    added: Tensor | None = None,
) -> Tensor:
    """a b + bias + added; see cublas.matmul. Only fusion.py gives keyword arguments: `added`."""
    return cublas.matmul(a, b, empty_product(a, b, bias, dtype), bias=bias, added=added, tune=tune)


class LinearFunction(torch.autograd.Function):
    """x W^T + b; x: (..., K) in 16 bits, weight and bias in any dtype -> (..., N) in x's dtype.

    Gradients have the parameters' dtypes, straight from float32. tune: see cublas.matmul.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tune):
        return linear_forward(ctx, x, weight, bias, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        dx = product(flat, w, None, flat.dtype, True).unflatten(0, dy.shape[:-1])
        dw, db = weight_gradients(flat, x, *ctx.dtypes)
        return dx, dw, db, None


def linear_forward(ctx, x, weight, bias, tune):
    """The GEMM of a linear layer, (..., K) -> (M, N); saves in ctx what the backward reads."""
    ctx.dtypes = dtypes_of(weight, bias)
    flat = x.flatten(0, -2)
    w = weight.to(x.dtype)
    ctx.save_for_backward(flat, w)
    return product(flat, w.t(), in_dtype(bias, x.dtype), x.dtype, tune)


def weight_gradients(dy, x, weight_dtype, bias_dtype, sums=None):
    """(dW, db) of y = x W^T + b; dy: (M, N), x: (M, K); sums: column sums of dy, None or empty."""
    dw = product(dy.t(), x, None, weight_dtype, True)
    if bias_dtype is None:
        return dw, None
    if sums is None or not len(sums):
        sums = dy.sum(0, dtype=torch.float32)
    return dw, sums.to(bias_dtype)


class QKV(torch.autograd.Function):
    """The layer before attention, (B, T, C) -> q, k, v: (B, H, T, D), views of one tensor."""

    @staticmethod
    def forward(ctx, x, weight, bias, heads, head_dim, tune):
        y = linear_forward(ctx, x, weight, bias, tune)
        return split_heads(y, x.shape[:-1], heads, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        x, w = ctx.saved_tensors
        w_dtype, b_dtype = ctx.dtypes
        dx, dw, db = qkv_gradients(*join_heads(dq, dk, dv), x, w, w_dtype, b_dtype is not None)
        dx = dx.unflatten(0, (dq.size(0), dq.size(2)))
        return dx, dw, in_dtype(db, b_dtype), None, None, None


def empty_gradients(dq, dk, dv, x, w, weight_dtype, sums):
    dw = torch.empty_like(w, dtype=weight_dtype)
    db = w.new_empty(w.size(0) if sums else 0, dtype=torch.float32)
    return torch.empty_like(x), dw, db


@operator("qkv_gradients", empty_gradients)
def qkv_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, w: Tensor, weight_dtype: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, column sums of dy) of y = x w^T; dy is dq, dk and dv side by side.

    The column sums are float32, and empty without `sums`. On Hopper, if all widths suit its tiles,
    the faster of two ways, timed at the first call of a shape; the first in a deterministic run,
    since hopper.linear_backward adds in no fixed order.
    """
    parts = dq, dk, dv
    fits = on_hopper(x) and all(part.size(1) % hopper.PART == 0 for part in parts)
    if not fits or torch.are_deterministic_algorithms_enabled():
        return packed_gradients(parts, x, w, weight_dtype, sums)
    key = x.device, *x.shape, *w.shape, weight_dtype, sums
    if key not in QKV_WAYS:
        ways = packed_gradients, parts_gradients
        tried = [functools.partial(way, parts, x, w, weight_dtype, sums) for way in ways]
        QKV_WAYS[key] = ways[cublas.fastest(tried, x.device)]
    return QKV_WAYS[key](parts, x, w, weight_dtype, sums)


def parts_gradients(parts, x, w, weight_dtype, sums):
    dx, dw, db = hopper.linear_backward(parts, x, w)
    return dx, dw.to(weight_dtype), db if sums else db[:0]


def packed_gradients(parts, x, w, weight_dtype, sums):
    dy = torch.cat(parts, 1)
    dx = cublas.matmul(dy, w, torch.empty_like(x))
    dw = cublas.matmul(dy.t(), x, torch.empty_like(w, dtype=weight_dtype))
    db = dy.sum(0, dtype=torch.float32) if sums else dy.new_empty(0, dtype=torch.float32)
    return dx, dw, db


def split_heads(y, shape, heads, head_dim):
    """(B * T, C), with shape = (B, T) -> q, k, v: (B, H, T, D)."""
    return y.view(*shape, sum(heads), head_dim).transpose(1, 2).split(heads, dim=1)


def join_heads(*parts):
    """The reverse for gradients: (B, H, T, D) each -> [(B * T, H * D), ...], each contiguous."""
    return [d.transpose(1, 2).flatten(0, 1).flatten(1).contiguous() for d in parts]
