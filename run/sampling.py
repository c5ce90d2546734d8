"""Continues text with a model, token by token, with a KV cache: keys and values of earlier tokens are kept.

The cache goes around attn.core, as scale/ does, and sets `first` of the positions. The model's own forward
runs, but not compiled: there would be a graph for each position. Between two steps the model is as it was.
"""

import functools
import itertools
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import kernels
from configurator import UserError, is_rank_0
from scale import context, parallel


def texts(model, tokenizer, prompt, n, **options):
    """n strings that continue `prompt`, which they include; each ends at the end of its document."""
    ids = [tokenizer.eot, *tokenizer.encode(prompt)]
    return [tokenizer.decode(ids[1:] + new) for new in replies(model, ids, n, tokenizer.ends, **options)]


def replies(model, ids, n, ends, **options):
    """n lists of new ids that continue the list `ids`, each up to an id of `ends`; options of `generate`."""
    idx = torch.tensor([ids] * n, device=parallel.device_of(model))
    rows = generate(model, idx, ends=ends, **options)[:, len(ids) :].tolist()
    return [list(itertools.takewhile(lambda i: i not in ends, row)) for row in rows]


@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True, ends=()):
    """Continues each row of ids (B, T) int64 by max_new_tokens, or until all rows of all ranks have an end.

    Without a KV cache or beyond block_size a step computes the last tokens in a window of one width, so that
    a compiled model sees one shape; causal attention does not see the zeros on its right.
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    T, total = ids.size(1), ids.size(1) + max_new_tokens
    width = min(model.cfg.block_size, -(-total // 64) * 64)
    buffer = F.pad(ids, (0, max(total, width) - T))
    cache = make_cache(model, width) if cached and width > 1 else None
    ends, going = torch.tensor([*ends], device=ids.device), torch.ones_like(ids[:, 0])
    for end in range(T, total):
        if cache and end <= width:
            logits = cache.logits(buffer[:, cache.length : end])
        else:
            begin = max(0, end - width)
            at = torch.tensor([end - begin - 1], device=ids.device)
            logits = model.logits(buffer[:, begin : begin + width], at)[:, 0]  # (B, V)
        buffer[:, end] = pick(logits, temperature, top_k, generator)
        going *= torch.isin(buffer[:, end], ends, invert=True)
        if len(ends) and not parallel.sum_over_ranks(going.sum()):  # a sharded model needs all ranks
            return buffer[:, : end + 1]
    return buffer[:, :total]


def pick(logits, temperature, top_k, generator):
    """One id a row from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # so that a tiny one does not overflow
    logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    return ids.gather(1, logits.softmax(-1).multinomial(1, generator=generator)).squeeze(1)


def make_cache(model, size):
    """A Cache of `size` tokens a row; None, with a warning, for an edited model that it does not suit."""
    idx = torch.arange(min(16, size), device=parallel.device_of(model))[None] % model.cfg.vocab_size
    try:
        trial = Cache(model, idx.size(1))
    except UserError as error:
        return warn(str(error))
    expected = trial.uncached(idx)
    trial.logits(idx[:, :-1])
    if (trial.logits(idx[:, -1:]) - expected).std() > 0.1 * expected.std():  # in bf16 0.02, float32 1e-6
        return warn("model.py mixes tokens outside of attn.core, or uses a block twice")
    return Cache(model, size)


@functools.cache
def warn(reason):
    if is_rank_0():
        print(f"warning: {reason}; sampling goes without a KV cache, more slowly", file=sys.stderr)


class Cache:
    """Keys and values of rows of up to `size` tokens; `length`: how many of each row it has.

    It needs torch.no_grad, kernels.attention as attn.core, and context.alone around wrapped ones.
    """

    def __init__(self, model, size):
        self.model, self.size, self.length, self.kept = model, size, 0, {}
        found = context.attentions(model, "a KV cache")
        self.cores = [(vars(m), "core", functools.partial(self.attend, m, m.core)) for m in found]

    def logits(self, idx):
        """(B, T) ids after those in the cache, T = 1 unless it is empty -> (B, vocab_size) of the last."""
        own = self.cores + [(vars(module), "first", self.length) for module in context.positions(self.model)]
        before = [(values, name, values.get(name)) for values, name, _ in own]
        try:
            assign(own)
            logits = self.uncached(idx)
        finally:
            assign(before)
        self.length += idx.size(1)
        return logits

    def uncached(self, idx):
        with torch.compiler.set_stance("force_eager"):
            return self.model.logits(idx, slice(-1, None))[:, 0]

    def attend(self, module, core, q, k, v, *options):
        """attn.core for tokens after those in the cache, q: (B, H, T, D); k, v: (B, H_kv, T, D) -> as q."""
        B, H_kv, T, D = v.shape
        first, last = self.length, self.length + T
        if first == 0:
            self.kept[module] = v.new_empty(2, B, H_kv, self.size, D)
        kept = self.kept[module][:, :, :, :last]
        kept[0, :, :, first:], kept[1, :, :, first:] = k, v
        if first == 0:
            return core(q, k, v, *options)
        assert T == 1, "several tokens after cached ones would need a mask"
        shared = q.to(v.dtype).reshape(B, H_kv, -1, D)  # heads that share keys, as if they were tokens
        with sdpa_kernel(kernels.BACKENDS["flash"], set_priority=True):  # cuDNN makes a plan for each length
            y = F.scaled_dot_product_attention(shared, *kept)
        return y.reshape(B, 1, -1, D).transpose(1, 2)  # in memory (B, T, H, D), which fast GEMMs read


def assign(attributes):
    """Sets (vars(object), name, value); None: the object has none of its own, but its class's."""
    for values, name, value in attributes:
        values[name] = value
        if value is None:
            del values[name]
