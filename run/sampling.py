"""Continues text with a model, token by token; a KV cache holds keys and values of earlier ones.

The cache goes around attn.core, as scale/ does, and proves itself on the model as it is, or is left
out; the model's own forward runs, told the positions of the new tokens, not compiled, on a GPU as
one CUDA graph a token. Between two steps the model is as it was.
"""

import contextlib
import functools
import itertools
import math
import time
from collections import Counter

import torch
import torch.nn.functional as F

from fast import forms
from scale import context_parallel, parallel
from scale.cuda_graph import waits
from system.errors import UserError, say, warn

TRIAL_TOKENS = 512  # of the trial in which a KV cache proves itself


def texts(model, tokenizer, prompt, n, max_new_tokens, temperature, top_k, seed):
    """n strings that continue `prompt`, and include it; each ends at the end of its document."""
    ids = torch.tensor(
        [[tokenizer.eot, *tokenizer.encode(prompt)]] * n, device=parallel.device_of(model)
    )
    found = []
    for row in generate(model, ids, max_new_tokens, temperature, top_k, seed)[:, 1:].tolist():
        found.append(tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.ends, row)))
    return found


class Printer:
    """Prints texts as a model writes them, by a sample.Config; counts tokens and seconds.

    quiet: prints nothing. It needs the autocast context of the run, also to be made.
    """

    def __init__(self, model, tokenizer, cfg, quiet=False):
        self.model, self.tokenizer, self.cfg, self.quiet = model, tokenizer, cfg, quiet
        self.device = parallel.device_of(model)
        self.ends = tokenizer.ends if cfg.stop else ()
        self.cache = None  # one for all texts, which may begin alike
        if cfg.cache:
            separator = torch.tensor([tokenizer.eot], device=self.device)
            self.cache = make_cache(model, separator, cfg.temperature, cfg.top_k)
        self.tokens = 0
        self.seconds = 0.0

    def __call__(self, ids, seed, shown=(), wanted=True):
        """Prints the text of the ids `shown` and of those that continue the list `ids`; returns it.

        A divided model's ranks go on together, also those whose text is not `wanted`.
        """
        began = time.perf_counter()
        shown = list(shown)
        text = self.tokenizer.decode(shown)
        self.show(text)
        for piece in pieces(self.tokenizer.decode, shown, self.new_ids(ids, seed, wanted)):
            self.show(piece)
            text += piece
        self.show("\n")
        self.seconds += time.perf_counter() - began
        return text

    def show(self, text):
        if not self.quiet:
            say(text, end="")

    def new_ids(self, ids, seed, wanted):
        divided = bool(parallel.units(self.model))
        if not wanted and not divided:
            return
        cfg = self.cfg
        idx = torch.tensor([ids], device=self.device)
        options = dict(
            max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature, top_k=cfg.top_k
        )
        for new in steps(self.model, idx, seed=seed, cached=self.cache, **options):
            wanted = wanted and new.item() not in self.ends
            if wanted:
                self.tokens += 1
                yield new.item()
            going_on = wanted
            if divided:
                going_on = parallel.sum_over_ranks(idx.new_tensor(int(wanted)))
            if not going_on:
                return


def pieces(decode, before, ids):
    """Yields the text of the ids that follow the list `before`.

    An incomplete character waits for its rest. The piece before is decoded again with each new one:
    some tokenizers drop the space that begins a text.
    """
    new = []
    for i in ids:
        new.append(i)
        text = decode(before + new)[len(decode(before)) :]
        if not text.endswith("\ufffd"):
            yield text
            before = new
            new = []
    if new:
        yield text


def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True):
    """Continues each row of ids (B, T) int64 by max_new_tokens; returns (B, T + max_new_tokens)."""
    columns = [ids]
    for new in steps(model, ids, max_new_tokens, temperature, top_k, seed, cached):
        columns.append(new[:, None].to(ids.device))
    return torch.cat(columns, 1)


@torch.no_grad()
def steps(
    model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True, lengths=None
):
    """Yields the next id of each row of ids (B, T) int64, (B,), max_new_tokens times.

    cached: True, False, or a KVCache. lengths: (B,) int64, of the rows in ids; None: all T. The
    first step is then behind the shortest row, and yields of the longer ones their own ids, until
    their ends.

    Beyond block_size tokens, or without a KV cache, a step computes the last block_size tokens in a
    window of one width: a compiled model sees one shape, and causal attention does not see the
    zeros on its right.
    """
    B, T = ids.shape
    limit = model.cfg.block_size
    total = T + max_new_tokens
    known = T if lengths is None else int(lengths.min())  # tokens of the shortest row
    generator = torch.Generator(ids.device).manual_seed(seed)
    if T > limit:  # which no cache holds
        cached = False
    if cached is True:
        cached = make_cache(model, ids[0], temperature, top_k, rows=B)
    if cached:
        yield from cached.steps(ids, known, min(total, limit + 1), seed, lengths)
        ids = cached.ids[:, :total]
        known = ids.size(1)
        generator = cached.generator
    width = min(limit, math.ceil(total / 64) * 64)
    buffer = F.pad(ids, (0, max(total, width) - ids.size(1)))
    for end in range(known, total):
        begin = max(0, end - width)
        last = torch.tensor([end - begin - 1], device=ids.device)
        logits = model.logits(buffer[:, begin : begin + width], last)[:, 0]  # (B, V)
        new = draw_token(logits, temperature, top_k, generator)
        if lengths is not None:
            new = torch.where(end < lengths, buffer[:, end], new)
        buffer[:, end] = new
        yield new


