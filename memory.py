"""What a run will take of a GPU's memory, by arithmetic alone: no GPU, no model is built.

    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80

Counts what --ops=fused in bf16 and fp8 keeps, GiB a rank, at the three moments that a step may have its peak: when the
loss is computed, in the backward of the first block that it reaches, and in the optimizer's update.
"""

import dataclasses
import functools
import os

import adam8
import kernels
import model as models
import parallel
import remat

GIB = 2**30
WORKSPACE = 2**25  # cuBLAS's


def estimate(cfg, ranks):
    """{part: bytes on a rank} for a train.Config, `ranks` processes and, with hsdp, cfg.shard_size of them a copy.

    Bytes of the GPU's memory: what is offloaded does not count. 8-bit states count as if no tensor were small.
    """
    total, block = parameter_counts(*shape_of(cfg))
    rest = total - cfg.n_layer * block
    shards, sharded, own = shards_of(cfg, ranks), is_sharded(cfg, ranks), bytes_of_weight(cfg)
    tokens = cfg.batch_size * cfg.block_size // cfg.context_parallel
    here = 0 if cfg.offload_states else total / shards
    states = {"parameters": own * here, "gradients": own * here, "optimizer": bytes_of_moments(cfg) * here}
    states["buffers"] = WORKSPACE + (8 * cfg.block_size * cfg.head_dim if cfg.positions == "rope" else 0)  # its tables
    parts = dict(states)
    if sharded and cfg.batch_tokens <= cfg.micro_tokens(ranks):
        parts["gradients"] = 0  # of a lone micro-step: they come as activations go
    again = 0 if cfg.remat == "none" else -(-cfg.n_layer // cfg.remat_every)
    parts["gathered"] = gathered(cfg, total, block, rest, shards) if sharded else 0
    if not parallel.gathers_8_bits(cfg, shards):
        parts["gathered"] += copied(cfg, (cfg.n_layer - again) * block, 2 if sharded else own)
    on_host = cfg.remat_offload and again > 2 and cfg.remat in ("attention", "block")
    kept = 2 if on_host else again  # double-buffered
    parts["activations"] = tokens * ((cfg.n_layer - again) * block_per_token(cfg) + kept * kept_per_token(cfg))
    parts["loss or a block's backward"] = max(loss_bytes(cfg, tokens, own), backward_bytes(cfg, tokens, again))
    most = max(parts, states, key=lambda moment: sum(moment.values()))
    return {name: int(size) for name, size in most.items()}


def takes(cfg, ranks):
    """The whole of the estimate, in bytes."""
    return sum(estimate(cfg, ranks).values())


def describe(cfg, ranks):
    """The estimate in words, for a run's start; the whole of it where the operations are those that it counts."""
    each = 2 * bytes_of_weight(cfg) + bytes_of_moments(cfg)
    states = each * parameter_counts(*shape_of(cfg))[0] / shards_of(cfg, ranks) / GIB
    where = "of the CPU's memory " if cfg.offload_states else ""
    words = f"{states:.2f} GiB {where}a rank for weights, gradients and optimizer states"
    return words + f", about {takes(cfg, ranks) / GIB:.1f} GiB of a GPU in all" * (cfg.ops == "fused")


def shape_of(cfg):
    cfg = dataclasses.replace(cfg, block_size=1) if cfg.positions == "rope" else cfg  # which has no weights
    return tuple(getattr(cfg, f.name) for f in dataclasses.fields(models.GPTConfig))


@functools.cache
def parameter_counts(*shape):
    """(of the model, of a block) for a GPTConfig's values: a search over batch sizes asks for the same ones again."""
    parameters = list(models.on_meta(models.GPTConfig(*shape)).named_parameters())
    in_block = [p.numel() for name, p in parameters if name.startswith("blocks.0.")]
    return sum(p.numel() for _, p in parameters), sum(in_block)


def is_sharded(cfg, ranks):
    return cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)


def shards_of(cfg, ranks):
    """Ranks that share a copy of the model."""
    if not is_sharded(cfg, ranks):
        return 1
    node = int(os.environ.get("LOCAL_WORLD_SIZE", min(8, ranks)))  # torchrun's, as in parallel.shard
    return (cfg.shard_size or node) if cfg.parallel == "hsdp" else ranks


def bytes_of_weight(cfg):
    return 2 if cfg.weights == "bf16" else 4


def bytes_of_moments(cfg):
    return 2 * (1 + 4 / adam8.GROUP) if cfg.optimizer == "adamw8bit" else 8


def bytes_of_sum(cfg):
    """Of a gradient as it is summed over ranks."""
    return 2 if cfg.reduce_dtype == "bf16" else 4


def gathered(cfg, total, block, rest, shards):
    """Of FSDP: units in bf16, two of blocks and the head at a time, or all; a unit's gradients, whole and summed."""
    blocks = total - rest
    unit, head = min(block * parallel.blocks_a_unit(cfg, block), blocks), rest // (1 if cfg.tie_embeddings else 2)
    whole = 2 * (total if cfg.parallel == "zero2" else head + min(2 * unit, blocks))
    return whole + (2 + bytes_of_sum(cfg)) * max(unit, head) * (1 + 1 / shards)


def copied(cfg, numbers, own):
    """Of the blocks that are not computed again: their weights as multiplied, if in another type, kept to the end."""
    small = 1 if cfg.precision == "fp8" else 2  # fp8: the transposes alone
    return 0 if own == small else small * numbers


