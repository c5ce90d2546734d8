"""A loss in chunks of tokens, so that few logits are in memory at a time."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

import fast

compile_once = functools.cache(torch.compile)  # torch keeps what each call of torch.compile returns


def rows_that_fit(weight):
    """How many tokens have float32 logits of fast.LOGITS_MIB; weight: the head's."""
    return int(fast.LOGITS_MIB * 2**20) // (4 * weight.size(0))


# one graph of all chunks would hold the logits of several: 767 MiB, not 295 (CPU)
@torch.compiler.disable
def chunked(loss, compiled, x, weight, targets, reduction, vocab_size):
    """loss(x, weight, targets, reduction, vocab_size) of a power of two of tokens at a time.

    The backward computes the logits of each chunk again: one more GEMM. compiled: whether
    torch.compile traces the caller.
    """
    rows = 2 ** max(0, rows_that_fit(weight).bit_length() - 1)  # as in fast/loss.py
    if compiled:
        loss = compile_once(loss)
    # autocast would share a leaf's cast, whose gradients add up in 16 bits
    weight = weight.view_as(weight)
    # a CUDA graph's capture cannot read the generator's state, and nothing is drawn
    again = functools.partial(checkpoint, loss, use_reentrant=False, preserve_rng_state=False)
    losses = []
    for xi, ti in zip(x.flatten(0, -2).split(rows), targets.flatten().split(rows), strict=True):
        losses.append(again(xi, weight, ti, reduction, vocab_size))
    if reduction == "none":
        return torch.cat(losses).view_as(targets)
    return torch.stack(losses).sum()
