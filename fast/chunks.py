"""A loss in chunks of tokens, so that few logits are in memory at a time."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

import fast

compile_once = functools.cache(torch.compile)  # torch keeps what each call of torch.compile returns


def rows_that_fit(weight):
    """How many tokens have float32 logits of fast.LOGITS_MIB; weight: the head's."""
    return int(fast.LOGITS_MIB * 2**20) // (4 * weight.size(0))


def in_chunks(loss):
    """Decorator of loss(x, weight, targets, reduction, ...): in chunks where many logits would be.

    It computes the reductions "sum" and "none" so, where the sum over parts is that of the whole.
    """

    @functools.wraps(loss)
    def chosen(x, weight, targets, reduction, *options):
        few = x.device.type == "meta" or targets.numel() <= rows_that_fit(weight)
        if few or reduction not in ("sum", "none"):
            return loss(x, weight, targets, reduction, *options)
        compiled = torch.compiler.is_compiling()
        return chunked(loss, compiled, x, weight, targets, reduction, *options)

    return chosen


# one graph of all chunks would hold the logits of several: 767 MiB, not 295 (CPU)
@torch.compiler.disable
def chunked(loss, compiled, x, weight, targets, reduction, *options):
    """loss(x, weight, targets, reduction, *options) of a power of two of tokens at a time.

    The backward computes the logits of each chunk again: one more GEMM. compiled: whether
    torch.compile traces the caller.
    """
    if not sums_over_chunks(loss):
        return loss(x, weight, targets, reduction, *options)
    rows = 2 ** max(0, rows_that_fit(weight).bit_length() - 1)  # as in fast/loss.py
    if compiled:
        loss = compile_once(loss)
    # autocast would share a leaf's cast, whose gradients add up in 16 bits
    weight = weight.view_as(weight)
    # a loss of an edit may draw random numbers; a CUDA graph's capture cannot read their state
    replays = not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    checkpointed = functools.partial(
        checkpoint, loss, use_reentrant=False, preserve_rng_state=replays
    )
    losses = []
    for xi, ti in zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True):
        losses.append(checkpointed(xi, weight, ti, reduction, *options))
    if reduction == "none":
        return torch.cat(losses).view_as(targets)
    return torch.stack(losses).sum()


@functools.cache
@torch.no_grad()
def sums_over_chunks(loss):
    """Whether a loss of all tokens is the sum of its losses of parts, as in `chunked`.

    One that draws random numbers cannot be compared, and counts as such a sum.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 8, generator=draw)
    weight = torch.randn(16, 8, generator=draw)
    targets = torch.randint(13, (12,), generator=draw)
    targets[[2, 7, 8]] = -100
    with torch.random.fork_rng([]), torch.autocast("cpu", enabled=False):
        before = torch.get_rng_state()
        try:
            whole = loss(x, weight, targets, "sum", 13, None)
            if not torch.equal(before, torch.get_rng_state()):
                return True
            first = loss(x[:5], weight, targets[:5], "sum", 13, None)
            second = loss(x[5:], weight, targets[5:], "sum", 13, None)
        except Exception:  # of any type: the edit's
            return False
    return torch.allclose(first + second, whole, rtol=1e-4)
