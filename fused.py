"""Faster versions of the model's parts for CUDA in bf16, put in from outside by `swap`; model.py does not know.

Triton kernels and cuBLASLt products stand behind custom operators, so that torch.compile takes them as they are.
tests/test_fused.py compares each with float64.
"""

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.library import custom_op

import cublas
import model as models

CHUNK_BYTES = 256 * 2**20  # logits alive at a time in the loss: 2,048 rows of GPT-2's vocabulary, 1,024 of Llama 3's
CE_BLOCK, CE_WARPS = 2048, 8  # 4.2 ms for 65,536 rows of 50,304 on an H200; 4,096 x 8: 4.8, 1,024 x 4: 5.2


def swap(model):
    """Replaces, in place, the linear layers, the GELU MLPs and the head; parameters and their names stay.

    Widths that are not multiples of 8 (16 bytes in bf16) are left as they are.
    """
    for module in model.modules():
        if any(size % 8 for p in module.parameters() for size in p.shape):
            continue
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif type(module) is models.MLP and module.activation is models.gelu:
            module.__class__ = GeluMLP
        elif type(module) is models.Head:
            module.__class__ = Head
    return model


class Linear(nn.Linear):
    """y = x W^T + b in bf16, weight gradient in the weight's own dtype; algorithms chosen by timing."""

    def forward(self, x):
        return linear(x.to(torch.bfloat16), self.weight, self.bias, torch.is_grad_enabled())


class GeluMLP(models.MLP):
    """The GELU is computed in the first product's epilogue, its derivative in that of the second's backward."""

    def forward(self, x):
        up, proj = self.up, self.proj
        x = x.to(torch.bfloat16)
        return GeluMLPFunction.apply(x, up.weight, up.bias, proj.weight, proj.bias, torch.is_grad_enabled())


class Head(models.Head):
    """The loss in chunks of tokens, its gradients computed in the forward; the logits are never whole."""

    def forward(self, x, targets, reduction):
        if reduction == "none" and torch.is_grad_enabled():  # a weight for each token is known in the backward only
            return super().forward(x, targets, reduction)
        return linear_cross_entropy(x.to(torch.bfloat16), self.weight, targets, reduction, *self.options())


# -- products


@custom_op("pretrain::product", mutates_args=())
def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tune: bool
) -> torch.Tensor:
    return cublas.matmul(a, b, a.new_empty(a.size(0), b.size(1), dtype=dtype), bias=bias, tune=tune)


@product.register_fake
def _(a, b, bias, dtype, tune):
    return a.new_empty(a.size(0), b.size(1), dtype=dtype)


@custom_op("pretrain::product_gelu", mutates_args=())
def product_gelu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tune: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(GELU of the product, the product)"""
    out, before = (a.new_empty(a.size(0), b.size(1)) for _ in range(2))
    return cublas.matmul(a, b, out, bias=bias, gelu=before, tune=tune), before


@product_gelu.register_fake
def _(a, b, bias, tune):
    return a.new_empty(a.size(0), b.size(1)), a.new_empty(a.size(0), b.size(1))


@custom_op("pretrain::product_dgelu", mutates_args=())
def product_dgelu(a: torch.Tensor, b: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The product times the GELU's derivative at `before`"""
    return cublas.matmul(a, b, torch.empty_like(before), dgelu=before)


