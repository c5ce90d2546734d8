"""What a run will take of a GPU's memory, by arithmetic alone: no GPU, no model is built.

    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80

Counts what --ops=fused in bf16 and fp8 keeps, GiB a rank: states, what a sharded model gathers, the activations that
wait for the backward, the loss, and the largest piece of work on top. GPT-2 124M, 64 x 1,024 tokens, took 21.4 GiB of
an H200 in bf16 and 19.7 in fp8, where this gives 21.3 and 19.4; sharded and recomputed runs are not compared yet.
"""

import dataclasses

import model as models

GIB = 2**30
LOGITS = 2**30  # fused.CHUNK_BYTES


def estimate(cfg, ranks):
    """{part: bytes on a rank} for a train.Config, `ranks` processes and, with hsdp, cfg.shard_size of them a copy."""
    parameters = list(models.on_meta(cfg).named_parameters())
    total = sum(p.numel() for _, p in parameters)
    block = sum(p.numel() for name, p in parameters if name.startswith("blocks.0."))
    sharded = cfg.parallel != "ddp" and ranks > 1
    shards = (cfg.shard_size or ranks) if cfg.parallel == "hsdp" else ranks if sharded else 1
    tokens = cfg.batch_size * cfg.block_size // cfg.context_parallel
    small = 1 if cfg.precision == "fp8" else 2  # bytes of a product's operands
    parts = {"parameters": 4 * total // shards, "gradients": 4 * total // shards, "optimizer": 8 * total // shards}
    rest = total - cfg.n_layer * block
    if sharded:  # bf16: the units at work, or all of them; a block's gradients in bf16 and, being summed, in float32
        parts["gathered"] = 2 * (total if cfg.parallel == "zero2" else rest + 2 * block) + 6 * max(block, rest)
    else:
        parts["gathered"] = small * (total - rest)  # the weights as they were multiplied
    kept, whole = kept_per_token(cfg), {"none": 0}.get(cfg.remat, block_per_token(cfg))
    plain = cfg.n_layer - (0 if cfg.remat == "none" else -(-cfg.n_layer // cfg.remat_every))
    parts["activations"] = tokens * (plain * block_per_token(cfg) + (cfg.n_layer - plain) * kept)
    loss = LOGITS * (2 if cfg.precision == "fp8" else 1) + tokens * cfg.n_embd * 2 + 4 * cfg.padded_vocab * cfg.n_embd
    backward = tokens * (whole + 2 * 2 * (2 if cfg.mlp == "swiglu" else 1) * cfg.hidden)  # recomputed, and gradients
    parts["loss or a block's backward"] = max(loss, backward)
    return parts


def block_per_token(cfg):
    """Bytes a token that a block keeps for its backward."""
    C, H, attended = cfg.n_embd, cfg.hidden, (cfg.n_head + 2 * cfg.kv_heads) * cfg.head_dim
    small = 1 if cfg.precision == "fp8" else 2
    wide = 2 * H if cfg.mlp == "swiglu" else H
    residual = 2 * 2 * C  # the sums before both norms
    attention = 2 * attended + 2 * C + 4 * cfg.n_head  # q, k, v, the output, logsumexp
    operands = small * (2 * C + H) + (
        C if cfg.precision == "fp8" else 0
    )  # of the products; attention's output is above
    return residual + attention + operands + 2 * wide + 16


def kept_per_token(cfg):
    """Bytes a token that a rematerialised block keeps."""
    C, attended = cfg.n_embd, (cfg.n_head + 2 * cfg.kv_heads) * cfg.head_dim
    entering = 2 * 2 * C  # the residual stream and the branch to be added
    if cfg.remat == "block":
        return entering
    wide = 2 * cfg.hidden if cfg.mlp == "swiglu" else cfg.hidden
    products = [(attended, C), (C, C), (C, cfg.hidden), (wide, C)]
    return entering + sum(2 * n for n, k in products if n <= 2 * k) + 2 * C + 4 * cfg.n_head


def largest_batch(cfg, ranks, budget):
    """The largest batch_size whose estimate is within `budget` bytes, 0 if none is."""

    def takes(rows):
        return sum(estimate(dataclasses.replace(cfg, batch_size=rows), ranks).values())

    rows = 1
    while takes(rows) <= budget and rows < 2**20:
        rows *= 2
    low, high = rows // 2, rows
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if takes(middle) <= budget else (low, middle)
    return low if low and takes(low) <= budget else 0


def advice(cfg, ranks, budget):
    """What to change when a run is out of memory, in words; budget: bytes of the GPU."""
    ways = [("", cfg), (" --remat=selective", "selective"), (" --remat=block", "block")]
    fits = []
    for words, way in ways:
        other = cfg if way is cfg else dataclasses.replace(cfg, remat=way)
        if rows := largest_batch(other, ranks, budget):
            fits.append(f"--batch_size={min(rows, cfg.batch_size)}{words}")
    takes = sum(estimate(cfg, ranks).values()) / GIB
    more = " --parallel=fsdp" if ranks > 1 and cfg.parallel == "ddp" else ""
    tries = " or ".join(f for f in fits if f != f"--batch_size={cfg.batch_size}") or f"more GPUs{more}"
    return f"out of memory: this takes about {takes:.1f} GiB of {budget / GIB:.1f} a GPU by estimate; try {tries}"
