"""The GPU memory that a run will take, by arithmetic alone: `bench.py memory` needs neither a GPU nor torch.

Counts bytes on a rank, with the fused kernels in bf16 or fp8, in the loss, a block's backward and the update.
"""

import bisect
import dataclasses
import math

import fast
from errors import UserError, launched, this_rank

GIB = 2**30
GROUP = 256  # elements that share a float32 scale in adamw8bit's moments, as in its module
OPTIMIZERS = ("adamw", "adamw8bit", "muon")  # whose states are counted
MARGIN = 0.1  # of the estimate, that batch_size=auto leaves free: it was within 9% of all measured peaks
CPU_TOKENS = 2048  # in a micro-batch of batch_size=auto without a GPU, as in config/quickstart.py
PINNED_EXACTLY = 2**26  # bytes of a kept tensor from which its host memory is no power of two, see remat.py
UNIT_MIB = 100  # blocks that FSDP2 gathers as one unit take up to this in 16 bits; 0: a block a unit


def estimate(cfg, ranks):
    """{part: bytes of GPU memory on a rank} for a Config and `ranks` processes; on_host counts the host's."""
    (total, block), (own, summed, moments) = parameter_counts(cfg), bytes_of_parameter(cfg)
    shards, sharded = shards_of(cfg, ranks), cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)
    here = 0 if cfg.offload_states else total / shards
    states = {"parameters": own * here, "gradients": own * here, "optimizer": moments * here}
    parts = dict(states)
    if cfg.optimizer == "muon":
        states["updates"] = 2 * cfg.n_layer * block / shards  # of the blocks' matrices, beside all gradients
    again = len(blocks_again(cfg, cfg.n_layer))
    on_gpu = min(2, again) if cfg.remat_offload else again  # blocks, while the others wait on the host
    tokens = (cfg.n_layer - again) * sum(kept(cfg, "none")) + on_gpu * sum(kept(cfg, cfg.remat))
    activations = cfg.rank_tokens * tokens
    several = cfg.batch_tokens > cfg.micro_tokens(ranks)  # micro-steps
    if sharded and not several:  # gradients grow while activations are freed
        parts["gradients"] = max(0, parts["gradients"] - activations)
    elif cfg.offload_states and cfg.parallel == "hsdp":
        parts["gradients"] = summed * total / shards  # added up on the GPU until the last micro-step
    elif several and ranks > 1 and not sharded and cfg.cuda_graph is not True:
        parts["gradients"] *= 2  # .grad, and DDP's buckets, to which they are copied in the last micro-step
    parts["gathered"] = gathered(cfg, shards) if sharded else 0
    small = 1 if cfg.precision == "fp8" else 2  # fp8 keeps the transposes alone
    if not gathers_8_bits(cfg, shards) and (2 if sharded else own) != small:
        parts["gathered"] += small * (cfg.n_layer - again) * block  # casts, kept until the backward
    parts["activations"] = activations
    parts["loss or a block's backward"] = max(loss_bytes(cfg), backward_bytes(cfg, again))
    most = max(parts, states, key=lambda moment: sum(moment.values()))
    return {name: int(size) for name, size in most.items()}


def blocks_again(cfg, n_layer):
    """Indices of the blocks that remat computes again: each remat_every-th, which may be a fraction."""
    if cfg.remat == "none":
        return []
    every = 1 if cfg.remat_every == "auto" else cfg.remat_every  # all, while it is not chosen
    count = math.ceil(n_layer / every - 1e-6)
    return [int(i * every + 1e-6) for i in range(count)]


def takes(cfg, ranks):
    """Total of the estimate, in bytes."""
    return sum(estimate(cfg, ranks).values())


def parameter_counts(cfg):
    """Parameters (of the model, of a block without a table): shared weights once, padding rows included."""
    C = cfg.n_embd
    norm = C * (1 + (cfg.norm == "layernorm" and cfg.bias))
    linears = sum(n * k + n * cfg.bias for n, k in cfg.block_matmuls)
    block = 2 * norm + linears + 2 * cfg.head_size * cfg.qk_norm + cfg.n_head * cfg.gate_channels
    tables = cfg.padded_vocab * sum(cfg.tables) + C * cfg.block_size * (cfg.positions == "learned")
    return tables + cfg.n_layer * block + norm, block