def draw_token(logits, temperature, top_k, generator):
    """Samples one id a row from logits (B, V) -> (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    # the largest becomes 0, so that a tiny temperature does not overflow
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    shares = logits.softmax(-1)
    # as torch.multinomial draws, which would make the host wait
    noise = torch.empty_like(shares).exponential_(generator=generator)
    return ids.gather(1, (shares / noise).argmax(-1, keepdim=True)).squeeze(1)


@torch.no_grad()
def make_cache(model, ids, temperature=0, top_k=None, rows=1):
    """A KVCache; None, with a warning, for an edited model that it does not suit.

    ids: (T,), of a prompt. In a trial the logits of random ids are computed in three pieces, as a
    cache does, and as a whole.
    """
    idx = trial_ids(model.cfg, ids)
    T = idx.size(1)
    positions = torch.arange(T, device=idx.device)
    found = []
    try:
        trial = KVCache(model, 1)
        trial.make_room(T)
        with torch.compiler.set_stance("force_eager"):
            expected = model.logits(idx)
        for begin, end in itertools.pairwise((0, T // 2, T - 1, T)):
            trial.length = begin
            found.append(trial.forward(idx[:, begin:end], positions[begin:end], slice(None)))
    except Exception as error:  # of any type: an edit's
        reason = str(error).partition("\n")[0]
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}"
        return without("a KV cache", reason)
    # where a cache suits, the ratio below is 0.02 in bf16, 1e-6 in float32
    most = 0.1 if torch.is_autocast_enabled(idx.device.type) else 0.005
    if not (torch.cat(found, 1) - expected).std() <= most * expected.std():
        return without("a KV cache", "model.py mixes tokens outside of attn.core")
    graph = False
    if idx.is_cuda and not parallel.units(model):  # FSDP2's collectives are in no graph
        why = waits(trial.forward, idx[:, -1:], positions[-1:])
        graph = not why
        if why:
            without("a CUDA graph", why)
    return KVCache(model, rows, graph, temperature, top_k)


def trial_ids(cfg, prompt):
    """(1, T) random ids for a trial.

    The first id of the prompt, perhaps a separator, comes in between.
    """
    T = min(cfg.block_size, TRIAL_TOKENS)
    ids = torch.randint(cfg.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))
    ids[:, ::10] = prompt[0].item()
    return ids.to(prompt.device)


@functools.cache  # once for each reason
def without(what, reason):
    warn(f"{reason}; sampling goes without {what}, more slowly")


class KVCache:
    """The ids of some rows, their keys and values, and the step that draws the next ids.

    Raises UserError for an attn.core that it does not suit. It needs torch.no_grad, one autocast
    context, and context_parallel.whole_rows.
    """

    def __init__(self, model, rows, use_graph=False, temperature=0, top_k=None):
        """use_graph: a CUDA graph for a step."""
        if "attention" in forms.edits:  # what is computed here is the attention of kernels.py
            raise UserError(forms.edits["attention"])
        device = parallel.device_of(model)
        self.model, self.use_graph = model, use_graph
        self.temperature, self.top_k = temperature, top_k
        self.attentions = context_parallel.attentions(model, "a KV cache")
        self.keys_values = {}  # {call_of an attention: (2, B, H_kv, size, D)}
        self.calls = Counter()  # of modules in the forward under way
        self.length = 0  # tokens whose keys and values are there
        self.size = 0  # tokens that have room
        self.ids = torch.zeros(rows, model.cfg.block_size + 1, dtype=torch.long, device=device)
        self.lengths = None  # of the rows in a prompt, see `steps`
        self.places = torch.arange(model.cfg.block_size, device=device)
        self.position = self.ids.new_zeros(1)  # of the token that a step reads
        self.generator = torch.Generator(device)
        self.graph = None

    def steps(self, ids, known, end, seed, lengths=None):
        """Yields the ids after the first `known` of ids (B, T), up to `end`.

        If ids is on a GPU, they come on the host. lengths: of the rows, see `steps` of this file;
        None: all are as long as `known`.
        """
        last = known - 1  # the token that the first step reads, to draw the one behind it
        if lengths is not self.lengths:
            self.lengths = lengths
            self.graph = None  # it was captured with those before
        # of the text before, what this one begins with stays; so compare first, then overwrite
        self.length = self.tokens_alike(ids[:, :last])
        self.ids[:, : ids.size(1)] = ids
        self.prefill(last, room=end - 1)
        self.position.fill_(last)
        self.generator.manual_seed(seed)
        drawn = (self.step() for _ in range(known, end))
        if ids.is_cuda:
            drawn = on_host(drawn)
        yield from drawn

    def tokens_alike(self, ids):
        """How many first tokens of ids (B, T) have their keys and values here."""
        T = min(self.length, ids.size(1))
        same = (self.ids[:, :T] == ids[:, :T]).all(0)  # (T,)
        return int(same.cumprod(0).sum())

    def prefill(self, end, room):
        """Computes the keys and values that the tokens before `end` lack; makes room for `room`.

        It takes a multiple of 32 tokens, so that there are few shapes. What is too much, the steps
        overwrite before they read it.
        """
        begin = self.length
        width = math.ceil((end - begin) / 32) * 32
        stop = min(begin + width, self.model.cfg.block_size)
        self.make_room(max(stop, room))
        if begin < end:
            self.forward(self.ids[:, begin:stop], self.places[begin:stop])
        self.length = end

    def make_room(self, tokens):
        """Makes room for so many tokens, or up to twice as many.

        A text that grows then takes few new graphs.
        """
        if tokens > self.size:
            self.size = min(1 << (tokens - 1).bit_length(), self.model.cfg.block_size)
            self.graph = None
            for call, kept in self.keys_values.items():
                self.keys_values[call] = F.pad(kept, (0, 0, 0, self.size - kept.size(3)))

    def step(self):
        """The next ids, (B,).

        Before the graph is captured, a step runs as it is, which compiles all.
        """
        if self.graph:
            self.graph.replay()
        else:
            self.decode_token()
            if self.use_graph:
                self.graph = torch.cuda.CUDAGraph()
                self.graph.register_generator_state(self.generator)
                # not "global", since a run has other threads
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.decode_token()
        self.length += 1
        return self.ids[:, self.length]

    def decode_token(self):
        """Draws the ids behind those at `position`, and writes them into `ids`."""
        logits = self.forward(self.ids.index_select(1, self.position), self.position)
        self.position += 1
        new = draw_token(logits[:, 0], self.temperature, self.top_k, self.generator)[:, None]
        if self.lengths is not None:
            given = self.ids.index_select(1, self.position)
            new = torch.where(self.position < self.lengths[:, None], given, new)
        self.ids.index_copy_(1, self.position, new)

    def forward(self, idx, positions, of=slice(-1, None)):
        """(B, T) ids at positions (T,), behind the cached -> logits `of` some, (B, n, V)."""
        self.calls.clear()
        with self.in_place_of_cores(positions), torch.compiler.set_stance("force_eager"):
            return self.model.logits(idx, of, positions)

    @contextlib.contextmanager
    def in_place_of_cores(self, positions):
        """Within it, `attend` stands for each attn.core."""
        before = [vars(module).get("core") for module in self.attentions]
        for module in self.attentions:
            module.core = functools.partial(self.attend, positions, module, module.core)
        try:
            yield
        finally:
            for module, core in zip(self.attentions, before):
                if core is None:  # it was its class's
                    del module.core
                else:
                    module.core = core

    def call_of(self, module):
        """(module, its how many-eth call in this forward): a block may be used several times."""
        self.calls[module] += 1
        return module, self.calls[module]

    def attend(self, positions, module, core, q, k, v, *options, **named):
        """attn.core for tokens at `positions`; q: (B, H, T, D); k, v: (B, H_kv, T, D) -> as q."""
        B, H_kv, T, D = v.shape
        call = self.call_of(module)
        if call not in self.keys_values:  # zeros, since the mask does not hide NaN in values
            self.keys_values[call] = v.new_zeros(2, B, H_kv, self.size, D)
        kept = self.keys_values[call]
        q, k = q.to(v.dtype), k.to(v.dtype)
        if T == 1 and q.device.type in forms.enabled:
            from fast import decode  # which needs Triton

            return decode.attention(q, k, v, kept, positions)
        kept.index_copy_(3, positions, torch.stack((k, v)))
        if T > 1 and self.length == 0:
            return core(q, k, v, *options, **named)
        # repeated, since few kernels take both groups and a mask
        keys, values = kept.repeat_interleave(q.size(1) // H_kv, dim=2)
        seen = self.places[: self.size] <= positions[:, None]
        return F.scaled_dot_product_attention(q, keys, values, seen)


def on_host(steps):
    """Yields the ids of each step on the host; a GPU has then begun the next one."""
    before = None
    for ids in steps:
        copied = parallel.Later(ids)
        if before:
            yield torch.tensor(before.get())
        before = copied
    if before:
        yield torch.tensor(before.get())