@product_dgelu.register_fake
def _(a, b, before):
    return torch.empty_like(before)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tune):
        w, b = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        flat = x.flatten(0, -2)
        ctx.save_for_backward(flat, w)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return product(flat, w.t(), b, x.dtype, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        dx = product(flat, w, None, flat.dtype, True).unflatten(0, dy.shape[:-1])
        dw, db = weight_gradients(flat, x, *ctx.dtypes)
        return dx, dw, db, None


def weight_gradients(dy, x, weight_dtype, bias_dtype):
    dw = product(dy.t(), x, None, weight_dtype, True)
    return dw, None if bias_dtype is None else dy.sum(0, dtype=torch.float32).to(bias_dtype)


def linear(x, weight, bias, tune=True):
    """x: (..., K) in 16 bits; weight: (N, K), bias: (N,) or None, of a dtype that their gradients get -> (..., N)."""
    return LinearFunction.apply(x, weight, bias, tune)


class GeluMLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, tune):
        ctx.dtypes = w1.dtype, None if b1 is None else b1.dtype
        w1, w2 = w1.to(x.dtype), w2.to(x.dtype)
        b1, b2 = (None if b is None else b.to(x.dtype) for b in (b1, b2))
        flat = x.flatten(0, -2)
        act, before = product_gelu(flat, w1.t(), b1, tune)
        ctx.save_for_backward(flat, w1, w2, act, before)
        return product(act, w2.t(), b2, x.dtype, tune).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        x, w1, w2, act, before = ctx.saved_tensors
        flat = dy.flatten(0, -2).contiguous()
        dbefore = product_dgelu(flat, w2, before)
        dw2, db2 = weight_gradients(flat, act, *ctx.dtypes)
        dw1, db1 = weight_gradients(dbefore, x, *ctx.dtypes)
        dx = product(dbefore, w1, None, flat.dtype, True).unflatten(0, dy.shape[:-1])
        return dx, dw1, db1, dw2, db2, None


# -- linear and cross-entropy


def linear_cross_entropy(x, weight, targets, reduction, vocab_size, softcap=None, smoothing=0.0, z_loss=0.0):
    """As kernels.linear_cross_entropy, for x in 16 bits. "none" has no gradient."""
    options = (vocab_size, softcap, smoothing, z_loss)
    if reduction == "none":
        losses, _, _ = cross_entropy_chunks(x.flatten(0, -2), weight, targets.flatten(), *options, False)
        return losses.view_as(targets)
    loss = LinearCrossEntropy.apply(x, weight, targets, options, torch.is_grad_enabled())
    return loss / (targets >= 0).sum() if reduction == "mean" else loss


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, options, grad):
        losses, dx, dw = cross_entropy_chunks(x.flatten(0, -2), weight, targets.flatten(), *options, grad)
        ctx.save_for_backward(dx, dw)
        ctx.shape, ctx.weight_dtype = x.shape, weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx.mul_(grad).view(ctx.shape), dw.mul_(grad).to(ctx.weight_dtype), None, None, None


