"""Linear layer and cross-entropy in chunks of tokens, the gradients computed in the forward.

On Hopper the epilogue of the logits' GEMM takes the softmax's exponentials: logits are read once
less.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

import fast
from fast import cublas, hopper
from fast.operators import LOG2E, load_float32, on_hopper, operator, power_of_2

# 4.2 ms for 65,536 rows of 50,304 on an H200; 4,096 x 8: 4.8, 1,024 x 4: 5.2
CE_BLOCK, CE_WARPS = 2048, 8


def linear_cross_entropy(x, weight, targets, reduction, vocab_size):
    """kernels.cross_entropy of x in 16 bits and the head's weight, both contiguous.

    "none" has no gradient.
    """
    ids = targets.flatten().contiguous()
    if reduction == "sum" and torch.is_grad_enabled():
        return LinearCrossEntropy.apply(x, weight, ids, vocab_size, True)
    losses, *_ = cross_entropy_chunks(x.flatten(0, -2), weight, ids, vocab_size, False)
    return losses.view_as(targets) if reduction == "none" else losses.sum()


def empty_results(x, weight, grad=True):
    """(losses, dx, dw); chunks of dw are summed in the weight's dtype."""
    losses = x.new_empty(x.size(0), dtype=torch.float32)
    if not grad:
        return losses, x.new_empty(0), x.new_empty(0)
    return losses, torch.empty_like(x), torch.empty_like(weight)


def empty_chunks(x, weight, targets, V, grad):
    factors = x.new_empty(x.size(0), dtype=torch.float32)
    return *empty_results(x, weight, grad), factors


@operator("cross_entropy_chunks", empty_chunks)
def cross_entropy_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, V: int, grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses (N,) float32, dx (N, C), dw (P, C), factors (N,)); the last three only with grad.

    dx and dw are the gradients of the summed loss; the rows of dx still have to be multiplied with
    `factors`. x: (N, C) in 16 bits, weight: (P, C), both contiguous; targets: (N,); V: rows of
    weight, less its padding.
    """
    N, P = x.size(0), weight.size(0)
    w = weight.to(x.dtype)
    losses, dx, dw = empty_results(x, weight, grad)
    factors = torch.ones_like(losses)
    in_product = on_hopper(x)
    if in_product:
        shifts = target_logits(x, w, targets)
    rows = min(N, chunk_rows(P))
    needs_logits = grad or not in_product
    all_logits = x.new_empty(rows if needs_logits else 0, P)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        x_chunk = x[chunk]
        logits = all_logits[: N - start]
        grads = logits if grad else None  # which replace them
        if in_product:
            x_chunk = exponential_rows(
                x_chunk, w, targets[chunk], V,
                shifts=shifts[chunk], losses=losses[chunk], factors=factors[chunk], grads=grads,
            )  # fmt: skip
        else:
            cublas.matmul(x_chunk, w.t(), logits, tune=grad)
            cross_entropy_rows(logits, targets[chunk], losses[chunk], grads, V)
        if grad:
            cublas.matmul(grads, w, dx[chunk])
            cublas.matmul(grads.t(), x_chunk, dw, added=dw if start else None)
    return losses, dx, dw, factors


def summed_loss(chunks):
    """The autograd.Function of (x, weight, *more) that sums the losses of chunks(x, weight, *more).

    chunks takes x as rows, (N, C), and also returns the gradients of x and weight, and perhaps
    factors for the rows of the former.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, *more):
            losses, *gradients = chunks(x.flatten(0, -2), weight, *more)
            ctx.save_for_backward(*gradients)
            ctx.shape = x.shape
            ctx.nones = (None,) * len(more)
            return losses.sum()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            dx, dw, *factors = ctx.saved_tensors
            by_row = grad * factors[0][:, None] if factors else grad
            return dx.mul_(by_row).view(ctx.shape), dw.mul_(grad), *ctx.nones

    return Function


LinearCrossEntropy = summed_loss(cross_entropy_chunks)


def chunk_rows(P):
    """How many rows of P logits in 16 bits fit in LOGITS_MIB, rounded down to a power of two."""
    fitting = int(fast.LOGITS_MIB * 2**20) // (2 * P)
    return 2 ** max(4, fitting.bit_length() - 1)


def cross_entropy_rows(logits, targets, losses, grads, V, scale=1.0):
    """Fills `losses`, (rows,), and `grads`: scale times the gradients of `logits`, (rows, P).

    grads: None, a tensor in 16 bits, which may be `logits` itself, or in e5m2.
    """
    given = logits if grads is None else grads  # the kernel takes a pointer in any case
    _cross_entropy[(logits.size(0),)](
        logits, targets, losses, given, scale,
        P=logits.size(1), V=V, GRAD=grads is not None, DITHER=given.dtype == torch.float8_e5m2,
        BLOCK=CE_BLOCK, num_warps=CE_WARPS,
    )  # fmt: skip


