"""Speed of a run by arithmetic, and a search for the fastest settings of parallel, remat and so on that fit in memory.

    python bench.py plan config/llama3_8b.py --world=8 --gpu_gib=80

Needs no torch. The order of two candidates is more reliable than the figure of either.
"""

import dataclasses
import itertools

from configurator import UserError
from scale import memory
from settings import check, legal


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU, its links and its host reach in training steps: FLOP/s, bytes/s. measure/rates.py has others."""

    matmul: float
    matmul_fp8: float | None  # None: the GPU has no fp8
    attention: float  # counts the causal half alone
    memory: float  # HBM
    link: float  # NCCL's bus in a node
    all_to_all: float
    host: float  # copies between GPU and host, pinned
    cpu: float  # the host's own memory, shared by its ranks


# in this repository's steps (docs/results.md); the last is assumed: half of the data sheet of two sockets
H200 = Rates(680e12, 1250e12, 540e12, 3.6e12, 320e9, 170e9, 45e9, 300e9)
PAGEABLE = 0.2  # assumed: share of `host` that copies to memory that is not pinned reach
HIDDEN = 0.8  # share of a step's computation that can hide communication
SLOWED = (
    0.5  # share of hidden communication's time that it costs all the same: it takes SMs, bandwidth and power
)
LAUNCH = 1e-4  # seconds a layer and micro-step during which no kernel runs
HOST, HOST_FP8 = 3.2e-3, 4.9e-3  # seconds that an H200's host takes to launch a block's forward and backward


def seconds(cfg, ranks, rates=H200):
    """{part: seconds} of an optimizer step on `ranks` GPUs of one node, for a settings.Config."""
    micros, amount = cfg.micro_steps(ranks), work(cfg, ranks)
    parts = {
        "matmul": amount["matmul"] / (rates.matmul_fp8 if cfg.precision == "fp8" else rates.matmul),
        "attention": amount["attention"] / rates.attention,
        "elementwise": amount["elementwise"] / rates.memory + micros * cfg.n_layer * LAUNCH,
    }
    parts["communication, exposed"] = exposed(cfg, ranks, micros, sum(parts.values()), rates)
    launching = micros * cfg.n_layer * (HOST_FP8 if cfg.precision == "fp8" else HOST)
    if not cfg.cuda_graph and (waiting := launching - sum(parts.values())) > 0:
        parts["waiting for the host"] = waiting
    if cfg.offload_states:
        parts["update on the CPU, copies"] = on_cpu(cfg, ranks, micros, rates)
    return parts


def work(cfg, ranks):
    """What a rank does in an optimizer step: {"matmul", "attention": FLOPs, "elementwise": bytes read and written}."""
    micros, tokens = cfg.micro_steps(ranks), cfg.rank_tokens
    total, _ = memory.parameter_counts(cfg)
    C, L, T = cfg.n_embd, cfg.n_layer, cfg.block_size
    products = sum(n * k for n, k in cfg.block_matmuls)
    again = recomputed(cfg, products)
    flops = 2 * tokens * (L * (3 * products + again * products) + 3 * cfg.padded_vocab * C)
    attention = 2 * tokens * C * T * L * (3.5 + (cfg.remat == "block") / cfg.remat_every)
    moved = tokens * L * (64 * C + 28 * cfg.hidden) * (1 + again / 3) * (1.3 if cfg.precision == "fp8" else 1)
    shards = memory.shards_of(cfg, ranks)
    around = 4 * gathers(cfg, micros) / micros + 2 + memory.bytes_of_sum(cfg)  # copies around collectives
    copies = around * total if shards > 1 else 0
    # beside the update, clipping reads gradients twice and writes them once
    states = (
        0
        if cfg.offload_states
        else total / shards * 3 * memory.bytes_of_weight(cfg) + update_bytes(cfg, ranks)
    )
    elementwise = micros * (moved + copies) + states
    return {"matmul": micros * flops, "attention": micros * attention, "elementwise": elementwise}


def update_bytes(cfg, ranks):
    """Bytes that the update of a rank's shard moves: it reads gradients, and reads and writes weights and moments."""
    each = 3 * memory.bytes_of_weight(cfg) + 2 * memory.bytes_of_moments(cfg)
    return each * memory.parameter_counts(cfg)[0] / memory.shards_of(cfg, ranks)


def recomputed(cfg, products):
    """Share of a block's GEMM FLOPs that the backward computes again; selective: the MLP's first GEMM."""
    share = {"none": 0.0, "selective": cfg.mlp_width * cfg.n_embd / products}.get(cfg.remat, 1.0)
    return share / cfg.remat_every


def exposed(cfg, ranks, micros, compute, rates):
    """Seconds of collectives and host copies that `compute` seconds of computation do not hide."""
    ring = (ranks - 1) / ranks / rates.link
    total, block = memory.parameter_counts(cfg)
    tokens, shards = cfg.rank_tokens, memory.shards_of(cfg, ranks)
    small, summed = 2 if cfg.precision in ("bf16", "fp8") else 4, memory.bytes_of_sum(cfg)
    gathered = small * total - (cfg.n_layer * block if memory.gathers_8_bits(cfg, shards) else 0)
    hidden = open_ = 0.0
    if shards > 1:
        hidden = (gathers(cfg, micros) * gathered + micros * summed * total) * ring
    elif ranks > 1:
        hidden = 2 * summed * total * ring
    kept = tokens * memory.kept_per_token(cfg) * cfg.n_layer / cfg.remat_every if cfg.remat_offload else 0
    copied = micros * kept * 2 + state_copies(cfg, ranks, micros)[1]
    open_ += max(0.0, copied / rates.host - HIDDEN * compute)
    if cfg.context_parallel > 1:
        traded = 2 * tokens * (cfg.qkv_width + cfg.n_embd) * (cfg.context_parallel - 1) / cfg.context_parallel
        open_ += micros * cfg.n_layer * traded * (2 + (cfg.remat != "none")) / rates.all_to_all
    ends = (summed + small) * cfg.padded_vocab * cfg.n_embd * ring if shards > 1 else 0  # first and last unit
    return max(SLOWED * hidden, hidden - HIDDEN * compute) + micros * ends + open_


