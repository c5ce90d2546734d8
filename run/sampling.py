"""Continues text with a model, token by token, with a KV cache: keys and values of earlier tokens are kept.

The cache goes around attn.core, as scale/ does, and proves itself on the model as it is, or is left out; the
model's own forward runs, told the positions of the new tokens, not compiled, on a GPU as one CUDA graph a
token. Between two steps the model is as it was.
"""

import contextlib
import functools
import itertools
import time
from collections import Counter

import torch
import torch.nn.functional as F

import configurator
from fast import forms
from scale import context_parallel, parallel
from scale.cuda_graph import waits

TRIAL_TOKENS = 512  # of the trial in which a cache proves itself


def texts(model, tokenizer, prompt, n, max_new_tokens, temperature, top_k, seed):
    """n strings that continue `prompt`, which they include; each ends at the end of its document."""
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(prompt)]] * n, device=parallel.device_of(model))
    rows = generate(model, ids, max_new_tokens, temperature, top_k, seed)[:, 1:].tolist()
    return [tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.ends, row)) for row in rows]


class Printer:
    """Prints text as it comes, unless quiet, up to an id of `ends`; adds up `tokens` and `seconds`."""

    def __init__(self, model, tokenizer, ends, quiet=False, **options):  # of `steps`
        self.model, self.tokenizer, self.ends, self.quiet = model, tokenizer, ends, quiet
        self.options, self.tokens, self.seconds = options, 0, 0.0

    def __call__(self, ids, seed, shown=(), wanted=True):
        """Prints the text of `shown` and of what continues `ids`, both lists of ids; returns it."""
        began, text = time.perf_counter(), ""
        for piece in pieces(self.tokenizer.decode, shown, self.continued(ids, seed, wanted)):
            self.show(piece)
            text += piece
        self.show("\n")
        self.seconds += time.perf_counter() - began
        return text

    def show(self, text):
        if not self.quiet:
            configurator.say(text, end="")

    def continued(self, ids, seed, wanted):
        """Yields the new ids. A sharded model's ranks, also those without a `wanted` text, go on together."""
        idx = torch.tensor([ids], device=parallel.device_of(self.model))
        in_step = bool(parallel.units(self.model))
        if self.options["cached"] is True:  # one for all texts, which may begin alike
            self.options["cached"] = make_cache(self.model, idx[0], **self.options)
        for new in steps(self.model, idx, seed=seed, **self.options) if wanted or in_step else ():
            wanted = wanted and new.item() not in self.ends
            if not (parallel.sum_over_ranks(idx.new_tensor(int(wanted))) if in_step else wanted):
                return
            if wanted:
                self.tokens += 1
                yield new.item()


def pieces(decode, shown, ids):
    """The text of the list `shown` and of the ids that follow; an incomplete character waits for its rest.

    The piece before is decoded again with each new one: some tokenizers drop the space that begins a text.
    """
    before, new, text = [], [], ""
    for more in itertools.chain([list(shown)], ([i] for i in ids)):
        new = new + more
        text = decode(before + new)[len(decode(before)) :]
        if not text.endswith("\ufffd"):
            yield text
            before, new, text = new, [], ""
    yield text


def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True):
    """Continues each row of ids (B, T) int64 by max_new_tokens; returns (B, T + max_new_tokens)."""
    new = list(steps(model, ids, max_new_tokens, temperature, top_k, seed, cached))
    return torch.cat([ids, *(row[:, None].to(ids.device) for row in new)], 1)