def bytes_of_parameter(cfg):
    """Bytes of (a weight or its gradient, a gradient in the sum over ranks, optimizer state on average).

    The states of an optimizer that is none of ours are not known, and count nothing.
    """
    total, block = parameter_counts(cfg)
    moments = {"adamw": 8, "adamw8bit": 2 * (1 + 4 / GROUP), "muon": 8 - 4 * cfg.n_layer * block / total}
    own, summed = (2 if dtype == "bf16" else 4 for dtype in (cfg.weights, cfg.reduce_dtype))
    return own, summed, moments.get(cfg.optimizer, 0)


def gathered(cfg, shards):
    """FSDP2's buffers in 16 bits: weights of two units and the head (zero2: all), a unit's gradients."""
    (total, block), (_, summed, _) = parameter_counts(cfg), bytes_of_parameter(cfg)
    table = cfg.padded_vocab * cfg.kv_heads * cfg.head_size  # gathered with its block
    several = 0 if cfg.remat in ("block", "attention") else UNIT_MIB * 2**19  # parameters of a unit of blocks
    unit = max(block + table * bool(cfg.value_layers), several)
    head = cfg.padded_vocab * cfg.n_embd
    whole = 2 * (total if cfg.parallel == "zero2" else head + unit * min(2, shards))
    if shards == 1:  # nothing to gather from other ranks ahead of its use, and nothing to reduce
        return whole
    return whole + (2 + summed) * max(unit, head) * (1 + 1 / shards)


def loss_bytes(cfg):
    """Bytes while the loss is computed: a chunk of logits, gradients of the hidden state and the head."""
    tokens, (own, *_) = cfg.rank_tokens, bytes_of_parameter(cfg)
    logits = min(fast.LOGITS_MIB * 2**20, 2 * tokens * cfg.padded_vocab) * (1 + (cfg.precision == "fp8"))
    return logits + tokens * cfg.n_embd * 2 + own * cfg.padded_vocab * cfg.n_embd


def backward_bytes(cfg, again):
    """Working memory of a block's backward: gradients, and activations where they are computed again."""
    C, A, tokens = cfg.n_embd, cfg.attention_width, cfg.rank_tokens
    wide, tile = 2 * (2 * cfg.mlp_width + 2 * cfg.hidden), min(tokens, cfg.remat_tile or tokens)
    if not again or cfg.remat == "selective":
        return tile * wide + tokens * 2 * 3 * C
    # attention: q, k, v before and after RoPE; x, y, norm_1(x), three gradients; dq, dk, dv, dq in float32
    attention = (6 if cfg.positions == "rope" else 4) * cfg.qkv_width + 8 * A + 8 * C
    # MLP: the pre-activation, its gradient and the activation's; x, y, norm_2(x), three gradients
    return max(tokens * attention, tile * (wide - 2 * cfg.hidden) + tokens * 2 * 6 * C)


def kept(cfg, remat):
    """[Bytes a token] of the tensors that a block keeps for its backward."""
    C, A, fp8 = cfg.n_embd, cfg.attention_width, cfg.precision == "fp8"
    if remat in ("block", "attention"):  # its input; attention's output and logsumexp
        return [2 * C] + [2 * A, 4 * cfg.n_head] * (remat == "attention")
    sizes = [4 * C, 2 * C if fp8 else 4 * C, 16]  # the residual stream before both norms, and their outputs
    sizes += [2 * cfg.qkv_width, 2 * A, 4 * cfg.n_head]  # q, k, v, attention's output and logsumexp
    sizes += [2 * (cfg.n_head + cfg.kv_heads) * cfg.head_size * cfg.qk_norm]  # q and k before their norm
    sizes += [2 * A * cfg.attention_gate, A * fp8]  # the output before its gates, and in 8 bits
    sizes += [2 * A * (cfg.context_parallel > 1)]  # the output of this rank's heads, before their exchange
    if remat == "selective":
        return [*sizes, C * fp8]  # the MLP's input in bf16
    # the pre-activation, of relu2 its square alone; in bf16 GELU's output, in 8 bits that of each activation
    before = cfg.hidden if fp8 and cfg.mlp == "relu2" else 2 * cfg.mlp_width
    return [*sizes, before, cfg.hidden if fp8 else 2 * cfg.hidden * (cfg.mlp == "gelu")]


