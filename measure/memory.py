"""The arithmetic of scale/memory.py as a table; needs no torch."""

import dataclasses

from configurator import too_small
from scale import memory
from settings import check
from system.errors import UserError, refuse


def measure(cfg):
    """Prints GiB a rank for a bench.MemoryConfig, part by part.

    Below are totals for other values of parallel and remat.
    """
    if cfg.precision == "auto8":
        cfg = dataclasses.replace(cfg, precision="fp8")
    refuse(too_small(cfg, {"world": 1, "gpu_gib": 1}) + memory.not_estimated(cfg))
    check(cfg, cfg.world)
    budget = cfg.gpu_gib * memory.GIB
    cfg, reasons = memory.choose(cfg, cfg.world, budget)
    for name, why in reasons.items():
        print(f"{name} {getattr(cfg, name)} ({why})")
    count, _ = memory.total_and_block_parameters(cfg)
    print(f"{cfg.n_layer} blocks, {count:,} parameters, the vocabulary's padding included")
    print(f"{cfg.world} GPUs (--world), parallel={cfg.parallel}")
    parts = memory.estimate(cfg, cfg.world)
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    for name, size in memory.on_host(cfg, cfg.world).items():
        print(f"{name + ', on the host':<28}{size / memory.GIB:8.2f} GiB")
    print(f"\n{'':<34}{f'largest in {cfg.gpu_gib:g} GiB':>28}")
    print(f"{'parallel':<10}{'remat':<12}{'GiB a rank':>12}{'batch_size':>14}{'or block_size':>14}")
    shards = cfg.world > 1 or cfg.offload_states
    kinds = ["ddp", "zero2", "fsdp"] if shards else ["ddp"]
    for kind in dict.fromkeys([*kinds, cfg.parallel]):
        for remat in ("none", "selective", "attention", "block"):
            row(cfg, kind, remat)


def row(cfg, kind, remat):
    """Prints what a rank takes so, and which batch and length fit; nothing if values conflict."""
    cfg = dataclasses.replace(cfg, parallel=kind, remat=remat)
    try:
        check(cfg, cfg.world)
    except UserError:
        return
    budget = cfg.gpu_gib * memory.GIB
    gib = memory.total_bytes(cfg, cfg.world) / memory.GIB
    rows = memory.largest(cfg, cfg.world, budget, "batch_size", range(1, 2**20))
    one_row = dataclasses.replace(cfg, batch_size=1)
    lengths = range(1024 * cfg.context_parallel, 2**30, 1024 * cfg.context_parallel)
    length = memory.largest(one_row, cfg.world, budget, "block_size", lengths)
    print(f"{kind:<10}{remat:<12}{gib:>12.1f}{in_words(rows):>14}{in_words(length):>14}")


def in_words(most):
    return f"{most:,}" if most else "none fits"
