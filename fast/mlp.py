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
from fast.linear import empty_product, product, weight_gradients
from fast.operators import cdiv, dtypes_of, in_dtype, load_float32, on_hopper, operator

BLOCK = 2048  # elements
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
        w1, b1, w2, b2 = [in_dtype(p, x.dtype) for p in (w1, b1, w2, b2)]
        if kind == "swiglu":
            before = product(flat, w1.t(), b1, x.dtype, tune)
            act = swiglu(before)
        else:
            act, before = product_activation(flat, w1.t(), b1, kind, tune)
        ctx.save_for_backward(flat, w1, w2, before, None if kind == "swiglu" else act)
        return product(act, w2.t(), b2, x.dtype, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w1, w2, before, act = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        sums = None
        if ctx.kind == "swiglu":
            dbefore, act = swiglu_backward(product(flat, w2, None, dy.dtype, True), before)
        else:
            saved = before if ctx.kind == "gelu" else act
            dbefore, sums = product_derivative(flat, w2, saved, ctx.kind)
        dw2, db2 = weight_gradients(flat, act, *ctx.dtypes[2:])
        dw1, db1 = weight_gradients(dbefore, x, *ctx.dtypes[:2], sums)
        dx = product(dbefore, w1, None, dy.dtype, True).unflatten(0, dy.shape[:-1])
        return None, dx, dw1, db1, dw2, db2, None


def empty_activation(a, b, bias, kind, tune):
    act = empty_product(a, b)
    return act, torch.empty_like(act) if kind == "gelu" else act.new_empty(0)


@operator("product_activation", empty_activation)
def product_activation(
    a: Tensor, b: Tensor, bias: Tensor | None, kind: str, tune: bool
) -> tuple[Tensor, Tensor]:
    """(GELU or ReLU^2 of a b + bias, the pre-activation a b + bias; of ReLU^2 it is empty)"""
    act, before = empty_activation(a, b, bias, kind, tune)
    saved = before if kind == "gelu" else None
    if on_hopper(a):
        hopper.launch_gemm(kind, [a], b.t(), act, saved=saved, bias=bias)
        return act, before
    cublas.matmul(a, b, act, bias=bias, gelu=saved, tune=tune)
    if kind == "relu2":
        _relu2[(cdiv(act.numel(), BLOCK),)](act, act.numel(), BLOCK=BLOCK)
    return act, before


def empty_derivative(a, b, saved, kind):
    columns = saved.size(1) if on_hopper(a) else 0
    return torch.empty_like(saved), saved.new_empty(columns, dtype=torch.float32)


@operator("product_derivative", empty_derivative)
def product_derivative(a: Tensor, b: Tensor, saved: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(a b times the activation's derivative, its column sums on Hopper)

    saved: GELU's pre-activation, or the output of ReLU^2.
    """
    if on_hopper(a):
        return hopper.derivative("d" + kind, a, b, saved)
    out, no_sums = empty_derivative(a, b, saved, kind)
    cublas.matmul(a, b, out, dgelu=saved if kind == "gelu" else None)
    if kind == "relu2":
        grid = (cdiv(out.numel(), BLOCK),)
        _relu2_backward[grid](out, saved, out.numel(), BLOCK=BLOCK)
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
    grid = N, cdiv(H, BLOCK)
    _swiglu[grid](gate_up, act, H=H, BLOCK=BLOCK, num_warps=SWIGLU_WARPS)
    return act


def empty_swiglu_gradients(dact, gate_up):
    return torch.empty_like(gate_up), torch.empty_like(dact)


@operator("swiglu_backward", empty_swiglu_gradients)
def swiglu_backward(dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate_up, silu(gate) * up) from dact, the gradient of silu(gate) * up."""
    dgate_up, act = empty_swiglu_gradients(dact, gate_up)
    N, H = dact.shape
    grid = N, cdiv(H, BLOCK)
    _swiglu_backward[grid](dact, gate_up, dgate_up, act, H=H, BLOCK=BLOCK, num_warps=SWIGLU_WARPS)
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
