"""Context parallelism: the tokens of a sequence are spread over ranks, for contexts whose activations fit no GPU alone.

    torchrun --standalone --nproc_per_node=4 train.py config/llama3_8b.py --parallel=fsdp --context_parallel=4

Every part of the model works on a token alone, but for attention: before it an all-to-all trades tokens for heads, so
that a rank has all tokens of its heads, and one after it trades back (Ulysses, https://arxiv.org/abs/2309.14509). Each
rank has the same share of the causal triangle. For parameters and gradients the ranks count as data-parallel ones.
"""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

import model as models


def problems(cfg, world_size):
    """What cannot be spread so, a line each."""
    N = cfg.context_parallel
    found = []
    if N < 1 or world_size % N:
        found.append(f"context_parallel={N} must divide the number of ranks, {world_size}")
    elif cfg.block_size % N:
        below = cfg.block_size // N * N
        found.append(f"block_size={cfg.block_size} must be divisible by context_parallel={N}; nearest: {below}")
    elif cfg.n_head % N:
        found.append(f"n_head={cfg.n_head} must be divisible by context_parallel={N}")
    elif cfg.kv_heads % N and N % cfg.kv_heads:
        found.append(f"of n_kv_head={cfg.kv_heads} and context_parallel={N} one must be divisible by the other")
    return found


def apply(model, cfg, world):
    """Puts it in place; neighbouring ranks share a sequence. All ranks call it."""
    N = cfg.context_parallel
    groups = [dist.new_group(range(i, i + N)) for i in range(0, world.size, N)]
    spread = Spread(groups[world.rank // N], N)
    for module in model.modules():
        if isinstance(module, models.Attention):
            module.__class__, module.spread = spreading(type(module)), spread
        elif isinstance(module, (models.Rope, models.LearnedPositions)):
            module.first = world.rank % N * (cfg.block_size // N)


class Spread:
    """The ranks that share a sequence; `on` is False while each works on sequences of its own."""

    def __init__(self, group, size):
        self.group, self.size, self.on = group, size, True


@contextlib.contextmanager
def alone(model):
    """Within it, a rank's sequences are whole and its own: for short ones, as in HellaSwag and samples."""
    attentions = [m for m in model.modules() if getattr(m, "spread", None)]
    positions = [m for m in model.modules() if isinstance(m, (models.Rope, models.LearnedPositions))]
    firsts = [m.first for m in positions]
    for module in attentions:
        module.spread.on = False
    for module in positions:
        module.first = 0
    try:
        yield
    finally:
        for module in attentions:
            module.spread.on = True
        for module, first in zip(positions, firsts, strict=True):
            module.first = first


@functools.cache
def spreading(attention_class):
    """The class of an attention between two all-to-alls."""

    class Spreading(attention_class):
        def attend(self, q, k, v):
            if not self.spread.on:
                return super().attend(q, k, v)
            N, group = self.spread.size, self.spread.group
            k, v = (x.repeat_interleave(math.lcm(x.size(1), N) // x.size(1), dim=1) for x in (k, v))
            heads = [x.size(1) // N for x in (q, k, v)]
            parts = torch.cat([x.unflatten(1, (N, -1)) for x in (q, k, v)], dim=2)  # (B, N, h, T/N, D)
            parts = exchange(parts.movedim(1, 0), group)  # of each rank its tokens, for these heads
            q, k, v = parts.movedim(0, 2).flatten(2, 3).split(heads, dim=1)  # (B, h, T, D)
            y = super().attend(q, k, v)
            y = exchange(y.unflatten(2, (N, -1)).movedim(2, 0), group)  # of each rank its heads, for these tokens
            return y.movedim(0, 1).flatten(1, 2)  # (B, H, T/N, D)

    return Spreading


def exchange(parts, group):
    """parts[i] goes to rank i of the group, whose part for this rank takes its place; so do gradients, backwards."""
    flat = all_to_all_single_autograd(parts.contiguous().flatten(0, 1), None, None, group)
    return flat.unflatten(0, parts.shape[:2])


def whole_sequences(model, idx):
    """(B, T) ids of whole sequences, gathered from the ranks that share them; `idx` itself where it is whole."""
    spread = getattr(model.blocks[0].attn, "spread", None)
    if spread is None or not spread.on:
        return idx
    parts = [torch.empty_like(idx, memory_format=torch.contiguous_format) for _ in range(spread.size)]
    dist.all_gather(parts, idx.contiguous(), group=spread.group)
    return torch.cat(parts, dim=1)


def own_tokens(cfg, world, batch):
    """(x, y), of whole sequences, cut to this rank's part of each."""
    T = cfg.block_size // cfg.context_parallel
    first = world.rank % cfg.context_parallel * T
    return tuple(t[:, first : first + T] for t in batch)
