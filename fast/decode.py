"""Attention of one query in each row to a KV cache, for sampling.

The keys are split in parts, since rows and heads alone do not fill a GPU. Each part has a softmax
and the logarithm of its sum, by which the results are joined, as in
https://pytorch.org/blog/flash-decoding.
"""

import torch
import triton
import triton.language as tl

from fast.operators import INTERPRETED, cdiv, power_of_2

PART = 64  # keys of a program
JOINED = 64  # parts that are added up at a time


def attention(q, k, v, cache, at):
    """Causal attention of one token, whose key and value it writes into the cache -> as q.

    q: (B, H, 1, D); k, v: (B, H_kv, 1, D); cache: keys and values, (2, B, H_kv, L, D);
    at: (1,) int64, the token's position.
    """
    B, H, _, D = q.shape
    _, _, H_kv, L, _ = cache.shape
    parts = cdiv(L, PART)
    partial = q.new_empty(B * H, parts, D, dtype=torch.float32)
    log_sums = q.new_empty(B * H, parts, dtype=torch.float32)
    q = q.contiguous()
    y = torch.empty_like(q)
    sizes = dict(D=D, COLS=max(16, power_of_2(D)))
    _attend[(B * H_kv, parts)](
        q, k.contiguous(), v.contiguous(), *cache, at, partial, log_sums, L, parts, D**-0.5,
        H=H // H_kv, PART=PART, ROWS=max(16, power_of_2(H)), **sizes,
    )  # fmt: skip
    _join[(B * H,)](partial, log_sums, y, parts, PARTS=power_of_2(parts), JOINED=JOINED, **sizes)
    return y


@triton.jit
def _attend(
    q, k, v, keys, values, at, partial, log_sums, L, parts, scale,
    H: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program: the H queries that share keys, and PART of these."""
    group = tl.program_id(0)
    part = tl.program_id(1)
    last = tl.load(at)
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    first = part * PART
    inside = cols < D
    head = group * H + rows
    if first > last:
        tl.store(log_sums + head * parts + part, -1e30, mask=rows < H)
        return
    t = first + tl.arange(0, PART)[:, None]
    across = first + tl.arange(0, PART)[None, :]
    here = (tl.cast(group, tl.int64) * L + t) * D + cols
    new = (t == last) & inside
    old = (t < last) & inside
    key = tl.load(keys + here, mask=old, other=0.0)
    key = tl.where(new, tl.load(k + group * D + cols, mask=inside, other=0.0), key)
    value = tl.load(values + here, mask=old, other=0.0)
    value = tl.where(new, tl.load(v + group * D + cols, mask=inside, other=0.0), value)
    tl.store(keys + here, key, mask=new)
    tl.store(values + here, value, mask=new)
    x = tl.load(q + head * D + cols, mask=(rows < H) & inside, other=0.0)
    dtype: tl.constexpr = tl.float32 if INTERPRETED else value.dtype  # its tl.dot takes no bf16
    scores = tl.dot(x.to(dtype), tl.trans(key.to(dtype)), input_precision="ieee") * scale
    scores = tl.where(across <= last, scores, -1e30)
    top = tl.max(scores, 1)[:, None]
    shares = tl.exp(scores - top)
    total = tl.sum(shares, 1)[:, None]
    y = tl.dot(shares.to(dtype), value.to(dtype), input_precision="ieee") / total
    tl.store(partial + (head * parts + part) * D + cols, y, mask=(rows < H) & inside)
    tl.store(log_sums + head * parts + part, top + tl.log(total), mask=rows < H)


@triton.jit
def _join(
    partial,
    log_sums,
    out,
    parts,
    D: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
):
    head = tl.program_id(0)
    cols = tl.arange(0, COLS)[None, :]
    part = tl.arange(0, PARTS)
    own = tl.load(log_sums + head * parts + part, mask=part < parts, other=-1e30)
    top = tl.max(own)
    total = tl.sum(tl.exp(own - top))
    sums = tl.zeros((COLS,), tl.float32)
    for first in range(0, parts, JOINED):
        i = head * parts + first + tl.arange(0, JOINED)[:, None]
        inside = first + tl.arange(0, JOINED)[:, None] < parts
        share = tl.exp(tl.load(log_sums + i, mask=inside, other=-1e30) - top)
        y = tl.load(partial + i * D + cols, mask=(share > 0) & (cols < D), other=0.0)
        sums += tl.sum(share * y, 0)
    at = tl.arange(0, COLS)
    tl.store(out + head * D + at, sums / total, mask=at < D)
