"""Context parallelism: ranks share the tokens of a row whose activations do not fit one GPU.

Only attention's core mixes tokens: an all-to-all before it exchanges tokens for heads, so that a
rank has all tokens of some heads, and one after it reverses that (Ulysses,
https://arxiv.org/abs/2309.14509). They are data-parallel ranks to gradients. An edit that mixes
tokens outside attn.core is refused, see run/prove.py.
"""

import contextlib
import dataclasses
import math

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single_autograd

import kernels
import model as models
from scale import generators, parallel
from system.errors import UserError

MIXED = 1024  # tokens of a row in which `mixes_elsewhere` looks for others that a token sees


@dataclasses.dataclass
class ContextRanks:
    """The ranks that share rows, of which this process is one."""

    group: ProcessGroup
    on: bool = True  # False: each has whole, separate rows, see `whole_rows`


def apply(model, cfg):
    """Wraps the cores of all attentions; neighbouring ranks share a sequence. All ranks call it."""
    limit = parallel.time_limit(cfg.timeout_s)
    group, _ = torch.distributed.new_subgroups(cfg.context_parallel, timeout=limit)
    ranks = model.context_ranks = ContextRanks(group)
    for module in attentions(model, "context_parallel", any_core=True):
        module.core = Ulysses(module.core, ranks)


def attentions(model, setting, any_core=False):
    """Modules whose `core` is kernels.attention, perhaps wrapped.

    any_core: each model.Attention counts. Raises UserError if a block has none.
    """

    def suits(module):
        core = module
        while hasattr(core, "core"):  # the innermost, which masks and remat wrap
            core = core.core
        return core is kernels.attention or any_core and isinstance(module, models.Attention)

    for i, block in enumerate(model.blocks):
        if not any(map(suits, block.modules())):
            why = (
                f"{setting} goes around attn.core, kernels.attention, and block {i} of "
                "model.py has none"
            )
            raise UserError(f"{why}: see docs/experiment.md")
    return list(filter(suits, model.modules()))


@torch.no_grad()
def mixes_elsewhere(model, separator, text=None):
    """Whether tokens of a model see others, or their place in the row, elsewhere than in attn.core.

    It replaces each core, for good, by one in which a token sees itself alone. Compared are the
    logits of a row with those of another that has the same tokens in part, and with those of its
    second half alone. model: one with random weights, in eval mode. separator: an id that some of
    the tokens have, or None. text: the row, (T,), else of random tokens.
    """
    device = parallel.device_of(model)
    T = min(model.cfg.block_size, MIXED)
    row = torch.randint(model.cfg.vocab_size, (T,)) if text is None else text[:T].cpu()
    T = len(row)
    if separator is not None:
        row[torch.rand(T) < 0.2] = separator
    other = torch.where(torch.rand(T) < 0.1, row, row[torch.randperm(T)])
    same = (row == other).to(device)
    half = T // 64 * 32  # an edit may merge two or four tokens

    def own_values(q, k, v, *_, **__):
        own = (k.type_as(v) + v).repeat_interleave(q.size(1) // v.size(1), dim=1)
        return own + q.type_as(v)

    for module in attentions(model, "attention", any_core=True):
        module.core = own_values

    def logits(row, positions=None):
        generators.seed(0)  # what a forward draws is then alike
        return model.logits(row[None].to(device), positions=positions)[0]

    whole = logits(row)
    second = logits(row[half:], torch.arange(half, T, device=device))
    apart = (whole[half:] - second).norm(), (whole - logits(other))[same].norm()
    return max(apart) > 1e-4 * whole.norm()


@contextlib.contextmanager
def whole_rows(model, whole=True):
    """Within it each rank has whole rows of its own, one document each, as HellaSwag needs them.

    whole=False: again as in training.
    """
    names = ("context_ranks", "documents")
    parts = [getattr(model, name) for name in names if hasattr(model, name)]
    for part in parts:
        part.on = not whole
    try:
        yield
    finally:
        for part in parts:
            part.on = True


class Ulysses:
    """attn.core between two all-to-alls."""

    def __init__(self, core, ranks):
        self.core, self.ranks = core, ranks

    def __call__(self, q, k, v, *options, **named):
        """For this rank's tokens, q: (B, H, T/N, D); k, v: (B, H_kv, T/N, D) -> (B, H, T/N, D)."""
        group, N = self.ranks.group, self.ranks.group.size()
        if not self.ranks.on:
            return self.core(q, k, v, *options, **named)
        q, k = q.to(v.dtype), k.to(v.dtype)  # RMSNorm under autocast gives float32
        # heads of k and v are repeated if ranks would not have equally many
        k, v = (x.repeat_interleave(math.lcm(x.size(1), N) // x.size(1), dim=1) for x in (k, v))
        qkv = q, k, v  # of one width
        heads = [x.size(1) // N for x in qkv]
        parts = torch.cat([x.unflatten(1, (N, -1)) for x in qkv], dim=2)  # (B, N, h, T/N, D)
        parts = all_to_all(parts.movedim(1, 0), group)  # all tokens, of this rank's heads
        q, k, v = parts.movedim(0, 2).flatten(2, 3).split(heads, dim=1)  # (B, h, T, D)
        y = self.core(q, k, v, *options, **named)
        # y: this rank's tokens, of all heads
        y = all_to_all(y.unflatten(2, (N, -1)).movedim(2, 0), group)
        return y.movedim(0, 1).flatten(1, 2)  # (B, H, T/N, D)


def all_to_all(parts, group):
    """parts[i] goes to rank i of the group and is replaced by what rank i sends."""
    flat = all_to_all_single_autograd(parts.contiguous().flatten(0, 1), None, None, group)
    return flat.unflatten(0, parts.shape[:2])


def whole_sequences(model, idx):
    """(B, T) ids of whole sequences, gathered from the ranks that share them."""
    ranks = getattr(model, "context_ranks", None)
    if ranks is None or not ranks.on:
        return idx
    return all_gather_tensor(idx.contiguous(), 1, ranks.group)


def own_tokens(cfg, world, x, y):
    """This rank's part of whole sequences x, y: (B, T), and its positions.

    (x, y, positions): (B, T/N) twice, and (T/N,). Without context parallelism all of them, and None
    for the positions 0 to T - 1.
    """
    N = cfg.context_parallel
    if N == 1:
        return x, y, None
    rank = world.rank % N
    positions = torch.arange(x.size(1), device=x.device).unflatten(0, (N, -1))[rank]
    x, y = (tokens.unflatten(1, (N, -1))[:, rank] for tokens in (x, y))
    return x, y, positions
