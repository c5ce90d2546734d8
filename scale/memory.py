"""A run's GPU memory, by arithmetic alone: `bench.py memory` needs neither a GPU nor torch.

Counts bytes on a rank, with the fused kernels in bf16 or fp8, in the loss, a block's backward and
the update.
"""

import bisect
import dataclasses
import math

import fast
from settings import not_divisible
from system.errors import UserError, launched, this_rank

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}
GROUP = 256  # elements that share a float32 scale in adamw8bit's moments
# part of the estimate that batch_size=auto leaves free; it was within 9% of all measured peaks
MARGIN = 0.1
LESS = (
    "--remat=selective or block, --optimizer=adamw8bit --weights=bf16 or --parallel=fsdp; "
    "`python bench.py memory` lists what fits"
)
# the blocks of one unit of FSDP2 take up to this in 16 bits; 0: a block a unit
UNIT_MIB = 100


def estimate(cfg, ranks):
    """{part: bytes of GPU memory on a rank} for a Config and `ranks` processes."""
    total, block = total_and_block_parameters(cfg)
    shards = shards_of(cfg, ranks)
    sharded = cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)
    several_micro_steps = cfg.batch_tokens > cfg.rank_tokens * ranks
    recomputed = len(recomputed_blocks(cfg, cfg.n_layer))
    activations = activation_bytes(cfg, recomputed)

    weight = BYTES[cfg.weights]  # and of its gradient
    here = 0 if cfg.offload_states else total / shards
    update = {
        "parameters": weight * here,
        "gradients": weight * here,
        "optimizer": moment_bytes(cfg) * here,
    }
    backward = dict(update)
    if cfg.optimizer == "muon":
        # updates of the blocks' matrices, beside all gradients
        update["updates"] = 2 * cfg.n_layer * block / shards

    alone = ranks == 1 and not cfg.cuda_graph  # whose graph holds all gradients
    if (sharded or alone) and not several_micro_steps:
        # gradients grow while activations are freed
        backward["gradients"] = max(0, backward["gradients"] - activations)
    elif cfg.offload_states and cfg.parallel == "hsdp":
        # added up on the GPU until the last micro-step
        backward["gradients"] = BYTES[cfg.reduce_dtype] * total / shards
    elif ranks > 1 and not sharded and (several_micro_steps or cfg.cuda_graph):
        # .grad, and the tensors in which the last micro-step averages them over the ranks
        backward["gradients"] *= 2
    backward["gathered"] = gathered_bytes(cfg, shards) if sharded else 0
    cast = 1 if cfg.precision == "fp8" else 2  # fp8 keeps the transposes alone
    if not gathers_8_bits(cfg, shards) and (2 if sharded else weight) != cast:
        # 16-bit or 8-bit casts of weights, kept until the backward
        backward["gathered"] += cast * (cfg.n_layer - recomputed) * block
    backward["activations"] = activations
    backward["loss or a block's backward"] = max(loss_bytes(cfg), backward_bytes(cfg, recomputed))

    largest = max(backward, update, key=lambda parts: sum(parts.values()))
    return {part: int(size) for part, size in largest.items()}


def total_bytes(cfg, ranks):
    """Total of the estimate, in bytes."""
    return sum(estimate(cfg, ranks).values())


def total_and_block_parameters(cfg):
    """Parameters (of the model, of a block without a table): shared once, with padding rows."""
    C = cfg.n_embd
    norm = 2 * C if cfg.norm == "layernorm" and cfg.bias else C
    block = 2 * norm + cfg.n_head * cfg.gate_channels
    # matrices: q, k and v; attention's output; the MLP's two
    block += C * (cfg.qkv_width + cfg.attention_width + cfg.mlp_width + cfg.mlp_hidden)
    if cfg.bias:
        block += cfg.qkv_width + C + cfg.mlp_width + C
    if cfg.qk_norm:
        block += 2 * cfg.head_size
    width = C if cfg.tie_embeddings else 2 * C  # of all that has a row for each token id
    width += len(cfg.value_layers) * cfg.kv_heads * cfg.head_size
    tables = cfg.padded_vocab * width
    if cfg.positions == "learned":
        tables += C * cfg.block_size
    tables += 2 * len(cfg.mixed_layers)
    return tables + cfg.n_layer * block + norm, block


def moment_bytes(cfg):
    """Of optimizer state a weight, on average; 0 for an optimizer that is none of ours."""
    total, block = total_and_block_parameters(cfg)
    known = {
        "adamw": 8,
        "adamw8bit": 2 * (1 + 4 / GROUP),
        "muon": 8 - 4 * cfg.n_layer * block / total,
    }
    return known.get(cfg.optimizer, 0)


