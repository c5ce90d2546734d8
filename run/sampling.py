"""Continues text with a model, token by token."""

import itertools
import time

import torch

from run import cache
from scale import parallel


def texts(model, tokenizer, prompt, n, max_new_tokens, temperature, top_k, seed):
    """n strings that continue `prompt`, which they include; each ends at the end of its document."""
    device = parallel.device_of(model)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(prompt)]] * n, device=device)
    rows = generate(model, ids, max_new_tokens, temperature, top_k, seed)[:, 1:].tolist()
    return [tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.ends, row)) for row in rows]


class Printer:
    """Prints text as it is generated; `tokens` and `seconds`: how many, and how long it took, in all calls."""

    def __init__(self, model, tokenizer, stop, *options, cached=True, quiet=False):
        """stop: whether to end where the model ends its text. options, cached: of `steps`, up to top_k.

        quiet: nothing is printed, the text is returned alone.
        """
        self.model, self.tokenizer, self.stop, self.options, self.quiet = (
            model,
            tokenizer,
            stop,
            options,
            quiet,
        )
        self.cached, self.tokens, self.seconds = cached, 0, 0.0
        self.in_step = bool(parallel.units(model))  # the forwards of a sharded model need all ranks

    def __call__(self, ids, seed, shown=()):
        """Prints the text of `shown` and of what continues `ids`, both lists of ids; returns it."""
        began, text = time.perf_counter(), ""
        for piece in pieces(self.tokenizer.decode, itertools.chain([list(shown)], self.continued(ids, seed))):
            print("" if self.quiet else piece, end="", flush=True)
            text += piece
        print(end="" if self.quiet else "\n")
        self.seconds += time.perf_counter() - began
        return text

    def attend(self, ids):
        """Joins the forwards of a sharded model while other ranks generate; this rank has no text of its own."""
        for _ in self.continued(ids, 0, ended=True) if self.in_step else ():
            pass

    def continued(self, ids, seed, ended=False):
        """Yields the new ids in lists. With a sharded model all ranks call it, and go on until the last text ends."""
        idx = torch.tensor([ids], device=parallel.device_of(self.model))
        for new in steps(self.model, idx, *self.options, seed, self.cached):
            self.tokens += not ended
            ended = ended or self.stop and new.item() in self.tokenizer.ends
            others = self.in_step and parallel.sum_over_ranks(new.new_tensor(int(not ended)))
            if ended and not others:
                return
            if not ended:
                yield new.tolist()


def pieces(decode, rows):
    """The text of lists of ids, which come one after another, in pieces; an incomplete character waits for its rest.

    The piece before is decoded again with each new one, since some tokenizers drop the space at the start of a text.
    """
    before, new = [], []
    for ids in rows:
        new = new + ids
        text = decode(before + new)[len(decode(before)) :]
        if not text.endswith("\ufffd"):
            yield text
            before, new = new, []
    yield decode(before + new)[len(decode(before)) :]


def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True):
    """Continues each row of ids (B, T) int64 by max_new_tokens; returns (B, T + max_new_tokens)."""
    new = steps(model, ids, max_new_tokens, temperature, top_k, seed, cached)
    return torch.cat([ids, *(row[:, None] for row in new)], 1)


@torch.no_grad()
def steps(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0, cached=True):
    """Yields the next id of each row of ids (B, T) int64, (B,), max_new_tokens times.

    Up to block_size tokens a KV cache is used, unless the model is edited so that it gives other logits. Beyond, and
    without it, every step computes the whole context: the last block_size tokens. That window has one width throughout,
    so that a compiled model sees a single shape; causal attention does not see the zeros on its right. The generator is
    not training's.
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    B, T = ids.shape
    total = T + max_new_tokens
    width = min(model.cfg.block_size, -(-total // 64) * 64)
    buffer = torch.zeros(B, max(total, width), dtype=torch.long, device=ids.device)
    buffer[:, :T] = ids
    kept = cache.make(model, width) if cached and width > 1 else None
    for end in range(T, total):
        if kept and end <= width:
            logits = kept.logits(buffer[:, kept.length : end])
        else:
            begin = max(0, end - width)
            at = torch.tensor([end - begin - 1], device=ids.device)
            logits = model.logits(buffer[:, begin : begin + width], at)[:, 0]  # (B, V)
        buffer[:, end] = pick(logits, temperature, top_k, generator)
        yield buffer[:, end]


def pick(logits, temperature, top_k, generator):
    """One id a row from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # so that a tiny one does not overflow
    if top_k is None:
        return logits.softmax(-1).multinomial(1, generator=generator).squeeze(1)
    logits, ids = logits.topk(min(top_k, logits.size(-1)))
    return ids.gather(1, logits.softmax(-1).multinomial(1, generator=generator)).squeeze(1)
