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
GROUP = 256  # elements that share a float32 scale in adamw8bit's moments, as in its module
# part of the estimate that batch_size=auto leaves free; it was within 9% of all measured peaks
MARGIN = 0.1
CPU_TOKENS = 2048  # in a micro-batch of batch_size=auto without a GPU, as in config/quickstart.py
# from so many bytes on, an offloaded activation's host memory is no power of two
PINNED_EXACTLY = 2**26
LESS = (
    "--remat=selective or block, --optimizer=adamw8bit --weights=bf16 or --parallel=fsdp; "
    "`python bench.py memory` lists what fits"
)
# the blocks of one unit of FSDP2 take up to this in 16 bits; 0: a block a unit
UNIT_MIB = 100


def estimate(cfg, ranks):
    """{part: bytes of GPU memory on a rank} for a Config and `ranks` processes.

    `on_host` counts the host's.
    """
    total, block = total_and_block_parameters(cfg)
    shards = shards_of(cfg, ranks)
    sharded = cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)
    several_micro_steps = cfg.batch_tokens > cfg.micro_tokens(ranks)
    recomputed = len(recomputed_blocks(cfg, cfg.n_layer))
    activations = activation_bytes(cfg, recomputed)

    weight = weight_bytes(cfg)
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

    if sharded and not several_micro_steps:  # gradients grow while activations are freed
        backward["gradients"] = max(0, backward["gradients"] - activations)
    elif cfg.offload_states and cfg.parallel == "hsdp":
        # added up on the GPU until the last micro-step
        backward["gradients"] = reduced_bytes(cfg) * total / shards
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

    largest = backward
    if sum(update.values()) > sum(backward.values()):
        largest = update
    return {part: int(size) for part, size in largest.items()}


def total_bytes(cfg, ranks):
    """Total of the estimate, in bytes."""
    return sum(estimate(cfg, ranks).values())


def total_and_block_parameters(cfg):
    """Parameters (of the model, of a block without a table): shared once, with padding rows."""
    C = cfg.n_embd
    norm = 2 * C if cfg.norm == "layernorm" and cfg.bias else C
    block = 2 * norm + cfg.n_head * cfg.gate_channels
    for rows, columns in cfg.block_matmuls:
        block += rows * columns
        if cfg.bias:
            block += rows
    if cfg.qk_norm:
        block += 2 * cfg.head_size
    tables = cfg.padded_vocab * sum(cfg.tables)
    if cfg.positions == "learned":
        tables += C * cfg.block_size
    tables += 2 * len(cfg.mixed_layers)
    return tables + cfg.n_layer * block + norm, block


def weight_bytes(cfg):
    """Of a weight, and of its gradient."""
    return 2 if cfg.weights == "bf16" else 4


def reduced_bytes(cfg):
    """Of a gradient in the sum over ranks."""
    return 2 if cfg.reduce_dtype == "bf16" else 4


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
        return cfg.shard_size or ranks_of_host(ranks)
    return ranks


def ranks_of_host(ranks):
    """Of `ranks`, how many run on one host: as torchrun says, else up to 8."""
    return this_rank().local_size if launched() else min(8, ranks)


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
    return weights + (2 + reduced_bytes(cfg)) * max(unit, head) * (1 + 1 / shards)


def loss_bytes(cfg):
    """Bytes during the loss: a chunk of logits, gradients of the hidden state and the head."""
    tokens = cfg.rank_tokens
    logits = min(fast.LOGITS_MIB * 2**20, 2 * tokens * cfg.padded_vocab)
    if cfg.precision == "fp8":
        logits *= 2
    return logits + tokens * cfg.n_embd * 2 + weight_bytes(cfg) * cfg.padded_vocab * cfg.n_embd


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
    every = 1 if cfg.remat_every == "auto" else cfg.remat_every  # all, while it is not chosen
    count = math.ceil(n_layer / every - 1e-6)
    return [int(i * every + 1e-6) for i in range(count)]


def activation_bytes(cfg, recomputed):
    """Bytes that are kept for the backward, if so many blocks are computed again."""
    whole = cfg.n_layer - recomputed
    if cfg.remat_offload:
        recomputed = min(2, recomputed)  # while the others wait on the host
    each = whole * sum(saved_activation_bytes(cfg, "none"))
    each += recomputed * sum(saved_activation_bytes(cfg, cfg.remat))
    if cfg.embedding_mix:  # what is mixed: the embedded tokens, and each such block's input before
        each += 2 * cfg.n_embd * (1 + len(cfg.mixed_layers))
    return cfg.rank_tokens * each


