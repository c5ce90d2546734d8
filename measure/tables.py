"""The arithmetic of scale/memory.py as a table; imports no torch."""

import dataclasses

from configurator import UserError, refuse, too_small
from scale import memory
from settings import check


def memory_table(cfg):
    """Prints GiB a rank for a bench.MemoryConfig, part by part, and totals for other parallel and remat."""
    refuse(too_small(cfg, {"world": 1, "gpu_gib": 1}) + memory.uncounted(cfg))
    if cfg.precision not in ("auto", "bf16", "fp8"):
        raise UserError(f"precision={cfg.precision}: the arithmetic is for bf16, fp8; try --precision=bf16")
    cfg = dataclasses.replace(cfg, precision="bf16" if cfg.precision == "auto" else cfg.precision)
    check(cfg, cfg.world)
    parts = memory.estimate(cfg, cfg.world)
    print(f"{cfg.world} GPUs, parallel={cfg.parallel}" if cfg.world > 1 else "1 GPU; for more --world=N")
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    if parts := memory.on_host(cfg, cfg.world):
        ranks, rank = memory.ranks_of_host(cfg.world), sum(parts.values()) / memory.GIB
        words = ", ".join(f"{name} {size / memory.GIB:.1f}" for name, size in parts.items())
        print(
            f"\nhost memory  {rank * ranks:.1f} GiB for {ranks} ranks of a host, {rank:.1f} a rank: {words}"
        )
    print(f"\n{'':<34}{f'largest in {cfg.gpu_gib:g} GiB':>28}")
    print(f"{'parallel':<10}{'remat':<12}{'GiB a rank':>12}{'batch_size':>14}{'or block_size':>14}")
    kinds = ["ddp"] if cfg.world == 1 and not cfg.offload_states else ["ddp", "zero2", "fsdp"]
    for kind in dict.fromkeys([*kinds, cfg.parallel]):
        for remat in ("none", "selective", "attention", "block"):
            row(cfg, kind, remat)


def row(cfg, kind, remat):
    """Prints what a rank takes so, and which batch and length fit; nothing if the values conflict."""
    other = dataclasses.replace(cfg, parallel=kind, remat=remat)
    if kind != "hsdp":
        other.shard_size = None
    if remat in ("none", "selective"):
        other.remat_offload = False
    if remat == "none":
        other.remat_tile = None
    try:
        check(other, cfg.world)
    except UserError:
        return
    budget = cfg.gpu_gib * memory.GIB
    found = memory.largest_batch(other, cfg.world, budget), memory.longest_row(other, cfg.world, budget)
    most = "".join(f"{f'{n:,}' if n else 'none fits':>14}" for n in found)
    print(f"{kind:<10}{remat:<12}{memory.takes(other, cfg.world) / memory.GIB:>12.1f}{most}")