def on_cpu(cfg, ranks, micros, rates):
    """Seconds of a step with offload_states in which the GPU waits for the host.

    The CPU computes the norm and the update from its memory, which bounds both. After a step's first micro-step FSDP2
    copies gradients through memory that is not pinned, adds them up on the CPU, and waits for both; hsdp adds them up
    on the GPU and copies the sum (torch.distributed.fsdp, foreach_reduce).
    """
    cpu = rates.cpu / sharing(ranks)
    gradients = memory.bytes_of_weight(cfg) * memory.parameter_counts(cfg)[0] / memory.shards_of(cfg, ranks)
    again = 0 if cfg.parallel == "hsdp" else micros - 1
    adding = again * gradients * (1 / (PAGEABLE * rates.host) + 3 / cpu)
    return (
        state_copies(cfg, ranks, micros)[0] / rates.host
        + adding
        + (gradients + update_bytes(cfg, ranks)) / cpu
    )


def sharing(ranks):
    """Ranks among which a host's memory bandwidth is shared; alone, a rank has half: it lies on one of two sockets."""
    return max(2, memory.ranks_of_host(ranks))


def state_copies(cfg, ranks, micros):
    """Bytes that offload_states copies in a step over pinned memory: (while the GPU waits, beside its computation).

    Each gather first copies this rank's shard to the GPU, in the weights' dtype: in a stream of its own, except that
    zero2 gathers all units at the start of the step (parallel.gather_all) and that FSDP2 without other ranks to gather
    from copies in the stream that computes. Gradients go back in the weights' dtype, once in a stream of their own.
    """
    if not cfg.offload_states:
        return 0, 0
    shards = memory.shards_of(cfg, ranks)
    each = memory.bytes_of_weight(cfg) * memory.parameter_counts(cfg)[0] / shards
    weights = gathers(cfg, micros) * each
    return (weights, each) if cfg.parallel == "zero2" or shards == 1 else (0, weights + each)


def gathers(cfg, micros):
    """How often FSDP2 gathers the parameters in a step."""
    return 1 if cfg.parallel == "zero2" else 2 * micros


def candidates(cfg, ranks):
    """Legal combinations of the settings that decide memory and speed; the other settings stay as in cfg."""
    splits = [n for n in range(1, ranks + 1) if ranks % n == 0]
    recompute = [("none", 1), *((r, e) for r in ("selective", "attention", "block") for e in (2, 1))]
    for kind, split, (kept, every), tile, offload in itertools.product(
        ways_to_shard(cfg, ranks), splits, recompute, (None, 16_384), (False, True)
    ):
        options = dict(
            context_parallel=split, remat=kept, remat_every=every, remat_tile=tile, remat_offload=offload
        )
        rows = 1
        while rows * cfg.block_size * ranks // split <= cfg.batch_tokens and rows <= 256:
            found = spread(cfg, kind, batch_size=rows, **options)
            rows *= 2
            if legal(found, ranks) and (
                tile is None or tile < found.rank_tokens
            ):  # a larger tile changes nothing
                yield found


def ways_to_shard(cfg, ranks):
    """Values of `parallel` that make a difference for so many ranks; on one host, hsdp does with offload_states."""
    if not memory.is_sharded(dataclasses.replace(cfg, parallel="fsdp"), ranks):
        return ("ddp",)
    one_host = cfg.offload_states and ranks == memory.ranks_of_host(ranks)
    return ("ddp", "zero2", "fsdp") + ("hsdp",) * one_host


def spread(cfg, kind, **options):
    """cfg with parallel=kind and other options; shard_size is dropped where only hsdp takes it."""
    return dataclasses.replace(
        cfg, parallel=kind, shard_size=cfg.shard_size if kind == "hsdp" else None, **options
    )


def search(cfg, ranks, budget, rates=H200):
    """[(seconds a step, bytes a rank, cfg)], fastest first, of the candidates that take at most `budget` bytes a GPU.

    Raises UserError if no candidate is legal.
    """
    sizes = [(memory.takes(other, ranks), other) for other in candidates(cfg, ranks)]
    if not sizes:
        check(dataclasses.replace(cfg, batch_size=1), ranks)
        raise UserError(
            f"no setting is legal for {ranks} ranks and batch_tokens={cfg.batch_tokens}; try others"
        )
    found = [
        (sum(seconds(other, ranks, rates).values()), takes, other)
        for takes, other in sizes
        if takes <= budget
    ]
    return sorted(found, key=lambda f: (f[0], f[1]))


def as_flags(cfg, base):
    """The settings in which cfg differs from base, as on a command line; "as given" where none does."""
    pairs = [(f.name, getattr(cfg, f.name)) for f in dataclasses.fields(cfg)]
    return (
        " ".join(f"--{name}={value}" for name, value in pairs if value != getattr(base, name)) or "as given"
    )
