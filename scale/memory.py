"""GPU memory that a run will take, by arithmetic alone: it needs neither a GPU nor torch.

    python bench.py memory config/llama3_8b.py --world=8 --gpu_gib=80

Counts what the fast forms (--ops=fused) in bf16 and fp8 keep, in bytes a rank, at the three moments where a step may
have its peak: when the loss is computed, in the backward of the last block, and in the optimizer's update. The tests
compare the constants below with the modules that they describe, and the parameter counts with real models.
"""

import contextlib
import dataclasses
import os
import re
from pathlib import Path

from configurator import UserError

GIB = 2**30
WORKSPACE = 2**25  # bytes of cuBLAS's workspace
UNIT_MIB = (
    100  # parallel.shard gathers consecutive blocks as one unit up to this size in 16 bits; 0: a block a unit
)
HELD, WANTED = (
    r"(\S+) ([KMG])iB is allocated by PyTorch",
    r"Tried to allocate (\S+) ([KMG])iB",
)  # in PyTorch's words
GROUP = 256  # elements that share a float32 scale in adamw8bit's moments, as in fast/adamw8bit.py


def estimate(cfg, ranks):
    """{part: bytes of GPU memory on a rank} for a settings.Config and `ranks` processes.

    Offloaded states do not count (on_host does). 8-bit states are counted as if no tensor were small enough to stay in
    float32.
    """
    total, block = parameter_counts(cfg)
    rest = total - cfg.n_layer * block - cfg.padded_vocab * sum(cfg.value_tables)
    shards, sharded, own = shards_of(cfg, ranks), is_sharded(cfg, ranks), bytes_of_weight(cfg)
    tokens = cfg.rank_tokens
    here = 0 if cfg.offload_states else total / shards
    states = {"parameters": own * here, "gradients": own * here, "optimizer": bytes_of_moments(cfg) * here}
    rope_tables = 8 * cfg.block_size * cfg.head_dim if cfg.positions == "rope" else 0
    states["buffers"] = WORKSPACE + rope_tables
    parts = dict(states)
    if cfg.optimizer == "muon":
        states["updates"] = 2 * cfg.n_layer * block / shards  # of the blocks' matrices, beside all gradients
    several = cfg.batch_tokens > cfg.micro_tokens(ranks)  # micro-steps
    if sharded and not several:
        parts["gradients"] = 0  # of a single micro-step: they grow while activations are freed
    elif cfg.offload_states and cfg.parallel == "hsdp":
        parts["gradients"] = (
            bytes_of_sum(cfg) * total / shards
        )  # added up on the GPU until the last micro-step
    elif several and ranks > 1 and not sharded and not cfg.cuda_graph:
        parts["gradients"] *= 2  # .grad, and DDP's buckets, to which they are copied in the last micro-step
    again = (
        0 if cfg.remat == "none" else -(-cfg.n_layer // cfg.remat_every)
    )  # blocks under activation checkpointing
    parts["gathered"] = gathered(cfg, total, block, rest, shards) if sharded else 0
    if not gathers_8_bits(cfg, shards):
        parts["gathered"] += copied(cfg, (cfg.n_layer - again) * block, 2 if sharded else own)
    waits = cfg.remat_offload and again > 2 and cfg.remat in ("attention", "block")
    kept = 2 if waits else again  # two blocks on the GPU while the others wait on the host
    parts["activations"] = tokens * (
        (cfg.n_layer - again) * block_per_token(cfg) + kept * kept_per_token(cfg)
    )
    parts["loss or a block's backward"] = max(
        loss_bytes(cfg, tokens, own), backward_bytes(cfg, tokens, again)
    )
    most = max(parts, states, key=lambda moment: sum(moment.values()))
    return {name: int(size) for name, size in most.items()}


def on_host(cfg, ranks):
    """{part: bytes of the host's memory that a rank takes} with offload_states or remat_offload; {} without either.

    All but moments is pinned, in blocks of a power of two, which is how PyTorch allocates pinned memory.
    """
    parts, (total, _), shards, own = {}, parameter_counts(cfg), shards_of(cfg, ranks), bytes_of_weight(cfg)
    if cfg.offload_states:
        tables = [(cfg.padded_vocab, width) for width in cfg.tables]
        tables += [(cfg.block_size, cfg.n_embd)] if cfg.positions == "learned" else []
        sizes = [own * -(-rows // shards) * width for rows, width in cfg.block_matmuls * cfg.n_layer + tables]
        pinned = sum(map(power_of_2, sizes))
        parts = {
            "parameters": pinned,
            "gradients": pinned,
            "optimizer": int(bytes_of_moments(cfg) * total / shards),
        }
    if cfg.remat_offload:
        kept = sum(power_of_2(cfg.rank_tokens * each) for each in kept_tensors(cfg))
        parts["activations"] = kept * -(-cfg.n_layer // cfg.remat_every)
    return parts


def power_of_2(size):
    """The least power of two that is at least `size`."""
    return 2 ** (size - 1).bit_length()


def host_limit():
    """Bytes of memory that all processes of this machine, or of its container, may take; None where Linux says none."""
    total, limit = ("/proc/meminfo", r"MemTotal: +(\d+) kB", 1024), ("/sys/fs/cgroup/memory.max", r"(\d+)", 1)
    found = []
    for path, pattern, unit in (total, limit):
        with contextlib.suppress(OSError):
            found += [unit * int(size) for size in re.findall(pattern, Path(path).read_text())[:1]]
    return min(found, default=None)


def refuse_beyond_host(cfg, ranks, parameters=0):
    """Raises UserError if a run puts more into the host's memory than there is; Linux would end it without a word.

    Counted are what offload_states and remat_offload put there and, on a CPU, the states of this many parameters (0 on
    a GPU): themselves, their gradients and moments.
    """
    parts, limit, here = on_host(cfg, ranks), host_limit(), ranks_of_host(ranks)
    causes = [f"--{name}" for name in ("offload_states", "remat_offload") if getattr(cfg, name)]
    remedy = "leave it out" if causes else "train a smaller model"
    if parameters and not cfg.offload_states:
        parts["states"] = (
            parameters * (2 * bytes_of_weight(cfg) + bytes_of_moments(cfg)) / shards_of(cfg, ranks)
        )
        causes.append(f"{parameters:,} parameters, their gradients and moments")
    if limit and (need := here * sum(parts.values())) > limit:
        raise UserError(
            f"{' and '.join(causes)} would take about {need / GIB:.0f} GiB of this host's memory for {here} "
            f"rank{'s' * (here > 1)}; there are {limit / GIB:.0f}; {remedy}, or take a host with more"
        )


def takes(cfg, ranks):
    """Total of the estimate, in bytes."""
    return sum(estimate(cfg, ranks).values())


def describe(cfg, ranks, parameters=None, usual=True):
    """The estimate in words, for the start of a run; the total only where the operations are those that it counts.

    parameters: the number that the model really has. usual: its FLOPs are those that the settings say; in an edited
    model.py either may differ.
    """
    counted = parameter_counts(cfg)[0]
    each = 2 * bytes_of_weight(cfg) + bytes_of_moments(cfg)
    states = each * (parameters or counted) / shards_of(cfg, ranks) / GIB
    where = "of the host's memory " if cfg.offload_states else ""
    words = f"{states:.2f} GiB {where}a rank for weights, gradients and optimizer states"
    if cfg.offload_states and parameters in (None, counted):
        pinned = sum(on_host(dataclasses.replace(cfg, remat_offload=False), ranks).values())
        words += f" ({pinned / GIB:.2f} with weights and gradients pinned)"
    if parameters not in (None, counted) or not usual:
        return (
            words
            + "; activations are not estimated, since model.py computes something else than the settings say"
        )
    return words + f", about {takes(cfg, ranks) / GIB:.1f} GiB of a GPU in all" * (not uncounted(cfg))


def uncounted(cfg):
    """Problems, one line each: the settings with operations that keep more than the estimate counts."""
    found = ["ops=torch: the arithmetic counts the fast forms; try --ops=auto"] if cfg.ops == "torch" else []
    if cfg.attention == "math":
        found.append("attention=math: the arithmetic does not count its T x T matrices; try --attention=auto")
    return found


def parameter_counts(cfg):
    """(of the model, of a block without a table) by a GPTConfig: shared weights once, padding rows included."""
    C = cfg.n_embd
    norm = C * (1 + (cfg.norm == "layernorm" and cfg.bias))
    linears = sum(n * k + n * cfg.bias for n, k in cfg.block_matmuls)
    block = 2 * norm + linears + 2 * cfg.head_dim * cfg.qk_norm + cfg.n_head * cfg.gate_channels
    tables = cfg.padded_vocab * sum(cfg.tables) + C * cfg.block_size * (cfg.positions == "learned")
    return tables + cfg.n_layer * block + norm, block


def units(sizes, apart):
    """The units of FSDP2, each a list of block indices: blocks gathered together, up to UNIT_MIB in 16 bits.

    sizes: the parameters of each block. apart: a unit for each block, since a unit of several needs each of them to run
    exactly once, in their order.
    """
    found, filled = [], 0
    for block, size in enumerate(sizes):
        if apart or not found or 2 * (filled + size) > UNIT_MIB * 2**20:
            found.append([])
            filled = 0
        found[-1].append(block)
        filled += size
    return found


def runs_blocks_twice(cfg):
    """Whether activation checkpointing computes a block, or the part of it with attention, again in the backward."""
    return cfg.remat in ("block", "attention")


def gathers_8_bits(cfg, shards):
    """Whether FSDP2 gathers the blocks' weights in fp8: both the matrix and its transpose, as many bytes as in bf16."""
    return cfg.precision == "fp8" and shards > 1 and not cfg.offload_states


def is_sharded(cfg, ranks):
    return cfg.parallel != "ddp" and (ranks > 1 or cfg.offload_states)


def shards_of(cfg, ranks):
    """Ranks among which one copy of the model is sharded."""
    if not is_sharded(cfg, ranks):
        return 1
    return (cfg.shard_size or ranks_of_host(ranks)) if cfg.parallel == "hsdp" else ranks


def ranks_of_host(ranks):
    """Of `ranks`, how many run on one host: as torchrun says, which parallel.shard reads too; else up to 8."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", min(8, ranks)))


def bytes_of_weight(cfg):
    return 2 if cfg.weights == "bf16" else 4


def bytes_of_moments(cfg):
    """Bytes of optimizer state for a parameter, on average: Muon keeps one moment of the blocks' matrices."""
    if cfg.optimizer == "muon":
        total, block = parameter_counts(cfg)
        return 8 - 4 * cfg.n_layer * block / total
    return 2 * (1 + 4 / GROUP) if cfg.optimizer == "adamw8bit" else 8


def bytes_of_sum(cfg):
    """Bytes of a gradient's element in the reduction over ranks."""
    return 2 if cfg.reduce_dtype == "bf16" else 4


def gathered(cfg, total, block, rest, shards):
    """FSDP2's buffers: the gathered weights of two units of blocks and the head (zero2: of all), in 16 bits, and one
    unit's gradients before and after the reduction."""
    table = cfg.padded_vocab * cfg.kv_heads * cfg.head_dim  # gathered with its block
    sizes = [block + table * (layer in cfg.value_layers) for layer in range(cfg.n_layer)]
    filled = [sum(sizes[i] for i in unit) for unit in units(sizes, runs_blocks_twice(cfg))]
    unit, two = max(filled), max(a + b for a, b in zip(filled, [*filled[1:], 0]))
    head = rest // (1 if cfg.tie_embeddings else 2)
    whole = 2 * (total if cfg.parallel == "zero2" else head + (unit if shards == 1 else two))
    if shards == 1:  # nothing to gather from other ranks ahead of its use, and nothing to reduce
        return whole
    arriving = (
        cfg.offload_states * bytes_of_weight(cfg) * max(unit, head) / shards
    )  # from the host, not yet cast
    return whole + (2 + bytes_of_sum(cfg)) * max(unit, head) * (1 + 1 / shards) + arriving


def copied(cfg, numbers, own):
    """Casts of the weights of blocks without activation checkpointing, which autocast keeps until the backward."""
    small = 1 if cfg.precision == "fp8" else 2  # fp8 keeps the transposes alone
    return 0 if own == small else small * numbers


def loss_bytes(cfg, tokens, own):
    """Bytes while the loss is computed: a chunk of logits, the hidden state's gradient and the head's gradient."""
    logits = min(cfg.logits_mib * 2**20, 2 * tokens * cfg.padded_vocab) * (2 if cfg.precision == "fp8" else 1)
    return logits + tokens * cfg.n_embd * 2 + own * cfg.padded_vocab * cfg.n_embd


def backward_bytes(cfg, tokens, again):
    """Working memory of a block's backward: gradients, and activations where they are computed again."""
    C, wide = cfg.n_embd, 2 * (2 * cfg.mlp_width + 2 * cfg.hidden)
    if not again:
        return tokens * (wide + 2 * 3 * C)
    if cfg.remat == "selective":
        return min(tokens, cfg.remat_tile or tokens) * wide + tokens * 2 * 4 * C
    rotated = cfg.qkv_width - cfg.kv_heads * cfg.head_dim if cfg.positions == "rope" else 0
    # attention: q, k, v before and after RoPE; x, y, norm_1(x), three gradients; dq, dk, dv, and dq in float32
    attention = 2 * (cfg.qkv_width + rotated + 6 * C) + 2 * cfg.qkv_width + 4 * C
    # MLP: the pre-activation, its gradient and the activation's; x, y, norm_2(x), three gradients
    mlp = min(tokens, cfg.remat_tile or tokens) * (wide - 2 * cfg.hidden) + tokens * 2 * 6 * C
    return max(tokens * attention, mlp)


def block_per_token(cfg):
    """Bytes a token that a block without activation checkpointing keeps for its backward."""
    C, fp8 = cfg.n_embd, cfg.precision == "fp8"
    residual = 2 * 2 * C  # the residual stream before both norms
    attention = 2 * cfg.qkv_width + 2 * C + 4 * cfg.n_head  # q, k, v, the output, logsumexp
    attention += (
        2 * (cfg.n_head + cfg.kv_heads) * cfg.head_dim if cfg.qk_norm else 0
    )  # q and k before their norm
    attention += 2 * C if cfg.attention_gate else 0  # the output before its gates
    attention += C if fp8 else 0  # the output in 8 bits; in bf16 the projection reads the one above
    return residual + attention + (1 if fp8 else 2) * 2 * C + mlp_per_token(cfg) + 16  # both norms' outputs


def mlp_per_token(cfg):
    """Bytes a token that the inside of an MLP keeps: the pre-activation and the second GEMM's operand."""
    fp8 = cfg.precision == "fp8"
    if cfg.mlp in ("relu2", "swiglu") and not fp8:
        return 2 * cfg.mlp_width  # ReLU^2's output alone; the backward computes silu(gate) * up again
    return 2 * cfg.mlp_width + (1 if fp8 else 2) * cfg.hidden


def kept_per_token(cfg):
    """Bytes a token that a block keeps with cfg.remat; selective: all but the inside of the MLP, its input in bf16."""
    if cfg.remat in ("block", "attention"):
        return sum(kept_tensors(cfg))
    return block_per_token(cfg) - mlp_per_token(cfg) + (cfg.n_embd if cfg.precision == "fp8" else 0)


def kept_tensors(cfg):
    """[Bytes a token] of each tensor that a block keeps with remat=block or attention.

    block: the residual stream before it. attention: attention's output and logsumexp besides.
    """
    stream = 2 * cfg.n_embd
    return [stream, stream, 4 * cfg.n_head] if cfg.remat == "attention" else [stream]


def largest_batch(cfg, ranks, budget):
    """The largest batch_size whose estimate is within `budget` bytes, 0 if none is."""
    return largest(lambda rows: takes(dataclasses.replace(cfg, batch_size=rows), ranks) <= budget)


def longest_row(cfg, ranks, budget):
    """The largest block_size, in steps of 1,024 a rank, that fits `budget` bytes with batch_size=1, 0 if none does."""
    step = 1024 * cfg.context_parallel
    return step * largest(
        lambda n: takes(dataclasses.replace(cfg, batch_size=1, block_size=n * step), ranks) <= budget
    )


def largest(fits):
    """The largest number that fits, up to 2^20, 0 if none does; fits must be monotonic."""
    count = 1
    while fits(count) and count < 2**20:
        count *= 2
    low, high = count // 2, count
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low  # the last that fitted, or 0


def fitting(cfg, ranks, budget, changes, legal):
    """["--batch_size=2 --remat=block", …]: the changes, each {setting: value}, with which some legal batch fits."""
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


def advice(cfg, ranks, budget, legal, error=""):
    """What to change after a run was out of memory, in words.

    budget: bytes of the GPU; legal: as settings.legal; error: PyTorch's, which says how much it held and wanted.
    """
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
    need, held, wanted = takes(cfg, ranks), size_in(error, HELD), size_in(error, WANTED)
    roomy = max(need, held + wanted) < 0.9 * budget and not uncounted(cfg)
    why = f"this takes about {need / GIB:.1f} GiB of {budget / GIB:.1f} a GPU by estimate"
    why += f"; it held {held / GIB:.1f} and wanted {wanted / GIB:.2f} more" if held else ""
    why += ", so that another process may be on it (nvidia-smi)" if roomy else ""
    return f"out of memory: {why}; try {tries}"


def size_in(text, pattern):
    """Bytes of a size such as "190.25 GiB" in a text, 0 without it. pattern: groups are its number and K, M or G."""
    found = re.search(pattern, str(text))
    return float(found[1]) * 1024 ** (1 + "KMG".index(found[2])) if found else 0
