"""Attention of one query in each row to a KV cache, for sampling: parts of the keys fill the GPU,
then join.

Each part has its own softmax and logarithm of its sum, as in https://pytorch.org/blog/flash-decoding.
"""

import torch
import triton
import triton.language as tl

from fast.operators import INTERPRETED, cdiv, power_of_2

PART, JOINED = 64, 64  # keys of a program; parts that are added up at a time


def attention(q, k, v, kept, at):
    """Causal attention of the token at position at: (1,) int64, whose k and v it writes into the
    cache.

    q: (B, H, 1, D); k, v: (B, H_kv, 1, D); kept: the cache, (2, B, H_kv, L, D), keys and values ->
    as q.
    """
    (B, H, _, D), L = q.shape, kept.size(3)
    parts, groups = cdiv(L, PART), kept.size(2) * B
    sizes = dict(D=D, COLS=max(16, power_of_2(D)))
    some, logs = (q.new_empty(B * H, parts, n, dtype=torch.float32) for n in (D, 1))
    args = q.contiguous(), k.contiguous(), v.contiguous(), *kept, at, some, logs, L, parts, D**-0.5
    _attend[(groups, parts)](
        *args, H=B * H // groups, PART=PART, ROWS=max(16, power_of_2(H)), **sizes
    )
    y = torch.empty_like(args[0])
    _join[(B * H,)](some, logs, y, parts, MOST=power_of_2(parts), JOINED=JOINED, **sizes)
    return y


@triton.jit
def _attend(
    q, k, v, keys, values, at, some, logs, L, parts, scale,
    H: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program: the H queries that share keys, and PART of these."""
    group, part, last = tl.program_id(0), tl.program_id(1), tl.load(at)
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    first, inside, head = part * PART, cols < D, group * H + rows
    if first > last:
        tl.store(logs + head * parts + part, -1e30, mask=rows < H)
        return
    t, across = first + tl.arange(0, PART)[:, None], first + tl.arange(0, PART)[None, :]
    here = (tl.cast(group, tl.int64) * L + t) * D + cols
    new, old = (t == last) & inside, (t < last) & inside
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
    tl.store(some + (head * parts + part) * D + cols, y, mask=(rows < H) & inside)
    tl.store(logs + head * parts + part, top + tl.log(total), mask=rows < H)


@triton.jit
def _join(
    some,
    logs,
    out,
    parts,
    D: tl.constexpr,
    COLS: tl.constexpr,
    MOST: tl.constexpr,
    JOINED: tl.constexpr,
):
    head, cols, all = tl.program_id(0), tl.arange(0, COLS)[None, :], tl.arange(0, MOST)
    own = tl.load(logs + head * parts + all, mask=all < parts, other=-1e30)
    top = tl.max(own)
    total, sums = tl.sum(tl.exp(own - top)), tl.zeros((COLS,), tl.float32)
    for first in range(0, parts, JOINED):
        i = head * parts + first + tl.arange(0, JOINED)[:, None]
        inside = first + tl.arange(0, JOINED)[:, None] < parts
        share = tl.exp(tl.load(logs + i, mask=inside, other=-1e30) - top)
        y = tl.load(some + i * D + cols, mask=(share > 0) & (cols < D), other=0.0)
        sums += tl.sum(share * y, 0)
    at = tl.arange(0, COLS)
    tl.store(out + head * D + at, (sums / total).to(out.dtype.element_ty), mask=at < D)