def shards_of(cfg, ranks):
    """Ranks among which one copy of the model is sharded."""
    if cfg.parallel == "ddp":
        return 1
    if cfg.parallel == "hsdp":
        of_host = this_rank().local_size if launched() else min(8, ranks)
        return cfg.shard_size or of_host
    return ranks


def gathers_8_bits(cfg, shards):
    """Whether FSDP2 gathers the blocks' weights in fp8.

    Each matrix comes with its transpose, so that they take the bytes of bf16.
    """
    return cfg.precision == "fp8" and shards > 1 and not cfg.offload_states


def gathered_bytes(cfg, shards):
    """FSDP2's 16-bit buffers: weights of two units and head (zero2: all), gradients of a unit."""
    total, unit = total_and_block_parameters(cfg)
    if cfg.value_layers:  # a table is gathered with its block
        unit += cfg.padded_vocab * cfg.kv_heads * cfg.head_size
    if cfg.remat not in ("block", "attention"):  # several blocks may be a unit
        unit = max(unit, UNIT_MIB * 2**19)
    head = cfg.padded_vocab * cfg.n_embd
    weights = 2 * (total if cfg.parallel == "zero2" else head + unit * min(2, shards))
    if shards == 1:  # nothing to gather from other ranks ahead of its use, and nothing to reduce
        return weights
    return weights + (2 + BYTES[cfg.reduce_dtype]) * max(unit, head) * (1 + 1 / shards)


def loss_bytes(cfg):
    """Bytes during the loss: a chunk of logits, gradients of the hidden state and the head."""
    tokens = cfg.rank_tokens
    logits = min(fast.LOGITS_MIB * 2**20, 2 * tokens * cfg.padded_vocab)
    if cfg.precision == "fp8":
        logits *= 2
    return logits + tokens * cfg.n_embd * 2 + BYTES[cfg.weights] * cfg.padded_vocab * cfg.n_embd


def backward_bytes(cfg, recomputed):
    """Bytes for a block's backward: gradients, and activations where they are computed again."""
    C, tokens = cfg.n_embd, cfg.rank_tokens
    tile = min(tokens, cfg.remat_tile or tokens)
    wide = 2 * (2 * cfg.mlp_width + 2 * cfg.mlp_hidden)
    if not recomputed or cfg.remat == "selective":
        return tile * wide + tokens * 2 * 3 * C
    # attention: q, k, v before and after RoPE; x, y, norm_1(x), three gradients; dq, dk, dv,
    # and dq in float32
    each = 6 if cfg.positions == "rope" else 4
    attention = each * cfg.qkv_width + 8 * cfg.attention_width + 8 * C
    # MLP: the pre-activation, its gradient and the activation's; x, y, norm_2(x), three gradients
    return max(tokens * attention, tile * (wide - 2 * cfg.mlp_hidden) + tokens * 2 * 6 * C)


def recomputed_blocks(cfg, n_layer):
    """Indices of blocks that remat computes again: each remat_every-th, perhaps a fraction."""
    if cfg.remat == "none":
        return []
    count = math.ceil(n_layer / cfg.remat_every - 1e-6)
    return [int(i * cfg.remat_every + 1e-6) for i in range(count)]


def activation_bytes(cfg, recomputed):
    """Bytes that are kept for the backward, if so many blocks are computed again."""
    whole = cfg.n_layer - recomputed
    if cfg.remat_offload:
        recomputed = min(2, recomputed)  # while the others wait on the host
    each = whole * saved_activation_bytes(cfg)
    each += recomputed * bytes_under_remat(cfg)
    if cfg.embedding_mix:  # what is mixed: the embedded tokens, and each such block's input before
        each += 2 * cfg.n_embd * (1 + len(cfg.mixed_layers))
    return cfg.rank_tokens * each


def bytes_under_remat(cfg):
    """Bytes a token of the tensors that a block keeps where it is computed again."""
    if cfg.remat == "selective":
        return saved_activation_bytes(cfg, selective=True)
    size = 2 * cfg.n_embd  # its input
    if cfg.remat == "attention":  # attention's output and logsumexp besides
        size += 2 * cfg.attention_width + 4 * cfg.n_head
    return size


