"""Context parallelism: ranks share a sequence whose activations do not fit one GPU, each with some tokens.

Only attention's core mixes tokens: an all-to-all before it exchanges tokens for heads, so that a rank has all
tokens of some heads, and one after it reverses that (Ulysses, https://arxiv.org/abs/2309.14509). They are
data-parallel ranks to gradients. An edit that mixes tokens outside attn.core gives wrong results.
"""

import contextlib
import math
from types import SimpleNamespace

import torch
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single_autograd

import kernels
import model as models
from configurator import UserError
from scale import parallel


def apply(model, cfg, world):
    """Wraps the cores of all attentions; neighbouring ranks share a sequence. All ranks call it."""
    N, limit = cfg.context_parallel, parallel.time_limit(cfg.timeout_s)
    groups = [torch.distributed.new_group(range(i, i + N), timeout=limit) for i in range(0, world.size, N)]
    spread = model.spread = SimpleNamespace(group=groups[world.rank // N], size=N, on=True)  # see `alone`
    for module in attentions(model, "context_parallel", any_core=True):
        module.core = Ulysses(module.core, spread)
    for module in positions(model):
        module.first = world.rank % N * (cfg.block_size // N)


def attentions(model, setting, any_core=False):
    """Modules with kernels.attention, perhaps wrapped, as `core`, or UserError; any_core: any Attention."""

    def suits(module):
        core = getattr(module, "core", None)
        while hasattr(core, "core"):
            core = core.core
        return core is kernels.attention or any_core and isinstance(module, models.Attention)

    for i, block in enumerate(model.blocks):
        if not any(map(suits, block.modules())):
            why = f"{setting} goes around attn.core, kernels.attention, and block {i} of model.py has none"
            raise UserError(f"{why}: see docs/experiment.md")
    return list(filter(suits, model.modules()))


def positions(model):
    """The modules that know the position of a row's first token, `first`."""
    return [module for module in model.modules() if hasattr(module, "first")]


@contextlib.contextmanager
def alone(model):
    """Within it, each rank has whole, separate rows, each of one document: for HellaSwag and samples."""
    own = [(getattr(model, name), "on", False) for name in ("spread", "documents") if hasattr(model, name)]
    with contextlib.ExitStack() as undo:
        for thing, name, value in own + [(module, "first", 0) for module in positions(model)]:
            undo.callback(setattr, thing, name, getattr(thing, name))
            setattr(thing, name, value)
        yield


class Ulysses:
    """attn.core between two all-to-alls."""

    def __init__(self, core, spread):
        self.core, self.spread = core, spread

    def __call__(self, q, k, v, *options):
        """For this rank's tokens, q: (B, H, T/N, D); k, v: (B, H_kv, T/N, D) -> (B, H, T/N, D)."""
        if not self.spread.on:
            return self.core(q, k, v, *options)
        N, group = self.spread.size, self.spread.group
        q, k = q.to(v.dtype), k.to(v.dtype)  # RMSNorm under autocast gives float32
        k, v = (x.repeat_interleave(math.lcm(x.size(1), N) // x.size(1), dim=1) for x in (k, v))
        heads = [x.size(1) // N for x in (q, k, v)]
        parts = torch.cat([x.unflatten(1, (N, -1)) for x in (q, k, v)], dim=2)  # (B, N, h, T/N, D)
        parts = exchange(parts.movedim(1, 0), group)  # all tokens, of this rank's heads
        q, k, v = parts.movedim(0, 2).flatten(2, 3).split(heads, dim=1)  # (B, h, T, D)
        y = self.core(q, k, v, *options)
        y = exchange(y.unflatten(2, (N, -1)).movedim(2, 0), group)  # this rank's tokens, of all heads
        return y.movedim(0, 1).flatten(1, 2)  # (B, H, T/N, D)


def exchange(parts, group):
    """All-to-all: parts[i] goes to rank i of the group and is replaced by what rank i sends."""
    flat = all_to_all_single_autograd(parts.contiguous().flatten(0, 1), None, None, group)
    return flat.unflatten(0, parts.shape[:2])


def whole_sequences(model, idx):
    """(B, T) ids of whole sequences, gathered from the ranks that share them."""
    spread = getattr(model, "spread", None)
    return all_gather_tensor(idx.contiguous(), 1, spread.group) if spread and spread.on else idx


def own_tokens(cfg, world, batch):
    """This rank's tokens of (x, y), (B, T/N) each, of a batch of whole sequences, (B, T)."""
    T = cfg.block_size // cfg.context_parallel
    first = world.rank % cfg.context_parallel * T
    return tuple(t[:, first : first + T] for t in batch)
