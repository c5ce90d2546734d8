"""What a run will take of a GPU's memory, by arithmetic alone: no GPU, no model is built.

    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80

Counts what --ops=fused in bf16 and fp8 keeps, GiB a rank: states, what a sharded model gathers, the activations that
wait for the backward, the loss, and the largest piece of work on top. GPT-2 124M, 64 x 1,024 tokens, took 21.4 GiB of
an H200 in bf16 and 19.7 in fp8, where this gives 21.3 and 19.4; sharded and recomputed runs are not compared yet.
"""

import dataclasses
import functools

import adam8
import kernels
import model as models
import remat

GIB = 2**30


def estimate(cfg, ranks):
    """{part: bytes on a rank} for a train.Config, `ranks` processes and, with hsdp, cfg.shard_size of them a copy.

    Bytes of the GPU's memory: states that are offloaded do not count. 8-bit ones count as if no tensor were small.
    """
    total, block = parameter_counts(*(getattr(cfg, f.name) for f in dataclasses.fields(models.GPTConfig)))
    sharded = cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)
    shards = (cfg.shard_size or ranks) if cfg.parallel == "hsdp" else ranks if sharded else 1
    tokens = cfg.batch_size * cfg.block_size // cfg.context_parallel
    small = 1 if cfg.precision == "fp8" else 2  # bytes of a product's operands
    own = 2 if cfg.weights == "bf16" else 4
    moments = 2 * (1 + 4 / adam8.GROUP) if cfg.optimizer == "adamw8bit" else 8
    kept = {"parameters": own, "gradients": own, "optimizer": moments}
    offloaded = sharded and cfg.offload_states
    parts = {part: 0 if offloaded else int(each * total / shards) for part, each in kept.items()}
    rest = total - cfg.n_layer * block
    if sharded:  # bf16: the units at work, or all of them; a block's gradients in bf16 and, being summed, in float32
        parts["gathered"] = 2 * (total if cfg.parallel == "zero2" else rest + 2 * block) + 6 * max(block, rest)
        if offloaded:  # a unit's own part on its way in, and its gradient's on its way out
            parts["gathered"] += 2 * own * max(block, rest) // shards
    elif own == small:
        parts["gathered"] = 0
    else:
        parts["gathered"] = small * (total - rest)  # the weights as they were multiplied
    whole = 0 if cfg.remat == "none" else block_per_token(cfg)
    plain = cfg.n_layer - (0 if cfg.remat == "none" else -(-cfg.n_layer // cfg.remat_every))
    parts["activations"] = tokens * (plain * block_per_token(cfg) + (cfg.n_layer - plain) * kept_per_token(cfg))
    loss = (
        kernels.LOGITS_BYTES * (2 if cfg.precision == "fp8" else 1)
        + tokens * cfg.n_embd * 2
        + own * cfg.padded_vocab * cfg.n_embd
    )
    backward = tokens * (whole + 2 * 2 * cfg.mlp_width)  # recomputed, and gradients
    parts["loss or a block's backward"] = max(loss, backward)
    return parts


@functools.cache
def parameter_counts(*shape):
    """(of the model, of a block) for a GPTConfig's values: a search over batch sizes asks for the same ones again."""
    parameters = list(models.on_meta(models.GPTConfig(*shape)).named_parameters())
    in_block = [p.numel() for name, p in parameters if name.startswith("blocks.0.")]
    return sum(p.numel() for _, p in parameters), sum(in_block)


def block_per_token(cfg):
    """Bytes a token that a block keeps for its backward."""
    C, fp8 = cfg.n_embd, cfg.precision == "fp8"
    residual = 2 * 2 * C  # the sums before both norms
    attention = 2 * cfg.qkv_width + 2 * C + 4 * cfg.n_head  # q, k, v, the output, logsumexp
    operands = (1 if fp8 else 2) * (2 * C + cfg.hidden)  # of the products, attention's output apart:
    operands += C if fp8 else 0  # in bf16 it is above
    return residual + attention + operands + 2 * cfg.mlp_width + 16


def kept_per_token(cfg):
    """Bytes a token that a rematerialised block keeps."""
    entering = 2 * 2 * cfg.n_embd  # the residual stream and the branch to be added
    if cfg.remat == "block":
        return entering
    products = sum(2 * n for n, k in cfg.block_matmuls if n <= remat.WIDE * k)
    return entering + products + 2 * cfg.n_embd + 4 * cfg.n_head


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


def fitting(cfg, ranks, budget, changes):
    """["--batch_size=2 --remat=block", …]: with which of the changes, {setting: value}, some batch fits."""
    found = [(largest_batch(dataclasses.replace(cfg, **change), ranks, budget), change) for change in changes]
    pairs = [{"batch_size": min(rows, cfg.batch_size), **change} for rows, change in found if rows]
    return [" ".join(f"--{k}={v}" for k, v in settings.items()) for settings in pairs]


def advice(cfg, ranks, budget):
    """What to change when a run is out of memory, in words; budget: bytes of the GPU."""
    changes = [{}, {"remat": "selective"}, {"remat": "block"}]
    low = {"parallel": "fsdp"} if ranks > 1 and cfg.parallel == "ddp" else {"optimizer": "adamw8bit", "weights": "bf16"}
    fits = fitting(cfg, ranks, budget, changes) or fitting(cfg, ranks, budget, [{"remat": "block", **low}])
    takes = sum(estimate(cfg, ranks).values()) / GIB
    more = " --parallel=fsdp" if ranks > 1 and cfg.parallel == "ddp" else ""
    tries = " or ".join(f for f in fits if f != f"--batch_size={cfg.batch_size}") or f"more GPUs{more}"
    return f"out of memory: this takes about {takes:.1f} GiB of {budget / GIB:.1f} a GPU by estimate; try {tries}"
