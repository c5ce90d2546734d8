"""Continues text with a model, token by token; a KV cache holds keys and values of earlier ones.

The cache goes around attn.core, as scale/ does, for the time of a forward: the model's own code
runs, told the positions of the new tokens, and is as it was between two steps. Before its first
token it proves itself on a narrow copy of the model, or is left out. On a GPU the model's part of a
step is one CUDA graph.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

import model as models
from fast import forms
from kernels import BACKENDS
from run.pack import add_noise
from scale import context_parallel, generators, parallel
from scale.cuda_graph import waits
from system.errors import UserError, warn

TRIAL_TOKENS = 64  # on which a KV cache proves itself
MARKS = 8  # channels of a key that say whether there is one: as many as flash attention pads to
NO_KEY = -1e4  # in these channels: the softmax of such a key is zero


def texts(model, tokenizer, prompt, n, **options):
    """n strings that continue `prompt`, and include it; each ends at the end of its document.

    options: of `steps`.
    """
    shown = tokenizer.encode(prompt)
    row = [tokenizer.eot, *shown]
    ids = torch.tensor([row] * n, device=parallel.device_of(model))
    columns = steps(model, ids, cache=make_cache(model, tokenizer.eot), **options)
    found = []
    for row in zip(*columns):
        new = itertools.takewhile(lambda i: i not in tokenizer.ends, row)
        found.append(tokenizer.decode([*shown, *new]))
    return found


def continued(model, tokenizer, ids, *options):
    """Yields the ids that continue the list `ids` up to the end of its text.

    options: of `steps`. With parallel=fsdp a rank whose text has ended goes on computing, since the
    others' forwards gather its weights.
    """
    columns = steps(model, torch.tensor([ids], device=parallel.device_of(model)), *options)
    for (new,) in columns:
        if new in tokenizer.ends:
            break
        yield new
    if parallel.units(model):
        for _ in columns:
            pass


@torch.no_grad()
def steps(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cache=None):
    """Yields the next ids of the rows of ids (B, T) int64, a list of B, max_new_tokens times.

    cache: a KVCache of the model. Beyond block_size tokens, or without it, a step computes the last
    block_size tokens.
    """
    limit = model.cfg.block_size
    generator = torch.Generator(ids.device).manual_seed(seed)
    if cache and ids.size(1) <= limit:
        cache.prefill(ids[:, :-1], room=min(ids.size(1) + max_new_tokens, limit))
    before = None
    for _ in range(max_new_tokens):
        T = ids.size(1)
        if cache and T <= limit:
            logits = cache.step(ids[:, -1], T - 1)
        else:
            n = min(T, limit)
            width = min(limit, math.ceil(n / 64) * 64)  # an edit may merge two or four tokens
            window = F.pad(ids[:, -n:], (0, width - n))  # of whose zeros causal attention sees none
            with torch.compiler.set_stance("force_eager"):
                last = torch.tensor([n - 1], device=ids.device)
                logits = model.logits(window, last)[:, 0]  # (B, V)
        if before is None and logits.isnan().any():  # at first only, since the host waits for it
            raise UserError("the logits are NaN: the weights are not finite, or overflow")
        new = draw_token(logits, temperature, top_k, generator)
        ids = torch.cat((ids, new[:, None]), 1)
        new = parallel.Later(new)
        if before:  # a GPU has begun this step when the host waits for the one before
            yield before.get()
        before = new
    if before:
        yield before.get()


def draw_token(logits, temperature, top_k, generator):
    """Samples one id a row from logits (B, V) -> (B,).

    Each id has noise of its own (the Gumbel-max trick), so that rounding hardly changes what is
    drawn. The host waits for nothing, as it does in torch.multinomial.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if top_k and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits / temperature - noise).argmax(-1)


def make_cache(model, separator):
    """A KVCache; None, with a warning, where it does not hold for this model.py.

    separator: an id that is among those of the trial, since an edit may count from it on.
    """
    if why := objection(model, separator):
        return without("a KV cache", why)
    return KVCache(model)