def loss_bytes(cfg, tokens, own):
    logits = min(kernels.LOGITS_BYTES, 2 * tokens * cfg.padded_vocab) * (2 if cfg.precision == "fp8" else 1)
    return logits + tokens * cfg.n_embd * 2 + own * cfg.padded_vocab * cfg.n_embd


def backward_bytes(cfg, tokens, again):
    """At work in a block's backward: gradients beside its activations, and these if they are computed again."""
    C, wide = cfg.n_embd, 2 * (2 * cfg.mlp_width + 2 * cfg.hidden)
    if not again:
        return tokens * (wide + 2 * 3 * C)
    if cfg.remat == "selective":
        return tokens * (wide + 2 * 4 * C)
    turned = cfg.qkv_width - cfg.kv_heads * cfg.head_dim if cfg.positions == "rope" else 0
    alive = 2 * (cfg.qkv_width + turned + 6 * C)  # q, k, v before and after RoPE; x, y, the norm of x, three gradients
    tile = min(tokens, cfg.remat_tile or tokens) * (wide + 2 * cfg.mlp_width + 2 * 4 * C)
    return tokens * alive + max(tile, tokens * (2 * cfg.qkv_width + 4 * C))  # attention's: three, and dq in float32


def block_per_token(cfg):
    """Bytes a token that a block keeps for its backward."""
    C, fp8 = cfg.n_embd, cfg.precision == "fp8"
    residual = 2 * 2 * C  # the sums before both norms
    attention = 2 * cfg.qkv_width + 2 * C + 4 * cfg.n_head  # q, k, v, the output, logsumexp
    operands = (1 if fp8 else 2) * (2 * C + (0 if cfg.mlp == "swiglu" and not fp8 else cfg.hidden))
    operands += C if fp8 else 0  # attention's output, in bf16 the one above
    return residual + attention + operands + 2 * cfg.mlp_width + 16


def kept_per_token(cfg):
    """Bytes a token that a rematerialised block keeps."""
    C = cfg.n_embd
    if cfg.remat == "block":
        return 2 * C
    if cfg.remat == "attention":
        return 2 * 2 * C + 4 * cfg.n_head
    products = sum(2 * n for n, k in cfg.block_matmuls[:-1] if n <= remat.WIDE * k)
    return 2 * 2 * C + products + 2 * C + 4 * cfg.n_head  # a residual stream and the branch to be added to it


def largest_batch(cfg, ranks, budget):
    """The largest batch_size whose estimate is within `budget` bytes, 0 if none is."""
    return largest(lambda rows: takes(dataclasses.replace(cfg, batch_size=rows), ranks) <= budget)


def longest_row(cfg, ranks, budget):
    """The largest block_size, in steps of 1,024 a rank, that fits `budget` bytes with batch_size=1, 0 if none does."""
    step = 1024 * cfg.context_parallel
    return step * largest(lambda n: takes(dataclasses.replace(cfg, batch_size=1, block_size=n * step), ranks) <= budget)


def largest(fits):
    """The largest number that fits, up to 2^20, 0 if none does; what is below one that fits is taken to fit."""
    count = 1
    while fits(count) and count < 2**20:
        count *= 2
    low, high = count // 2, count
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low  # the last that fitted, or 0


def fitting(cfg, ranks, budget, changes, legal):
    """["--batch_size=2 --remat=block", …]: with which of the changes, {setting: value}, some legal batch fits."""
    found = []
    for change in changes:
        other = dataclasses.replace(cfg, **change)
        rows = min(cfg.batch_size, largest_batch(other, ranks, budget))
        while rows and not legal(dataclasses.replace(other, batch_size=rows), ranks):
            rows -= 1
        if rows:
            changed = {k: v for k, v in change.items() if v != getattr(cfg, k)}
            found.append(" ".join(f"--{k}={v}" for k, v in {"batch_size": rows, **changed}.items()))
    return found


def advice(cfg, ranks, budget, legal):
    """What to change when a run is out of memory, in words; budget: bytes of the GPU; legal(cfg, ranks): as train's."""
    plain = {"remat_tile": None, "remat_offload": False}
    changes = [{}, {"remat": "selective", **plain}, {"remat": "block"}]
    least = {"remat": "attention", "remat_tile": 16_384, "remat_offload": True}
    copies = ranks > 1 and cfg.parallel == "ddp"
    low = {"parallel": "fsdp"} if copies else {"optimizer": "adamw8bit", "weights": "bf16"}
    fits = fitting(cfg, ranks, budget, changes, legal)
    fits = fits or list(
        dict.fromkeys(fitting(cfg, ranks, budget, [least, {"remat": "block", **low}, least | low], legal))
    )
    more = " --parallel=fsdp" if copies else ""
    tries = " or ".join(f for f in fits if f != f"--batch_size={cfg.batch_size}") or f"more GPUs{more}"
    need = takes(cfg, ranks)
    roomy = need < 0.9 * budget and cfg.ops != "torch"  # for which the estimate is not
    why = f"this takes about {need / GIB:.1f} GiB of {budget / GIB:.1f} a GPU by estimate"
    why += ", so that another process may be on it (nvidia-smi)" if roomy else ""
    return f"out of memory: {why}; try {tries}"