def saved_activation_bytes(cfg, remat):
    """[Bytes a token] of the tensors that a block keeps for its backward."""
    C, A, fp8 = cfg.n_embd, cfg.attention_width, cfg.precision == "fp8"
    if remat == "block":
        return [2 * C]  # its input
    if remat == "attention":
        return [2 * C, 2 * A, 4 * cfg.n_head]  # attention's output and logsumexp besides
    # the residual stream before both norms, and their outputs
    sizes = [4 * C, 2 * C if fp8 else 4 * C, 16]
    sizes += [2 * cfg.qkv_width, 2 * A, 4 * cfg.n_head]  # q, k, v, attention's output and logsumexp
    if cfg.qk_norm:
        sizes.append(2 * (cfg.n_head + cfg.kv_heads) * cfg.head_size)  # q and k before their norm
    if cfg.attention_gate:
        sizes.append(2 * A)  # attention's output before its gates
    if cfg.context_parallel > 1:
        sizes.append(2 * A)  # the output of this rank's heads, before their exchange
    if fp8:
        sizes.append(A)  # attention's output in 8 bits
    if remat == "selective":
        return [*sizes, C] if fp8 else sizes  # the MLP's input in bf16
    if fp8:  # the pre-activation, of relu2 its square alone, and the activation in 8 bits
        return [*sizes, cfg.mlp_hidden if cfg.mlp == "relu2" else 2 * cfg.mlp_width, cfg.mlp_hidden]
    sizes.append(2 * cfg.mlp_width)  # the pre-activation
    if cfg.mlp == "gelu":
        sizes.append(2 * cfg.mlp_hidden)
    return sizes


def on_host(cfg, ranks):
    """{part: bytes of the host's memory on a rank}.

    All but moments are pinned; what PyTorch itself pins takes a power of two of bytes.
    """
    parts, shards = {}, shards_of(cfg, ranks)
    if cfg.offload_states:
        shapes = cfg.block_matmuls * cfg.n_layer + [
            (cfg.padded_vocab, width) for width in cfg.tables
        ]
        if cfg.positions == "learned":
            shapes.append((cfg.block_size, cfg.n_embd))
        weight = weight_bytes(cfg)
        weights = sum(
            power_of_two(weight * math.ceil(rows / shards) * width) for rows, width in shapes
        )
        parts = {"parameters": weights, "gradients": weights}
        parts["optimizer"] = int(moment_bytes(cfg) * total_and_block_parameters(cfg)[0] / shards)
    if cfg.remat_offload:
        sizes = [cfg.rank_tokens * each for each in saved_activation_bytes(cfg, cfg.remat)]
        block = sum(size if size >= PINNED_EXACTLY else power_of_two(size) for size in sizes)
        parts["activations"] = block * len(recomputed_blocks(cfg, cfg.n_layer))
    return parts


def power_of_two(size):
    """The least that is not below size."""
    return 2 ** (size - 1).bit_length()


def largest(cfg, ranks, budget, name, step=1):
    """The largest value of a setting, a multiple of step, whose estimate is within `budget` bytes.

    0: none is.
    """

    def too_large(n):
        return total_bytes(dataclasses.replace(cfg, **{name: n * step}), ranks) > budget

    return step * bisect.bisect_left(range(1, 2**20), True, key=too_large)