def saved_activation_bytes(cfg, selective=False):
    """Bytes a token of the tensors that a block keeps, perhaps under remat=selective."""
    C, A, fp8 = cfg.n_embd, cfg.attention_width, cfg.precision == "fp8"
    # the residual stream before both norms, and their outputs
    size = 16 + 4 * C + (2 * C if fp8 else 4 * C)
    size += 2 * cfg.qkv_width + 2 * A + 4 * cfg.n_head  # q, k, v, attention's output and logsumexp
    if cfg.qk_norm:
        size += 2 * (cfg.n_head + cfg.kv_heads) * cfg.head_size  # q and k before their norm
    if cfg.attention_gate:
        size += 2 * A  # attention's output before its gates
    if cfg.context_parallel > 1:
        size += 2 * A  # the output of this rank's heads, before their exchange
    if fp8:
        size += A  # attention's output in 8 bits
    if selective:
        return size + C if fp8 else size  # the MLP's input in bf16
    if fp8:  # the pre-activation, of relu2 its square alone, and the activation in 8 bits
        return size + cfg.mlp_hidden + (cfg.mlp_hidden if cfg.mlp == "relu2" else 2 * cfg.mlp_width)
    size += 2 * cfg.mlp_width  # the pre-activation
    if cfg.mlp == "gelu":
        size += 2 * cfg.mlp_hidden
    return size


def on_host(cfg, ranks):
    """{part: bytes of the host's memory on a rank}; PyTorch pins blocks of a power of two."""
    parts = {}
    if cfg.offload_states:
        each = 2 * BYTES[cfg.weights] + moment_bytes(cfg)
        parts["states"] = each * total_and_block_parameters(cfg)[0] / shards_of(cfg, ranks)
    if cfg.remat_offload:
        blocks = len(recomputed_blocks(cfg, cfg.n_layer))
        parts["activations"] = blocks * cfg.rank_tokens * bytes_under_remat(cfg)
    return parts


def largest(cfg, ranks, budget, name, values):
    """The last of a setting's values whose estimate is within `budget` bytes; None: none is.

    values: in the order of the memory that they take.
    """

    def too_large(value):
        return total_bytes(dataclasses.replace(cfg, **{name: value}), ranks) > budget

    fitting = bisect.bisect_left(values, True, key=too_large)
    return values[fitting - 1] if fitting else None


def choose(cfg, ranks, free):
    """(cfg with batch_size="auto" resolved, {setting: reason}).

    free: bytes of a GPU, which the estimate and MARGIN may fill; 0: no GPU. Raises UserError.
    """
    if cfg.batch_size != "auto":
        return cfg, {}
    unknown = not_estimated(cfg)
    if free == 0:
        unknown.append("memory is counted of CUDA devices alone")
    if unknown:
        raise UserError(f"batch_size=auto: {unknown[0]}; give a number")
    budget = free / (1 + MARGIN)
    why = f"within {budget / GIB:.1f} GiB by estimate, as {MARGIN:.0%} more are free"
    one_row = dataclasses.replace(cfg, batch_size=1)
    rows = cfg.batch_tokens // (one_row.rank_tokens * ranks)
    values = []
    for n in range(1, rows + 1):
        if not not_divisible(dataclasses.replace(cfg, batch_size=n), ranks):
            values.append(n)
    chosen = largest(cfg, ranks, budget, "batch_size", values)
    if chosen is None:
        raise UserError(f"batch_size=auto: not one row is {why}; try {LESS}")
    why = f"the largest divisor of a rank's {rows:,} rows a step {why}"
    return dataclasses.replace(cfg, batch_size=chosen), {"batch_size": why}


def describe(cfg, ranks, parameters):
    """The estimate in words; parameters: see `is_estimated`."""
    if not is_estimated(cfg, parameters):
        return "not estimated"
    return f"about {total_bytes(cfg, ranks) / GIB:.1f} GiB of a GPU, by estimate"


def is_estimated(cfg, parameters):
    """Whether the estimate holds for a model of so many parameters; others were edited."""
    return not not_estimated(cfg) and parameters == total_and_block_parameters(cfg)[0]


def not_estimated(cfg):
    """Problems, one line each: settings for which the estimate does not hold ("auto" is none)."""
    unknown = {
        "ops": cfg.ops == "torch",
        "attention": cfg.attention == "math",  # T x T matrices
        "optimizer": not moment_bytes(cfg),
        "precision": cfg.precision in ("fp32", "tf32", "fp16"),
    }
    why = "the arithmetic counts fused kernels, in bf16 or fp8, and this repository's optimizers"
    return [f"{name}={getattr(cfg, name)}: {why}" for name in unknown if unknown[name]]


def advice(total):
    """What to change after a run was out of memory; total: bytes of the GPU."""
    why = f"a GPU has {total / GIB:.1f} GiB (what else runs: nvidia-smi)"
    return f"out of memory: {why}; try a smaller --batch_size, or {LESS}"