@triton.jit
def _cross_entropy(
    logits, targets, losses, grads, scale,
    P: tl.constexpr, V: tl.constexpr, GRAD: tl.constexpr, DITHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss, and with GRAD scale times the gradients of its logits.

    The loss is log sum exp(logits) - target_logit, the gradients are softmax(logits), less 1 for
    the target. Of the P columns V are real. They are read in blocks, once for the loss and once for
    the gradients, but for the last block, `tail`, which alone needs a mask and is kept. FULL: the
    columns before it.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * P
    grads += row * P
    target = tl.load(targets + row)
    cols = tl.arange(0, BLOCK)
    FULL: tl.constexpr = V // BLOCK * BLOCK
    if target < 0:
        tl.store(losses + row, 0.0)
        if GRAD:
            _store_zeros(grads, cols, 0, P, BLOCK)
        return
    target_logit = tl.load(logits + target).to(tl.float32)
    tail = tl.load(logits + FULL + cols, mask=FULL + cols < V, other=-float("inf"))
    tail = tl.where(FULL + cols < V, tail.to(tl.float32), -float("inf"))
    lse = _log_sum_exp(logits, cols, tail, target_logit, FULL, BLOCK)
    tl.store(losses + row, lse - target_logit)
    if GRAD:
        _store_gradients(grads, logits, cols, tail, lse, scale, P, V, FULL, DITHER, BLOCK)
        tl.debug_barrier()  # the target's own gradient goes over what was stored there
        of_target = _logit_gradients(target_logit, target, lse, scale, scale, DITHER)
        tl.store(grads + target, of_target)


@triton.jit
def _log_sum_exp(logits, cols, tail, target_logit, FULL: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row of logits; cols: 0 to BLOCK.

    exp is taken against `top`, the largest of the last block's logits and the target's, without a
    running maximum; in the rare row where that overflows, it is taken again against the true one.
    """
    top = tl.maximum(target_logit, tl.max(tail))
    sums = tl.exp2((tail - top) * LOG2E)
    for start in range(0, FULL, BLOCK):
        x = tl.load(logits + start + cols).to(tl.float32)
        sums += tl.exp2(x * LOG2E - top * LOG2E)
    total = tl.sum(sums)
    if total == float("inf"):
        highest = tail
        for start in range(0, FULL, BLOCK):
            x = tl.load(logits + start + cols).to(tl.float32)
            highest = tl.maximum(highest, x)
        top = tl.max(highest)
        sums = tl.exp2((tail - top) * LOG2E)
        for start in range(0, FULL, BLOCK):
            x = tl.load(logits + start + cols).to(tl.float32)
            sums += tl.exp2((x - top) * LOG2E)
        total = tl.sum(sums)
    return top + tl.log(total)


@triton.jit
def _store_gradients(
    grads, logits, cols, tail, lse, scale,
    P: tl.constexpr, V: tl.constexpr, FULL: tl.constexpr, DITHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of a row's logits, as if none were the target.

    They are stored from the last block on, which the cache still holds, back to the first.
    """
    grad = _logit_gradients(tail, FULL + cols, lse, scale, 0.0, DITHER)
    grad = tl.where(FULL + cols < V, grad, 0.0)
    tl.store(grads + FULL + cols, grad, mask=FULL + cols < P)
    for back in range(BLOCK, FULL + 1, BLOCK):
        at = FULL - back + cols
        x = tl.load(logits + at).to(tl.float32)
        grad = _logit_gradients(x, at, lse, scale, 0.0, DITHER)
        tl.store(grads + at, grad)
    _store_zeros(grads, cols, FULL + BLOCK, P, BLOCK)  # padding that reaches beyond the last block


@triton.jit
def _store_zeros(grads, cols, FIRST: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """In a row's columns from FIRST on."""
    zeros = tl.zeros((BLOCK,), grads.dtype.element_ty)
    for start in range(FIRST, P, BLOCK):
        tl.store(grads + start + cols, zeros, mask=start + cols < P)


def target_logits(x, w, targets):
    """(N,) float32: each row's target's logit times log2(e); inf where it is ignored."""
    N, C = x.shape
    shifts = x.new_empty(N, dtype=torch.float32)
    _target_logits[(N,)](x, w, targets, shifts, C=C, BLOCK=min(2048, power_of_2(C)))
    return shifts


def exponential_rows(x, w, targets, V, *, shifts, losses, factors, grads):
    """Losses as log sum exp(logit - target's logit), with exponentials from the GEMM's epilogue.

    shifts: `target_logits`. Fills `losses`, (rows,), and unless grads is None `factors`, (rows,),
    and `grads`, (rows, P): a row of it times its factor is the gradient of its logits. Returns x
    with rows times factors, for the weight's gradient.
    """
    sums = hopper.exponentials(x, w, shifts, V, grads)
    scaled = x if grads is None else torch.empty_like(x)
    rows, C = x.shape
    parts = sums.size(1)
    _exponential_rows[(rows,)](
        x if grads is None else grads,  # the kernel takes a pointer in any case
        sums, x, targets, losses, factors, scaled, parts,
        P=w.size(0), C=C, GRAD=grads is not None, PARTS=power_of_2(parts), WIDTH=hopper.BN,
        BLOCK=min(2048, power_of_2(C)),
    )  # fmt: skip
    return scaled


@triton.jit
def _target_logits(x, w, targets, shifts, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, C, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = load_float32(x + row * C + at, at < C)
        b = load_float32(w + tl.maximum(target, 0) * C + at, at < C)
        products += a * b
    shift = tl.sum(products) * LOG2E
    tl.store(shifts + row, tl.where(target < 0, float("inf"), shift))


@triton.jit
def _exponential_rows(
    grads, sums, x, targets, losses, factors, scaled, parts,
    P: tl.constexpr, C: tl.constexpr, GRAD: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss from partial sums of exponentials relative to the target's.

    sums: hopper.exponentials'. An ignored row's exponentials are zeros, and so are its gradients.
    Where they would overflow, those of WIDTH columns come relative to the largest of them, `raised`
    above the target's logit (in powers of two): a row with such columns, which is rare, is scaled
    so that all are relative to its largest.
    """
    row = tl.program_id(0).to(tl.int64)
    grads += row * P
    sums += row * parts * 2
    x += row * C
    scaled += row * C
    target = tl.load(targets + row)
    part = tl.arange(0, PARTS)
    raised = tl.load(sums + part * 2 + 1, mask=part < parts, other=0.0)
    most = tl.max(raised)
    of_target = tl.exp2(-most)  # the target's exponential
    total = tl.sum(tl.load(sums + part * 2, mask=part < parts, other=0.0) * tl.exp2(raised - most))
    total = tl.where(total < of_target, of_target, total)  # it is part of total, but for rounding
    at_target = of_target - total
    loss = tl.log(total) + most / LOG2E
    if GRAD:
        if most > 0:
            for start in range(0, P, BLOCK):
                at = start + tl.arange(0, BLOCK)
                lower = tl.load(sums + at // WIDTH * 2 + 1, mask=at < P, other=0.0) - most
                powers = load_float32(grads + at, at < P) * tl.exp2(lower)
                tl.store(grads + at, powers, mask=at < P)
            tl.debug_barrier()  # the target's own gradient goes over what the loop stored there
    tl.store(losses + row, tl.where(target < 0, 0.0, loss))
    if GRAD:
        tl.store(grads + target, at_target, mask=target >= 0)
        tl.store(factors + row, 1 / total)
        for start in range(0, C, BLOCK):
            at = start + tl.arange(0, BLOCK)
            a = load_float32(x + at, at < C)
            tl.store(scaled + at, a / total, mask=at < C)


@triton.jit
def _logit_gradients(x, at, lse, scale, subtracted, DITHER: tl.constexpr):
    """scale times the gradients of a row's logits x.

    at: their columns; lse: the row's log sum exp; subtracted: scale for the target, 0 for others.
    """
    grad = tl.exp2(x * LOG2E - lse * LOG2E) * scale - subtracted
    if DITHER:
        grad = _dithered(grad, at, lse)
    return grad


@triton.jit
def _dithered(x, at, seed):
    """x rounded stochastically to e5m2's two mantissa bits, so that it is right in the mean.

    A token has much the same probability at most positions: errors of rounding to nearest would add
    up. The random bits are a hash of the row's seed plus a golden-ratio step per column: a
    multiplication.
    """
    start = seed.to(tl.float32).to(tl.uint32, bitcast=True) * 0x9E3779B1
    start = (start ^ (start >> 15)) * 0x85EBCA77
    start = (start ^ (start >> 13)) * 0xC2B2AE3D
    bits = x.to(tl.uint32, bitcast=True) + ((at.to(tl.uint32) * 0x9E3779B1 + start) >> 11)
    return (bits & 0xFFE00000).to(tl.float32, bitcast=True)