def choose(cfg, ranks, free):
    """(cfg with each "auto" of batch_size and remat_every resolved, {setting: reason}).

    free: bytes of a GPU; None: no GPU. Raises UserError.
    """
    reasons = {}
    unknown = not_estimated(cfg)
    if cfg.batch_size == "auto":  # with all blocks under remat, if it is chosen for how many
        if unknown and free is not None:
            raise UserError(f"batch_size=auto: {unknown[0].partition(';')[0]}; give a number")
        rows = cfg.batch_tokens // dataclasses.replace(cfg, batch_size=1).micro_tokens(ranks)
        divisors = [n for n in range(rows, 0, -1) if rows % n == 0]
        chosen = first_that_fits(cfg, "batch_size", divisors, ranks, free)
        if chosen is None:
            one_row = dataclasses.replace(cfg, batch_size=1)
            why = f"one row takes {needs(one_row, ranks, free)}"
            raise UserError(f"batch_size=auto: {why}; try {LESS}")
        cfg = chosen
        which = f"the largest divisor of a rank's {rows:,} rows a step that fits"
        reasons["batch_size"] = f"{which}: {needs(cfg, ranks, free)}"
    if cfg.remat_every == "auto":
        every = [cfg.n_layer / count for count in range(1, cfg.n_layer + 1)]
        why = "the arithmetic is for bf16 and fp8 on CUDA devices, with the fused kernels"
        chosen = None
        if free is not None and not unknown:
            chosen = first_that_fits(cfg, "remat_every", every, ranks, free)
            why = needs(chosen or cfg, ranks, free)
        cfg = chosen or dataclasses.replace(cfg, remat_every=1.0)
        count = len(recomputed_blocks(cfg, cfg.n_layer))
        reasons["remat_every"] = f"{count} of {cfg.n_layer} blocks: {why}"
    return cfg, reasons


def first_that_fits(cfg, name, values, ranks, free):
    """cfg with the first of a setting's values that fits, None where none does.

    On a GPU by the estimate and MARGIN, which must be within `free` bytes; else by CPU_TOKENS.
    """
    for value in values:
        choice = dataclasses.replace(cfg, **{name: value})
        if not_divisible(choice, ranks):
            continue
        if free is None:
            fits = choice.rank_tokens <= CPU_TOKENS or choice.batch_size == 1
        else:
            fits = (1 + MARGIN) * total_bytes(choice, ranks) <= free
        if fits:
            return choice
    return None


def needs(cfg, ranks, free):
    """What was compared with what."""
    if free is None:
        return f"up to {CPU_TOKENS:,} tokens, as memory is counted of CUDA devices alone"
    size = total_bytes(cfg, ranks) / GIB
    return f"{size:.1f} GiB by estimate and {MARGIN:.0%} more of {free / GIB:.1f} free"


def describe(cfg, ranks, parameters=None, optimizer=None):
    """The estimate in words.

    parameters: of the model, whose activations are unknown if it was edited. optimizer: the name of
    one whose states are not known.
    """
    counted, _ = total_and_block_parameters(cfg)
    parameters = parameters or counted
    if not moment_bytes(cfg):
        optimizer = optimizer or cfg.optimizer
    each = 2 * weight_bytes(cfg)
    what = f"weights and gradients; the states of {optimizer}, and activations,"
    if not optimizer:
        each += moment_bytes(cfg)
        what = "weights, gradients and optimizer states"
    where = "of the host's memory " if cfg.offload_states else ""
    size = each * parameters / shards_of(cfg, ranks) / GIB
    words = f"{size:.2f} GiB {where}a rank for {what}"
    if optimizer:
        return f"{words} are not estimated"
    if not_estimated(cfg) or parameters != counted:
        return f"{words}; activations are not estimated"
    return f"{words}, about {total_bytes(cfg, ranks) / GIB:.1f} GiB of a GPU in all"


def not_estimated(cfg):
    """Problems, one line each: settings for which the estimate does not hold ("auto" is none)."""
    # and neither PyTorch's own operations nor T x T matrices
    why = "the arithmetic counts the fused kernels"
    found = []
    if cfg.ops == "torch":
        found.append(f"ops=torch: {why}; try --ops=auto")
    if cfg.attention == "math":
        found.append(f"attention=math: {why}; try --attention=auto")
    if not moment_bytes(cfg):
        found.append(f"optimizer={cfg.optimizer}: its states are not known; try --optimizer=adamw")
    if cfg.precision in ("fp32", "tf32", "fp16"):
        found.append(
            f"precision={cfg.precision}: the arithmetic is for bf16, fp8; try --precision=bf16"
        )
    return found


def advice(cfg, ranks, budget):
    """What to change after a run was out of memory; budget: bytes of the GPU."""
    if cfg.batch_size == "auto":
        why = (
            "batch_size=auto counts neither an edit of model.py nor what other processes take later"
        )
        return f"out of memory: {why}; give a number below the one that it chose"
    need = total_bytes(cfg, ranks)
    why = f"this takes about {need / GIB:.1f} GiB of {budget / GIB:.1f} a GPU by estimate"
    if need < 0.9 * budget and not not_estimated(cfg):
        why += " (is another process on it? see nvidia-smi)"
    return f"out of memory: {why}; try a smaller --batch_size, or {LESS}"
