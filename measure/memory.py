"""The arithmetic of scale/memory.py as a table; imports no torch."""

import dataclasses

from configurator import UserError, refuse, too_small
from scale import memory
from settings import check


def measure(cfg):
    """Prints GiB a rank for a bench.MemoryConfig, part by part, and totals for other parallel and remat."""
    wrong = too_small(cfg, {"world": 1, "gpu_gib": 1}) + memory.uncounted(cfg)
    if cfg.precision not in ("auto", "bf16", "fp8"):
        wrong += [f"precision={cfg.precision}: the arithmetic is for bf16, fp8; try --precision=bf16"]
    refuse(wrong)
    cfg = dataclasses.replace(cfg, precision="bf16" if cfg.precision == "auto" else cfg.precision)
    check(cfg, cfg.world)
    print(f"{cfg.world} GPUs, parallel={cfg.parallel}" if cfg.world > 1 else "1 GPU; for more --world=N")
    parts = memory.estimate(cfg, cfg.world)
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    most = f"batch_size in {cfg.gpu_gib:g} GiB"
    print(f"\n{'parallel':<10}{'remat':<12}{'GiB a rank':>12}  largest {most}")
    kinds = ["ddp"] if cfg.world == 1 and not cfg.offload_states else ["ddp", "zero2", "fsdp"]
    for kind in dict.fromkeys([*kinds, cfg.parallel]):
        for remat in ("none", "selective", "attention", "block"):
            row(cfg, kind, remat)


def row(cfg, kind, remat):
    """Prints what a rank takes so, and which batch and length fit; nothing if the values conflict."""
    cfg = dataclasses.replace(cfg, parallel=kind, remat=remat)
    cfg.shard_size = cfg.shard_size if kind == "hsdp" else None
    cfg.remat_offload = cfg.remat_offload and remat in ("attention", "block")
    cfg.remat_tile = None if remat == "none" else cfg.remat_tile
    try:
        check(cfg, cfg.world)
    except UserError:
        return
    budget = cfg.gpu_gib * memory.GIB
    most = memory.largest_batch(cfg, cfg.world, budget) or "none fits"
    print(f"{kind:<10}{remat:<12}{memory.takes(cfg, cfg.world) / memory.GIB:>12.1f}{most:>14}")
