"""How fast a run will be, by arithmetic, and which settings of parallel, remat and so on are the fastest that fit.

    python bench.py plan config/llama3_8b.py --world=8 --gpu_gib=80

The rates are those that H200s reached in this repository's own steps (README, "Repeat the figures"): the order of two
settings is to be trusted more than the figure of either.
"""

import dataclasses
import itertools

import memory
import parallel
import remat
from configurator import UserError
from train import check, legal

MATMUL, MATMUL_FP8, ATTENTION = 680e12, 1250e12, 540e12  # FLOP/s, attention's with the causal half left out
BYTES, LINK, ALL_TO_ALL, HOST = 3.6e12, 320e9, 170e9, 45e9  # bytes/s: memory, NCCL's bus in a node, CP's, pinned
HIDDEN = 0.8  # share of a step's computation that can hide communication
SLOWED = 0.5  # what hidden communication costs all the same, of its time: it takes multiprocessors, memory and power
LAUNCH = 1e-4  # seconds a layer and micro-step between kernels


def seconds(cfg, ranks):
    """{part: seconds} of a whole optimizer step on each of `ranks` GPUs of a node, for a train.Config."""
    micros = max(1, cfg.batch_tokens // cfg.micro_tokens(ranks))
    tokens = cfg.batch_size * cfg.block_size // cfg.context_parallel
    total, block = memory.parameter_counts(*memory.shape_of(cfg))
    C, L, T = cfg.n_embd, cfg.n_layer, cfg.block_size
    fp8 = cfg.precision == "fp8"
    products = sum(n * k for n, k in cfg.block_matmuls)
    again = recomputed(cfg, products)
    flops = 2 * tokens * (L * (3 * products + again * products) + 3 * cfg.padded_vocab * C)
    attention = 2 * tokens * C * T * L * (3.5 + (cfg.remat == "block") / cfg.remat_every)
    parts = {"matmul": micros * flops / (MATMUL_FP8 if fp8 else MATMUL), "attention": micros * attention / ATTENTION}
    moved = tokens * L * (64 * C + 28 * cfg.hidden) * (1 + again / 3) * (1.3 if fp8 else 1)
    shards = memory.shards_of(cfg, ranks)
    around = 4 * gathers(cfg, micros) / micros + 2 + memory.bytes_of_sum(cfg)  # copies before and after collectives
    copies = around * total if shards > 1 else 0
    # the update reads and writes weights and moments and reads gradients, which clipping has read twice and written
    states = 6 * memory.bytes_of_weight(cfg) + 2 * memory.bytes_of_moments(cfg)
    parts["elementwise"] = micros * (moved + copies) / BYTES + total / shards * states / BYTES + micros * L * LAUNCH
    compute = sum(parts.values())
    parts["communication, exposed"] = exposed(cfg, ranks, micros, total, L * block, tokens, compute)
    return parts


def recomputed(cfg, products):
    """Share of a block's matmuls that the backward computes again."""
    wide = sum(n * k for n, k in cfg.block_matmuls if n > remat.WIDE * k)
    share = {"none": 0.0, "selective": wide / products}.get(cfg.remat, 1.0)
    return share / cfg.remat_every


def exposed(cfg, ranks, micros, total, blocks, tokens, compute):
    """Seconds of collectives and copies to the host that nothing hides. blocks: their part of the total parameters."""
    ring = (ranks - 1) / ranks / LINK
    shards = memory.shards_of(cfg, ranks)
    small, summed = 2 if cfg.precision in ("bf16", "fp8") else 4, memory.bytes_of_sum(cfg)
    gathered = small * total - (blocks if parallel.gathers_8_bits(cfg, shards) else 0)
    hidden = open_ = 0.0
    if shards > 1:
        hidden = (gathers(cfg, micros) * gathered + micros * summed * total) * ring
    elif ranks > 1:
        hidden = 2 * summed * total * ring
    if cfg.remat_offload:
        kept = tokens * memory.kept_per_token(cfg) * cfg.n_layer / cfg.remat_every
        open_ = max(0.0, micros * kept / HOST * 2 - HIDDEN * compute)
    if cfg.context_parallel > 1:
        traded = 2 * tokens * (cfg.qkv_width + cfg.n_embd) * (cfg.context_parallel - 1) / cfg.context_parallel
        open_ += micros * cfg.n_layer * traded * (2 + (cfg.remat != "none")) / ALL_TO_ALL
    ends = (summed + small) * cfg.padded_vocab * cfg.n_embd * ring if shards > 1 else 0  # first and last unit
    return max(SLOWED * hidden, hidden - HIDDEN * compute) + micros * ends + open_


def gathers(cfg, micros):
    """Times a step that FSDP gathers the parameters."""
    return 1 if cfg.parallel == "zero2" else 2 * micros


def candidates(cfg, ranks):
    """Legal settings of the axes that decide memory and speed; what else cfg says stays."""
    splits = [n for n in range(1, ranks + 1) if ranks % n == 0]
    recompute = [("none", 1), *((r, e) for r in ("selective", "attention", "block") for e in (2, 1))]
    for kind, split, (kept, every), tile, offload in itertools.product(
        ways_to_shard(cfg, ranks), splits, recompute, (None, 16_384), (False, True)
    ):
        options = dict(context_parallel=split, remat=kept, remat_every=every, remat_tile=tile, remat_offload=offload)
        rows = 1
        while rows * cfg.block_size * ranks // split <= cfg.batch_tokens and rows <= 256:
            found = spread(cfg, kind, batch_size=rows, **options)
            rows *= 2
            if legal(found, ranks):
                yield found


def ways_to_shard(cfg, ranks):
    """Values of `parallel` that differ for so many ranks."""
    return ("ddp", "zero2", "fsdp") if memory.is_sharded(dataclasses.replace(cfg, parallel="fsdp"), ranks) else ("ddp",)


def spread(cfg, kind, **options):
    """cfg with parallel=kind and other options, without what only its own kind takes."""
    return dataclasses.replace(cfg, parallel=kind, shard_size=cfg.shard_size if kind == "hsdp" else None, **options)


def search(cfg, ranks, budget):
    """[(seconds a step, bytes a rank, cfg)], fastest first, of what takes at most `budget` bytes a GPU.

    UserError if no candidate is legal.
    """
    sizes = [(memory.takes(other, ranks), other) for other in candidates(cfg, ranks)]
    if not sizes:
        check(dataclasses.replace(cfg, batch_size=1), ranks)
        raise UserError(f"no setting is legal for {ranks} ranks and batch_tokens={cfg.batch_tokens}; try others")
    found = [(sum(seconds(other, ranks).values()), takes, other) for takes, other in sizes if takes <= budget]
    return sorted(found, key=lambda f: (f[0], f[1]))


def as_flags(cfg, base):
    """The settings in which cfg differs from base, as on a command line; "as given" if in none."""
    pairs = [(f.name, getattr(cfg, f.name)) for f in dataclasses.fields(cfg)]
    return " ".join(f"--{name}={value}" for name, value in pairs if value != getattr(base, name)) or "as given"
