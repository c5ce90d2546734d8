"""MLPs in bf16 with GELU, ReLU^2 or SwiGLU in as few passes over memory as possible.

GELU, and ReLU^2 on Hopper: activation and derivative are in the GEMMs' epilogues, on Hopper with
the column sums that are the first bias' gradient. SwiGLU: the backward computes silu(gate) * up
again, in the kernel of its gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast import cublas, hopper
from fast.linear import empty_product, in_dtype_of, product, weight_gradients
from fast.operators import cdiv, dtypes_of, load_float32, on_hopper, operator

SWIGLU_BLOCK, RELU2_BLOCK = 2048, 2048  # elements
SWIGLU_WARPS = 8


class MLPFunction(torch.autograd.Function):
    """w2 act(w1 x + b1) + b2; x: (..., K) in 16 bits; w1: (H, K); w2: (N, H) -> (..., N).

    kind: "gelu" (tanh form), "relu2", or "swiglu", whose w1 holds gate and up, (2 H, K). Biases may
    be None.
    """

    @staticmethod
    def forward(ctx, kind, x, w1, b1, w2, b2, tune):
        ctx.kind = kind
        ctx.dtypes = dtypes_of(w1, b1, w2, b2)
        flat = x.flatten(0, -2)
        w1, b1, w2, b2 = in_dtype_of(x, w1, b1, w2, b2)
        before = None
        if kind == "gelu":
            act, before = product_gelu(flat, w1.t(), b1, tune)
        elif kind == "relu2":
            act = product_relu2(flat, w1.t(), b1, tune)
        else:
            before = product(flat, w1.t(), b1, x.dtype, tune)
            act = swiglu(before)
        ctx.save_for_backward(flat, w1, w2, before, None if kind == "swiglu" else act)
        return product(act, w2.t(), b2, x.dtype, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w1, w2, before, act = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        sums = None
        if ctx.kind == "gelu":
            dbefore, sums = product_dgelu(flat, w2, before)
        elif ctx.kind == "relu2":
            dbefore, sums = product_drelu2(flat, w2, act)
        else:
            dbefore, act = swiglu_backward(product(flat, w2, None, dy.dtype, True), before)
        dw2, db2 = weight_gradients(flat, act, *ctx.dtypes[2:])
        dw1, db1 = weight_gradients(dbefore, x, *ctx.dtypes[:2], sums)
        dx = product(dbefore, w1, None, dy.dtype, True).unflatten(0, dy.shape[:-1])
        return None, dx, dw1, db1, dw2, db2, None


@operator("product_gelu", lambda a, b, bias, tune: (empty_product(a, b), empty_product(a, b)))
def product_gelu(a: Tensor, b: Tensor, bias: Tensor | None, tune: bool) -> tuple[Tensor, Tensor]:
    """(GELU of a b + bias, a b + bias: the pre-activation)"""
    if on_hopper(a):
        return hopper.gelu(a, b.t(), bias)
    before = empty_product(a, b)
    return cublas.matmul(a, b, empty_product(a, b), bias=bias, gelu=before, tune=tune), before


def empty_derivative(a, b, before):
    columns = before.size(1) if on_hopper(a) else 0
    return torch.empty_like(before), before.new_empty(columns, dtype=torch.float32)


@operator("product_dgelu", empty_derivative)
def product_dgelu(a: Tensor, b: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """(a b times GELU's derivative at the pre-activation `before`, its column sums on Hopper)"""
    if on_hopper(a):
        return hopper.dgelu(a, b, before)
    out, no_sums = empty_derivative(a, b, before)
    return cublas.matmul(a, b, out, dgelu=before), no_sums


@operator("product_relu2", lambda a, b, *_: empty_product(a, b))
def product_relu2(a: Tensor, b: Tensor, bias: Tensor | None, tune: bool) -> Tensor:
    """max(a b + bias, 0)^2"""
    if on_hopper(a):
        return hopper.relu2(a, b.t(), bias)
    act = cublas.matmul(a, b, empty_product(a, b), bias=bias, tune=tune)
    _relu2[(cdiv(act.numel(), RELU2_BLOCK),)](act, act.numel(), BLOCK=RELU2_BLOCK)
    return act


@operator("product_drelu2", empty_derivative)
def product_drelu2(a: Tensor, b: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
    """(a b times ReLU^2's derivative where its output is `act`, its column sums on Hopper)"""
    if on_hopper(a):
        return hopper.drelu2(a, b, act)
    out, no_sums = empty_derivative(a, b, act)
    grid = (cdiv(act.numel(), RELU2_BLOCK),)
    _relu2_backward[grid](cublas.matmul(a, b, out), act, act.numel(), BLOCK=RELU2_BLOCK)
    return out, no_sums


@triton.jit
def _relu2(act, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = load_float32(act + at, at < size)
    positive = tl.where(x < 0, 0.0, x)  # unlike tl.maximum it keeps NaN
    tl.store(act + at, positive * positive, mask=at < size)


@triton.jit
def _relu2_backward(grad, act, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slope = 2 * tl.sqrt(load_float32(act + at, at < size))
    dact = load_float32(grad + at, at < size)
    tl.store(grad + at, dact * slope, mask=at < size)


@operator("swiglu", lambda gate_up: gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2))
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up: contiguous (N, 2 H), gate in the first half -> (N, H)."""
    N, H = gate_up.size(0), gate_up.size(1) // 2
    act = gate_up.new_empty(N, H)
    grid = N, cdiv(H, SWIGLU_BLOCK)
    _swiglu[grid](gate_up, act, H=H, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS)
    return act


def empty_swiglu_gradients(dact, gate_up):
    return torch.empty_like(gate_up), torch.empty_like(dact)


@operator("swiglu_backward", empty_swiglu_gradients)
def swiglu_backward(dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate_up, silu(gate) * up) from dact, the gradient of silu(gate) * up."""
    dgate_up, act = empty_swiglu_gradients(dact, gate_up)
    N, H = dact.shape
    grid = N, cdiv(H, SWIGLU_BLOCK)
    _swiglu_backward[grid](
        dact, gate_up, dgate_up, act, H=H, BLOCK=SWIGLU_BLOCK, num_warps=SWIGLU_WARPS
    )
    return dgate_up, act


@triton.jit
def _swiglu(gate_up, act, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = load_float32(gate_up + row * 2 * H + cols, cols < H)
    up = load_float32(gate_up + row * 2 * H + H + cols, cols < H)
    value = gate * tl.sigmoid(gate) * up
    tl.store(act + row * H + cols, value, mask=cols < H)


@triton.jit
def _swiglu_backward(dact, gate_up, dgate_up, act, H: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = load_float32(dact + row * H + cols, cols < H)
    gate = load_float32(gate_up + row * 2 * H + cols, cols < H)
    up = load_float32(gate_up + row * 2 * H + H + cols, cols < H)
    s = tl.sigmoid(gate)
    silu = gate * s
    out = dgate_up + row * 2 * H + cols
    tl.store(act + row * H + cols, silu * up, mask=cols < H)
    tl.store(out, d * up * (s + silu * (1 - s)), mask=cols < H)
    tl.store(out + H, d * silu, mask=cols < H)
