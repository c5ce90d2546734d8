"""A KV cache for sampling: keys and values of earlier tokens are kept, so that a step computes those of one token.

It goes around attn.core, as scale/ does, and sets `first` of the positions. The model's own forward runs, but not
compiled: there would be a graph for each position. Between two calls the model is as it was.
"""

import contextlib
import functools
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import kernels
from configurator import UserError, is_rank_0
from scale import context, parallel

TRIAL = 16  # tokens with which `make` tries a model


def make(model, size):
    """A Cache for rows of up to `size` tokens, or None, with a warning, for an edited model that it would not suit."""
    idx = torch.arange(min(TRIAL, size), device=parallel.device_of(model))[None] % model.cfg.vocab_size
    try:
        trial = Cache(model, size=idx.size(1))
    except UserError as error:
        return warn(str(error))
    expected = trial.uncached(idx)
    trial.logits(idx[:, :-1])
    found = trial.logits(idx[:, -1:])
    if (found - expected).std() > 0.1 * expected.std():  # about 0.02 in bf16, 1e-6 in float32
        return warn("model.py mixes tokens outside of attn.core, or uses a block twice")
    return Cache(model, size)


@functools.cache
def warn(reason):
    if is_rank_0():
        print(
            f"warning: {reason}; sampling goes without a KV cache, more slowly", file=sys.stderr, flush=True
        )


class Cache:
    """The keys and values of rows of up to `size` tokens; `length`: how many tokens of each row it has.

    Raises UserError for a model with another attn.core than kernels.attention. Use it under torch.no_grad, and for a
    model with context parallelism or document masks within context.alone.
    """

    def __init__(self, model, size):
        self.model, self.length = model, 0
        self.cores = {
            (module, "core"): Kept(module.core, size) for module in context.attentions(model, "a KV cache")
        }
        self.placed = [*context.positions(model), *self.cores.values()]

    def logits(self, idx):
        """(B, T) ids that follow those in the cache, one a row unless it is empty -> (B, vocab_size) after the last."""
        firsts = {(module, "first"): self.length for module in self.placed}
        with attributes(self.cores | firsts):
            logits = self.uncached(idx)
        self.length += idx.size(1)
        return logits

    def uncached(self, idx):
        with torch.compiler.set_stance("force_eager"):
            return self.model.logits(idx, slice(-1, None))[:, 0]


class Kept:
    """attn.core of one attention, with its keys and values, allocated at once for `size` tokens."""

    def __init__(self, core, size):
        self.core, self.size, self.first, self.kept = core, size, 0, None

    def __call__(self, q, k, v, *options):
        """For the tokens from position `first` on, q: (B, H, T, D); k, v: (B, H_kv, T, D) -> (B, H, T, D)."""
        B, T, last = v.size(0), v.size(2), self.first + v.size(2)
        if self.kept is None:
            self.kept = v.new_empty(2, *v.shape[:2], self.size, v.size(3))
        self.kept[0, :, :, self.first : last], self.kept[1, :, :, self.first : last] = k, v
        if self.first == 0:
            return self.core(q, k, v, *options)
        assert T == 1, "several tokens after cached ones would need a mask"
        keys, values = self.kept[:, :, :, :last]
        shared = q.to(v.dtype).reshape(
            B, v.size(1), -1, v.size(3)
        )  # heads that share keys, as if they were tokens
        with sdpa_kernel(
            kernels.BACKENDS["flash"], set_priority=True
        ):  # cuDNN would make a plan for every length
            y = F.scaled_dot_product_attention(shared, keys, values)
        return y.reshape(B, 1, q.size(1), -1).transpose(
            1, 2
        )  # in memory as (B, T, H, D), which fast GEMMs read


@contextlib.contextmanager
def attributes(values):
    """Sets {(object, name): value}; afterwards each object has its own attribute, or its class's, as before."""
    before = {(owner, name): vars(owner)[name] for owner, name in values if name in vars(owner)}
    try:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for owner, name in values:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            else:
                delattr(owner, name)