def units(sizes, apart):
    """FSDP2's units, lists of block indices. apart: one each, as where a block does not run exactly once."""
    found = []
    for block, size in enumerate(sizes):
        if apart or not found or 2 * (sum(sizes[i] for i in found[-1]) + size) > UNIT_MIB * 2**20:
            found.append([])
        found[-1].append(block)
    return found


def gathers_8_bits(cfg, shards):
    """Whether FSDP2 gathers the blocks' weights in fp8: each matrix and its transpose, the bytes of bf16."""
    return cfg.precision == "fp8" and shards > 1 and not cfg.offload_states


def shards_of(cfg, ranks):
    """Ranks among which one copy of the model is sharded."""
    return {"ddp": 1, "hsdp": cfg.shard_size or ranks_of_host(ranks)}.get(cfg.parallel, ranks)


def ranks_of_host(ranks):
    """Of `ranks`, how many run on one host: as torchrun says, else up to 8."""
    return this_rank().local_size if launched() else min(8, ranks)


def on_host(cfg, ranks):
    """{part: bytes of the host's memory on a rank}; all but moments pinned, by PyTorch in powers of two."""
    parts, shards, (own, _, moments) = {}, shards_of(cfg, ranks), bytes_of_parameter(cfg)
    pinned = lambda size: 2 ** (size - 1).bit_length()
    if cfg.offload_states:
        tables = [(cfg.padded_vocab, width) for width in cfg.tables]
        tables += [(cfg.block_size, cfg.n_embd)] if cfg.positions == "learned" else []
        shapes = cfg.block_matmuls * cfg.n_layer + tables
        weights = sum(pinned(own * -(-rows // shards) * width) for rows, width in shapes)
        parts = {"parameters": weights, "gradients": weights}
        parts["optimizer"] = int(moments * parameter_counts(cfg)[0] / shards)
    if cfg.remat_offload:
        sizes = [cfg.rank_tokens * each for each in kept(cfg, cfg.remat)]
        sizes = [size if size >= PINNED_EXACTLY else pinned(size) for size in sizes]
        parts["activations"] = sum(sizes) * len(blocks_again(cfg, cfg.n_layer))
    return parts


def largest_batch(cfg, ranks, budget, name="batch_size", step=1):
    """The largest batch_size, or setting `name`, whose estimate is within `budget` bytes, 0 if none is."""
    over = lambda n: takes(dataclasses.replace(cfg, **{name: n * step}), ranks) > budget
    return step * bisect.bisect_left(range(1, 2**20), True, key=over)


def choose_batch(cfg, ranks, free):
    """(batch_size, reason) for batch_size=auto: the largest divisor of a rank's rows in a step that fits.

    free: bytes of a GPU; None: no GPU, where a micro-batch has up to CPU_TOKENS. Raises UserError.
    """
    tokens = math.gcd(*(tokens for tokens, _ in cfg.stages))  # a micro-batch divides each stage's step
    rows = tokens // (cfg.block_size * (ranks // cfg.context_parallel))
    sizes = [dataclasses.replace(cfg, batch_size=n) for n in range(rows, 0, -1) if rows % n == 0]
    which = f"the largest divisor of a rank's {rows:,} rows a step"
    if free is None:
        found = next((one for one in sizes if one.rank_tokens <= CPU_TOKENS), sizes[-1])
        why = f"{which} with up to {CPU_TOKENS:,} tokens; memory is counted of CUDA devices alone"
        return found.batch_size, why
    if unknown := not_estimated(cfg):
        raise UserError(f"batch_size=auto: {unknown[0].partition(';')[0]}; give a number")
    fits = lambda one: (1 + MARGIN) * takes(one, ranks) <= free
    found = next(filter(fits, sizes), sizes[-1])
    size = f"{takes(found, ranks) / GIB:.1f} GiB by estimate and {MARGIN:.0%} more"
    if fits(found):
        return found.batch_size, f"{which} that fits: {size} of {free / GIB:.1f} free"
    for kind in ("selective", "attention", "block"):
        if fits(dataclasses.replace(found, remat=kind)):
            advice = f"--remat={kind}"
            break
    else:
        advice = "--parallel=fsdp on more GPUs or with --offload_states"
        if cfg.weights == "fp32":
            advice = f"--optimizer=adamw8bit --weights=bf16, or {advice}"
    raise UserError(f"batch_size=auto: one row takes {size}, {free / GIB:.1f} GiB are free; try {advice}")


def choose_remat(cfg, ranks, free):
    """(remat_every, reason) for remat_every=auto: as few blocks are computed again as the memory allows.

    free: bytes of a GPU; None: no GPU, where it is every block.
    """
    if free is None or not_estimated(cfg):
        return 1.0, "every block: the arithmetic is for bf16 and fp8 on CUDA devices, with the fused kernels"
    for again in range(1, cfg.n_layer + 1):
        one = dataclasses.replace(cfg, remat_every=cfg.n_layer / again)
        size = takes(one, ranks)
        if (1 + MARGIN) * size <= free:
            break
    words = f"{again} of {cfg.n_layer} blocks: {size / GIB:.1f} GiB by estimate of {free / GIB:.1f} free"
    return one.remat_every, words


def longest_row(cfg, ranks, budget):
    """The largest block_size that fits with batch_size=1, in steps of 1,024 a rank, 0 if none does."""
    one = dataclasses.replace(cfg, batch_size=1)
    return largest_batch(one, ranks, budget, "block_size", 1024 * cfg.context_parallel)


def describe(cfg, ranks, parameters=None, optimizer=None):
    """The estimate in words. parameters: of the model, whose activations are unknown if it was edited.

    optimizer: the name of one whose states are not known.
    """
    (counted, _), (own, _, moments) = parameter_counts(cfg), bytes_of_parameter(cfg)
    states = (2 * own + moments) * (parameters or counted) / shards_of(cfg, ranks) / GIB
    where = "of the host's memory " if cfg.offload_states else ""
    words = f"{states:.2f} GiB {where}a rank for weights, gradients and optimizer states"
    if optimizer or cfg.optimizer not in OPTIMIZERS:
        states = 2 * own * (parameters or counted) / shards_of(cfg, ranks) / GIB
        words = f"{states:.2f} GiB {where}a rank for weights and gradients; the states of"
        return f"{words} {optimizer or cfg.optimizer}, and activations, are not estimated"
    if uncounted(cfg) or parameters not in (None, counted):
        return words + "; activations are not estimated"
    return words + f", about {takes(cfg, ranks) / GIB:.1f} GiB of a GPU in all"


def uncounted(cfg):
    """Problems, one line each: the settings with operations that keep more than the estimate counts."""
    other = ("ops", "torch"), ("attention", "math")  # PyTorch's own operations, T x T matrices
    why = "the arithmetic counts the fused kernels"
    found = [f"{k}={v}: {why}; try --{k}=auto" for k, v in other if getattr(cfg, k) == v]
    if cfg.optimizer not in OPTIMIZERS:
        found.append(f"optimizer={cfg.optimizer}: its states are not known; try --optimizer=adamw")
    return found


def not_estimated(cfg):
    """Problems, one line each: the settings, precision resolved, for which the estimate does not hold."""
    found = uncounted(cfg)
    if cfg.precision not in ("bf16", "fp8"):
        found.append(f"precision={cfg.precision}: the arithmetic is for bf16, fp8; try --precision=bf16")
    return found


def advice(cfg, ranks, budget):
    """What to change after a run was out of memory; budget: bytes of the GPU."""
    if cfg.batch_size == "auto":
        why = "batch_size=auto counts neither an edit of model.py nor what other processes take later"
        return f"out of memory: {why}; give a number below the one that it chose"
    need, copies = takes(cfg, ranks), ranks > 1 and cfg.parallel == "ddp"
    other = " (is another process on it? see nvidia-smi)" * (need < 0.9 * budget and not uncounted(cfg))
    remat = "--remat=selective" if cfg.remat == "none" else "--remat=block"
    states = "--parallel=fsdp" if copies else "--optimizer=adamw8bit --weights=bf16"
    why = f"this takes about {need / GIB:.1f} GiB of {budget / GIB:.1f} a GPU by estimate{other}"
    return f"out of memory: {why}; try a smaller --batch_size, {remat} or {states}"