@torch.no_grad()
def steps(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True, lengths=None):
    """Yields the next id of each row of ids (B, T) int64, (B,), max_new_tokens times. cached: or a Cache.

    lengths: (B,) int64, of the rows in ids; None: all T. The first step is then behind the shortest row, and
    yields of the longer ones their own ids, until their ends.

    Beyond block_size tokens, or without a KV cache, a step computes the last block_size tokens in a window of
    one width: a compiled model sees one shape, and causal attention does not see the zeros on its right.
    """
    (B, T), limit, total = ids.shape, model.cfg.block_size, ids.size(1) + max_new_tokens
    known = T if lengths is None else int(lengths.min())
    generator = torch.Generator(ids.device).manual_seed(seed)
    cache = make_cache(model, ids[0], temperature, top_k, B) if cached is True else cached
    if cache and T <= limit:
        yield from cache.steps(ids, min(total, limit + 1), seed, lengths)
        ids, generator = cache.ids[:, :total], cache.generator
        known = ids.size(1)
    width = min(limit, -(-total // 64) * 64)
    buffer = F.pad(ids, (0, max(total, width) - ids.size(1)))
    for end in range(known, total):
        begin = max(0, end - width)
        at = torch.tensor([end - begin - 1], device=ids.device)
        logits = model.logits(buffer[:, begin : begin + width], at)[:, 0]  # (B, V)
        new = pick(logits, temperature, top_k, generator)
        buffer[:, end] = new if lengths is None else torch.where(end < lengths, buffer[:, end], new)
        yield buffer[:, end]


def pick(logits, temperature, top_k, generator):
    """One id a row from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # so that a tiny one does not overflow
    logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    shares = logits.softmax(-1)
    noise = torch.empty_like(shares).exponential_(generator=generator)  # as multinomial, which would wait
    return ids.gather(1, (shares / noise).argmax(-1, keepdim=True)).squeeze(1)


@torch.no_grad()
def make_cache(model, ids, temperature=0, top_k=None, rows=1, **_):
    """A Cache; None, with a warning, for an edited model that it does not suit. ids: (T,), of a prompt."""
    idx = trial_ids(model.cfg, ids)
    T = idx.size(1)
    at = torch.arange(T, device=idx.device)
    found = []
    try:
        trial = Cache(model, 1)
        with torch.compiler.set_stance("force_eager"):
            expected = model.logits(idx)
        for piece in (slice(T // 2), slice(T // 2, T - 1), slice(T - 1, T)):
            trial.length = piece.start or 0
            found.append(trial.forward(idx[:, piece], at[piece], slice(None)))
    except configurator.UserError as error:
        return warn(str(error))
    except Exception as error:  # of any type: an edit's
        return warn(f"{type(error).__name__}: {error}".partition("\n")[0])
    most = 0.1 if torch.is_autocast_enabled(at.device.type) else 0.005  # in bf16 0.02, in float32 1e-6
    if not (torch.cat(found, 1) - expected).std() <= most * expected.std():
        return warn("model.py mixes tokens outside of attn.core")
    graph = at.is_cuda and not parallel.units(model)  # FSDP2's collectives are in no graph
    if graph:
        why = waits(trial.forward, idx[:, -1:], at[-1:])
        if why:
            graph = warn(why, "a CUDA graph")
    return Cache(model, rows, graph, temperature, top_k)


def trial_ids(cfg, prompt):
    """(1, T) random ids for a trial; the first of the prompt, perhaps a separator, comes in between."""
    draw = torch.Generator().manual_seed(0)
    T = min(cfg.block_size, TRIAL_TOKENS)
    ids = torch.randint(cfg.vocab_size, (1, T), generator=draw)
    ids[torch.rand(1, T, generator=draw) < 0.1] = prompt[0].item()
    return ids.to(prompt.device)


def put_core(module, core):
    """Sets an attention's own core; None: its class's again."""
    if core is None:
        del module.core
    else:
        module.core = core


@functools.cache
def warn(reason, without="a KV cache"):
    configurator.warn(f"{reason}; sampling goes without {without}, more slowly")


class Cache:
    """The ids of some rows, their keys and values, and the step that draws the next ids.

    Raises UserError for an attn.core that it does not suit. It needs torch.no_grad, one autocast context, and
    context_parallel.alone.
    """

    def __init__(self, model, rows, graphs=False, *options):  # of pick
        device = parallel.device_of(model)
        self.model, self.graphs, self.options = model, graphs, options
        if "attention" in forms.edits:  # of which this is a form
            raise configurator.UserError(forms.edits["attention"])
        self.attentions = context_parallel.attentions(model, "a KV cache")
        self.kept = {}  # {(attention, its how many-eth call in a forward): keys and values}
        self.calls = Counter()  # of attentions in the forward under way
        self.graph = self.lengths = None
        self.ids = torch.zeros(rows, model.cfg.block_size + 1, dtype=torch.long, device=device)
        self.places = torch.arange(model.cfg.block_size, device=device)
        self.at, self.generator = self.ids.new_zeros(1), torch.Generator(device)  # at: a step's position
        self.length = self.size = self.end = 0  # tokens that are kept, that have room, and that may come

    def steps(self, ids, end, seed, lengths=None):
        """Yields the ids after ids (B, T) up to `end` tokens; on the host if a GPU runs the next step."""
        last, self.end = (ids.size(1) if lengths is None else int(lengths.min())) - 1, end
        if lengths is not self.lengths:
            self.lengths, self.graph = lengths, None
        alike = (self.ids[:, : last + 1] == ids[:, : last + 1]).all(0).cumprod(0).sum()
        self.length = min(self.length, last, int(alike))
        self.ids[:, : ids.size(1)] = ids
        if self.length < last:  # in steps of 32, for few shapes; what is too much is overwritten
            stop = min(last + (self.length - last) % 32, self.model.cfg.block_size)
            self.forward(self.ids[:, self.length : stop], torch.arange(self.length, stop, device=ids.device))
        self.length = last
        self.at.fill_(last)
        self.generator.manual_seed(seed)
        new = (self.step() for _ in range(last + 1, end))
        if not ids.is_cuda:
            return (yield from new)
        copies = ((n.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()) for n in new)
        for (copy, event), _ in itertools.pairwise(itertools.chain(copies, [None])):
            event.synchronize()
            yield copy

    def step(self):
        """The next ids. Before the graph exists or has to grow, a step runs as it is, which compiles all."""
        if self.graph and self.length < self.size:
            self.graph.replay()
        else:
            self.draw()
            if self.graphs:
                self.graph = torch.cuda.CUDAGraph()
                self.graph.register_generator_state(self.generator)
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # a run has threads
                    self.draw()
        self.length += 1
        return self.ids[:, self.length]

    def draw(self):
        """Writes the ids behind those at position `at`."""
        logits = self.forward(self.ids.index_select(1, self.at), self.at)
        self.at += 1
        new = pick(logits[:, 0], *self.options, self.generator)[:, None]
        if self.lengths is not None:
            new = torch.where(self.at < self.lengths[:, None], self.ids.index_select(1, self.at), new)
        self.ids.index_copy_(1, self.at, new)

    def forward(self, idx, at, of=slice(-1, None)):
        """(B, T) ids at the positions at: (T,), after those in the cache -> logits `of` some, (B, n, V)."""
        limit, needed = self.model.cfg.block_size, self.length + idx.size(1)
        if needed > self.size:  # a power of two; 1024 at once, since growth takes a new graph
            size = 1 << (max(needed, min(self.end, 1024)) - 1).bit_length()
            self.size, self.graph = min(limit, size), None
        mask = functools.cache(lambda: 1e30 * (at[:, None] - self.places[: self.size]).clamp(-1, 0))
        attend = functools.partial(self.attend, at, mask)
        self.calls.clear()
        with contextlib.ExitStack() as after, torch.compiler.set_stance("force_eager"):
            for module in self.attentions:
                after.callback(put_core, module, vars(module).get("core"))
                put_core(module, functools.partial(attend, module, module.core))
            return self.model.logits(idx, of, positions=at)

    def attend(self, at, mask, module, core, q, k, v, *options):
        """attn.core for the tokens `at`, q: (B, H, T, D); k, v: (B, H_kv, T, D) -> as q."""
        B, H_kv, T, D = v.shape
        call = module, self.calls[module]  # a block may be used several times
        self.calls[module] += 1
        kept = self.kept.get(call, v.new_empty(2, B, H_kv, 0, D))
        if kept.size(3) < self.size:  # zeros, since the mask does not hide NaN in values
            kept = self.kept[call] = F.pad(kept, (0, 0, 0, self.size - kept.size(3)))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if T == 1 and q.device.type in forms.served:
            from fast import decode  # which needs Triton

            return decode.attention(q, k, v, kept, at)
        kept.index_copy_(3, at, torch.stack((k, v)))
        if T > 1 and not self.length:
            return core(q, k, v, *options)
        keys, values = kept.repeat_interleave(q.size(1) // H_kv, dim=2)  # few kernels take groups and a mask
        return F.scaled_dot_product_attention(q, keys, values, mask().to(q.dtype))
