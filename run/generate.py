"""Continues text with a model, token by token."""

import itertools

import torch

from scale import parallel


def texts(model, tokenizer, prompt, n, max_new_tokens, temperature, top_k, seed):
    """n strings that continue `prompt`, which they include; each ends at the end of its document."""
    device = parallel.device_of(model)
    ids = torch.tensor([[tokenizer.eot, *tokenizer.encode(prompt)]] * n, device=device)
    rows = generate(model, ids, max_new_tokens, temperature, top_k, seed)[:, 1:].tolist()
    return [tokenizer.decode(itertools.takewhile(lambda i: i not in tokenizer.ends, row)) for row in rows]


def generate(model, ids, max_new_tokens, temperature=1.0, top_k=None, seed=0):
    """Continues each row of ids (B, T) int64 by max_new_tokens; returns (B, T + max_new_tokens).

    The window has one width throughout, so that a compiled model sees a single shape; causal attention does not see the
    zeros on its right. Beyond block_size the context is the last block_size tokens. The generator is not training's.
    """
    generator = torch.Generator(ids.device).manual_seed(seed)
    B, T = ids.shape
    total = T + max_new_tokens
    width = min(model.cfg.block_size, -(-total // 64) * 64)
    buffer = torch.zeros(B, max(total, width), dtype=torch.long, device=ids.device)
    buffer[:, :T] = ids
    with torch.no_grad():
        for end in range(T, total):
            begin = max(0, end - width)
            at = torch.tensor([end - begin - 1], device=ids.device)
            logits = model.logits(buffer[:, begin : begin + width], at)[:, 0]  # (B, V)
            buffer[:, end] = pick(logits, temperature, top_k, generator)
    return buffer[:, :total]


def pick(logits, temperature, top_k, generator):
    """One id a row from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is None:
        return logits.softmax(-1).multinomial(1, generator=generator).squeeze(1)
    logits, ids = logits.topk(min(top_k, logits.size(-1)))
    return ids.gather(1, logits.softmax(-1).multinomial(1, generator=generator)).squeeze(1)