@functools.lru_cache(1)  # of the last model: it is tried once
@torch.no_grad()
def objection(model, separator):
    """Why no cache holds for a model, or None.

    A narrow copy on the CPU, in float32 and with random weights, has to have the same logits with
    a cache as without.
    """
    cfg = dataclasses.replace(model.cfg.narrow(), attention="math", dropout=0.0)
    T = min(cfg.block_size, TRIAL_TOKENS)
    first = T // 2
    try:
        KVCache(model)
        with generators.preserved(parallel.device_of(model)), torch.autocast("cpu", enabled=False):
            small = models.build(cfg, torch.device("cpu"), seed=0).eval()
            add_noise(small)
            ids = torch.randint(cfg.vocab_size, (1, T))
            ids[:, ::5] = separator
            expected = small.logits(ids)[0, first:]
            cache = KVCache(small)
            cache.prefill(ids[:, :first], room=T)
            found = torch.cat([cache.step(ids[:, t], t) for t in range(first, T)])
            mixes = context_parallel.mixes_elsewhere(small, separator)  # it replaces the cores
    except Exception as error:  # of any type: an edit's
        return f"{type(error).__name__}: {error}"
    close = (found - expected).std() < 1e-4 * expected.std()  # rounding makes 1e-6
    if mixes or not close:
        return "model.py mixes tokens outside of attn.core"


@functools.cache  # once for each reason
def without(what, reason):
    warn(f"{reason}; sampling goes without {what}, more slowly")


class KVCache:
    """The keys and values of some rows' tokens, and a step that computes the next logits with them.

    Raises UserError for an attn.core that it does not suit. It needs torch.no_grad, one autocast
    context, and context_parallel.whole_rows.
    """

    def __init__(self, model):
        if "attention" in forms.edits:  # what is computed here is the attention of kernels.py
            raise UserError(forms.edits["attention"])
        self.model = model
        self.attentions = context_parallel.attentions(model, "a KV cache")
        self.ids = torch.empty(0, 1)  # (B, 1), what a step reads
        self.room = 0  # tokens

    def prefill(self, ids, room):
        """Forgets what it holds, and computes the keys and values of ids (B, T).

        room: of how many tokens at least.
        """
        B, T = ids.shape
        if B != len(self.ids) or room > self.room:
            # a power of two, so that the next text finds room, and the graph, too
            self.room = min(1 << (room - 1).bit_length(), self.model.cfg.block_size)
            self.ids = ids.new_zeros(B, 1)
            self.position = ids.new_zeros(1)
            self.kept = []  # (2, B, H_kv, room, D + MARKS) for each call of an attention
            self.graph = None
            # FSDP2's collectives are in no graph
            if ids.is_cuda and not parallel.units(self.model):
                self.capture()
        for kept in self.kept:
            kept[0, ..., -MARKS:] = NO_KEY
        if T > 0:
            self.forward(ids, torch.arange(T, device=ids.device))

    def capture(self):
        """Makes a step one CUDA graph, unless it waits for the GPU, as with .item()."""
        # it is launched first, which compiles and allocates all
        if why := waits(self.forward, self.ids, self.position):
            return without("a CUDA graph", why)
        self.graph = torch.cuda.CUDAGraph()
        # not "global", since a run has other threads
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = self.forward(self.ids, self.position)

    def step(self, ids, position):
        """The logits (B, V) behind ids (B,) at a position; the next step may overwrite them."""
        self.ids.copy_(ids[:, None])
        self.position.fill_(position)
        if self.graph is None:
            return self.forward(self.ids, self.position)
        self.graph.replay()
        return self.logits

    def forward(self, ids, positions):
        """(B, T) ids at positions (T,) -> the logits behind the last, (B, V)."""
        self.calls = 0  # of attentions; a block may be used several times
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self.attentions:
                core = functools.partial(self.attend, positions, module.core)
                stack.enter_context(mock.patch.object(module, "core", core))  # until the end of it
            return self.model.logits(ids, slice(-1, None), positions)[:, 0]

    def attend(self, positions, core, q, k, v, *options, **named):
        """attn.core for tokens at `positions`; q: (B, H, T, D); k, v: (B, H_kv, T, D) -> as q."""
        B, H_kv, T, D = v.shape
        if self.calls == len(self.kept):
            self.kept.append(v.new_zeros(2, B, H_kv, self.room, D + MARKS))
            self.kept[-1][0, ..., D:] = NO_KEY
        keys, values = self.kept[self.calls]
        self.calls += 1
        keys.index_copy_(2, positions, F.pad(k.to(v.dtype), (0, MARKS)))
        values[..., :D].index_copy_(2, positions, v)
        if T > 1:  # a prompt, with nothing before it
            return core(q, k, v, *options, **named)
        # a query's marks are ones, so that a key that is not there has no share: attention needs no
        # mask, which flash attention does not take
        q = F.pad(q.to(v.dtype), (0, MARKS), value=1.0)
        q = q.unflatten(1, (H_kv, -1)).squeeze(3)  # (B, H_kv, H / H_kv, D + MARKS)
        with sdpa_kernel(BACKENDS["flash"], set_priority=True):
            y = F.scaled_dot_product_attention(q, keys, values, scale=D**-0.5)
        return y[..., :D].flatten(1, 2).unsqueeze(2)
