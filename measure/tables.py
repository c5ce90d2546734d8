"""The arithmetic of scale/memory.py and scale/plan.py as tables; imports no torch."""

import dataclasses

from configurator import UserError, refuse, too_small
from scale import memory, plan
from settings import check, legal


def memory_table(cfg):
    """Prints GiB a rank, part by part, of a bench.MemoryConfig, and totals for other values of parallel and remat."""
    cfg = with_precision(cfg)
    check(cfg, cfg.world)
    parts = memory.estimate(cfg, cfg.world)
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    print(f"\n{'':<34}{f'largest in {cfg.gpu_gib:g} GiB':>28}")
    print(f"{'parallel':<10}{'remat':<12}{'GiB a rank':>12}{'batch_size':>14}{'or block_size':>14}")
    budget = cfg.gpu_gib * memory.GIB
    for kind in dict.fromkeys([*plan.ways_to_shard(cfg, cfg.world), cfg.parallel]):
        for remat in ("none", "selective", "attention", "block"):
            other = plan.spread(cfg, kind, remat=remat)
            if remat in ("none", "selective"):
                other = dataclasses.replace(other, remat_offload=False)
            if not legal(other, cfg.world):
                other = dataclasses.replace(other, remat_tile=None)
            if not legal(other, cfg.world):
                continue
            found = (memory.largest_batch(other, cfg.world, budget), memory.longest_row(other, cfg.world, budget))
            most = "".join(f"{f'{n:,}' if n else 'none fits':>14}" for n in found)
            print(f"{kind:<10}{remat:<12}{memory.takes(other, cfg.world) / memory.GIB:>12.1f}{most}")


def plan_table(cfg):
    """Prints the fastest settings that fit, for a bench.PlanConfig, and how the first would spend its time."""
    cfg = with_precision(cfg)
    found = plan.search(cfg, cfg.world, cfg.gpu_gib * memory.GIB)
    if not found:
        raise UserError(
            f"nothing fits {cfg.gpu_gib:g} GiB on {cfg.world} GPUs; try a larger --world, --optimizer=adamw8bit "
            "--weights=bf16, or a shorter --block_size"
        )
    print(f"{'s a step':>9}{'tokens/s/GPU':>14}{'GiB':>8}  settings besides those given")
    for seconds, takes, other in found[: cfg.show]:
        rate = cfg.batch_tokens / seconds / cfg.world
        print(f"{seconds:9.2f}{rate:14,.0f}{takes / memory.GIB:8.1f}  {plan.as_flags(other, cfg)}")
    print(f"\n{'the first row':<28}s a step")
    for name, seconds in plan.seconds(found[0][2], cfg.world).items():
        print(f"{name:<28}{seconds:8.2f}")


def with_precision(cfg):
    """cfg with precision=auto resolved to bf16; raises UserError for a precision that the arithmetic does not count."""
    refuse(too_small(cfg, {"world": 1, "gpu_gib": 1}))
    if cfg.precision not in ("auto", "bf16", "fp8"):
        raise UserError(f"precision={cfg.precision}: the arithmetic is for bf16 and fp8; try --precision=bf16")
    return dataclasses.replace(cfg, precision="bf16" if cfg.precision == "auto" else cfg.precision)