@custom_op("pretrain::cross_entropy_chunks", mutates_args=())
def cross_entropy_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss of each token in float32, gradients of their sum by x and by weight).

    x: (N, C) in 16 bits; weight: (P, C); targets: (N,). The weight's gradient is summed in its own dtype (float32 for float16, whose range is too small).
    """
    N, P = x.size(0), weight.size(0)
    rows = min(N, 2 ** max(0, (CHUNK_BYTES // (P * x.element_size())).bit_length() - 1))
    losses, dx, dw = empty_results(x, weight, grad)
    logits, w = x.new_empty(rows, P), weight.to(x.dtype)
    for i in range(0, N, rows):
        xi, ti = x[i : i + rows], targets[i : i + rows]
        li = logits[: xi.size(0)]
        cublas.matmul(xi, w.t(), li, tune=grad)
        _cross_entropy[(xi.size(0),)](
            li, ti, losses[i : i + rows], softcap or 0.0, smoothing, z_loss,
            P=P, V=vocab_size, CAP=softcap is not None, SMOOTH=smoothing > 0, GRAD=grad,
            BLOCK=CE_BLOCK, num_warps=CE_WARPS,
        )  # fmt: skip
        if grad:
            cublas.matmul(li, w, dx[i : i + rows])
            cublas.matmul(li.t(), xi, dw, accumulate=i > 0)
    return losses, dx, dw


@cross_entropy_chunks.register_fake
def _(x, weight, targets, vocab_size, softcap, smoothing, z_loss, grad):
    return empty_results(x, weight, grad)


def empty_results(x, weight, grad):
    losses = torch.empty(x.size(0), dtype=torch.float32, device=x.device)
    dw_dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    if not grad:
        return losses, x.new_empty(0), x.new_empty(0)
    return losses, torch.empty_like(x), torch.empty_like(weight, dtype=dw_dtype)


@triton.jit
def _cross_entropy(
    logits, targets, losses, softcap, smoothing, z_loss,
    P: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss, and with GRAD its logits replaced by their gradient. Rows are P long, V of it real.

    exp is taken against the largest logit of the first block, so that the pass needs no running maximum; in the rare
    row where that overflows it is taken again against the true maximum. The second pass goes backwards: it begins with
    what the cache still holds. Blocks but the last are full, so that they need no mask.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * P
    target = tl.load(targets + row)
    cols = tl.arange(0, BLOCK)
    FULL: tl.constexpr = V // BLOCK * BLOCK
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRAD:
            for start in range(0, P, BLOCK):
                tl.store(logits + start + cols, 0.0, mask=start + cols < P)
        return
    picked = _capped(tl.load(logits + target), softcap, CAP)
    tail = tl.load(logits + FULL + cols, mask=FULL + cols < V, other=-float("inf"))
    tail = tl.where(FULL + cols < V, _capped(tail, softcap, CAP), -float("inf"))
    top = tl.maximum(picked, tl.max(tail))
    norms = tl.exp2((tail - top) * LOG2E)
    totals = tl.where(FULL + cols < V, tail, 0.0)
    for start in range(0, FULL, BLOCK):
        x = _capped(tl.load(logits + start + cols), softcap, CAP)
        norms += tl.exp2(x * LOG2E - top * LOG2E)
        if SMOOTH:
            totals += x
    norm = tl.sum(norms)
    if norm == float("inf"):
        highest = tail
        for start in range(0, FULL, BLOCK):
            highest = tl.maximum(highest, _capped(tl.load(logits + start + cols), softcap, CAP))
        top = tl.max(highest)
        norms = tl.exp2((tail - top) * LOG2E)
        for start in range(0, FULL, BLOCK):
            norms += tl.exp2((_capped(tl.load(logits + start + cols), softcap, CAP) - top) * LOG2E)
        norm = tl.sum(norms)
    lse = top + tl.log(norm)
    smooth = tl.sum(totals) / V if SMOOTH else 0.0
    tl.store(losses + row, lse - (1 - smoothing) * picked - smoothing * smooth + z_loss * lse * lse)
    if GRAD:
        shift = lse * LOG2E - tl.log2(1 + 2 * z_loss * lse)  # d (lse + z lse^2) = (1 + 2 z lse) softmax
        grad = _ce_grad(tail, shift, smoothing / V, softcap, CAP, SMOOTH, LOG2E)
        tl.store(logits + FULL + cols, tl.where(FULL + cols < V, grad, 0.0), mask=FULL + cols < P)
        for back in range(BLOCK, FULL + 1, BLOCK):
            at = logits + FULL - back + cols
            x = _capped(tl.load(at), softcap, CAP)
            tl.store(at, _ce_grad(x, shift, smoothing / V, softcap, CAP, SMOOTH, LOG2E))
        for start in range(FULL + BLOCK, P, BLOCK):  # padding that reaches beyond the tail's block
            tl.store(logits + start + cols, 0.0, mask=start + cols < P)
        tl.debug_barrier()  # the target's own gradient goes over what the loop stored there
        grad = _ce_grad(picked, shift, smoothing / V, 1.0, False, SMOOTH, LOG2E) - (1 - smoothing)
        if CAP:
            grad *= 1 - (picked / softcap) * (picked / softcap)
        tl.store(logits + target, grad)


@triton.jit
def _ce_grad(x, shift, uniform, softcap, CAP: tl.constexpr, SMOOTH: tl.constexpr, LOG2E: tl.constexpr):
    grad = tl.exp2(x * LOG2E - shift)
    if SMOOTH:
        grad -= uniform
    if CAP:
        grad *= 1 - (x / softcap) * (x / softcap)
    return grad


@triton.jit
def _capped(x, softcap, CAP: tl.constexpr):
    x = x.to(tl.float32)
    if CAP:
        x = softcap * _tanh(x / softcap)
    return x


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
