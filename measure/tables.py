"""The arithmetic of scale/memory.py and scale/plan.py as tables, and the planned recipe; imports no torch."""

import dataclasses
from pathlib import Path

from configurator import UserError, refuse, too_small
from measure import rates as results
from run import files
from scale import memory, plan
from settings import Config, check, legal


def memory_table(cfg):
    """Prints GiB a rank, part by part, of a bench.MemoryConfig, and totals for other values of parallel and remat."""
    cfg = with_precision(cfg)
    check(cfg, cfg.world)
    parts = memory.estimate(cfg, cfg.world)
    print(f"{cfg.world} GPUs, parallel={cfg.parallel}" if cfg.world > 1 else "1 GPU; for more --world=N")
    for name, size in [*parts.items(), ("all", sum(parts.values()))]:
        print(f"{name:<28}{size / memory.GIB:8.2f} GiB")
    if line := host_memory(cfg):
        print(line)
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
            found = (
                memory.largest_batch(other, cfg.world, budget),
                memory.longest_row(other, cfg.world, budget),
            )
            most = "".join(f"{f'{n:,}' if n else 'none fits':>14}" for n in found)
            print(f"{kind:<10}{remat:<12}{memory.takes(other, cfg.world) / memory.GIB:>12.1f}{most}")


def plan_table(cfg):
    """Prints the fastest settings that fit, for a bench.PlanConfig, and how the first would spend its time."""
    cfg = with_precision(cfg)
    rates, sources = results.of(cfg.rates)
    if cfg.precision == "fp8" and rates.matmul_fp8 is None:
        raise UserError(f"precision=fp8: rates={cfg.rates} is of a GPU without fp8; try --precision=bf16")
    if cfg.write:
        refuse_unwritable(cfg.write)
    found = plan.search(cfg, cfg.world, cfg.gpu_gib * memory.GIB, rates)
    if not found:
        raise UserError(
            f"nothing fits {cfg.gpu_gib:g} GiB a GPU, --world={cfg.world}; try a larger --world, --optimizer=adamw8bit "
            "--weights=bf16, or a shorter --block_size"
        )
    print("\n".join([*(f"rates        {line}" for line in sources), " " * 13 + in_words(rates)]), end="\n\n")
    print(f"{'s a step':>9}{'tokens/s/GPU':>14}{'GiB':>8}  settings besides those given")
    for seconds, takes, other in found[: cfg.show]:
        rate = cfg.batch_tokens / seconds / cfg.world
        print(f"{seconds:9.2f}{rate:14,.0f}{takes / memory.GIB:8.1f}  {plan.as_flags(other, cfg)}")
    print(f"\n{'the first row':<28}s a step")
    for name, seconds in plan.seconds(found[0][2], cfg.world, rates).items():
        print(f"{name:<28}{seconds:8.2f}")
    if line := host_memory(found[0][2]):
        print(line)
    if cfg.write:
        seconds, takes, other = found[0]
        files.write_atomic(cfg.write, recipe(other, seconds, takes))
        print(f"\nwritten      {cfg.write}: {command(cfg.write, cfg.world, cfg.offload_states)}")


def host_memory(cfg):
    """What offload_states and remat_offload put into the host's memory, in a line; "" without either."""
    parts, ranks = memory.on_host(cfg, cfg.world), memory.ranks_of_host(cfg.world)
    words = ", ".join(f"{name} {size / memory.GIB:.1f}" for name, size in parts.items())
    rank = sum(parts.values()) / memory.GIB
    if not parts:
        return ""
    of_host = f"{ranks} rank{'s' * (ranks > 1)} of a host"
    return f"\nhost memory  {rank * ranks:.1f} GiB for {of_host}, {rank:.1f} a rank: {words}"


def in_words(rates):
    """The figures of plan.Rates in a line."""
    tera = {name: getattr(rates, name) for name in ("matmul", "matmul_fp8", "attention")}
    giga = {name: getattr(rates, name) for name in ("memory", "link", "all_to_all", "host", "cpu")}
    words = [f"{name} {'none' if rate is None else f'{rate / 1e12:,.0f}'}" for name, rate in tera.items()]
    return f"{', '.join(words)} TFLOP/s; {', '.join(f'{k} {v / 1e9:,.0f}' for k, v in giga.items())} GB/s"


def refuse_unwritable(path):
    """Raises UserError unless a new config file can be made there: one that is there may have been edited."""
    results.refuse_unwritable("write", path)
    if Path(path).suffix != ".py" or Path(path).exists():
        why = "there is such a file already" if Path(path).exists() else "a config file's name ends in .py"
        raise UserError(f"write={path}: {why}; give another name, such as --write=config/mine.py")


def recipe(cfg, seconds, takes):
    """A config file of the settings that differ from train.py's defaults, its command in the first line."""
    names = {field.name: field.default for field in dataclasses.fields(Config)}
    lines = [
        f"{name} = {getattr(cfg, name)!r}" for name, usual in names.items() if getattr(cfg, name) != usual
    ]
    rate = cfg.batch_tokens / seconds / cfg.world
    gpus = f"{cfg.world} GPU{'s' * (cfg.world > 1)} of {cfg.gpu_gib:g} GiB"
    about = f"# The fastest settings for {gpus} by bench.py plan's arithmetic:"
    about += f"\n# {rate:,.0f} tokens/s a GPU, {takes / memory.GIB:.1f} GiB (--rates={cfg.rates})"
    return "\n".join([f"# {command(cfg.write, cfg.world, cfg.offload_states)}", about, *lines, ""])


def command(path, world, group=False):
    """How train.py is started with a config file over `world` GPUs, on nodes of at most 8; group: by torchrun."""
    if world == 1 and not group:
        return f"python train.py {path}"
    each = max(n for n in range(1, 9) if world % n == 0)
    several = f"--nnodes={world // each} --rdzv_backend=c10d --rdzv_endpoint=HOST:29500"
    return f"torchrun {'--standalone' if world == each else several} --nproc_per_node={each} train.py {path}"


def with_precision(cfg):
    """cfg with precision=auto resolved to bf16; raises UserError for settings that the arithmetic does not count."""
    refuse(too_small(cfg, {"world": 1, "gpu_gib": 1}) + memory.uncounted(cfg))
    if cfg.precision not in ("auto", "bf16", "fp8"):
        raise UserError(
            f"precision={cfg.precision}: the arithmetic is for bf16 and fp8; try --precision=bf16"
        )
    return dataclasses.replace(cfg, precision="bf16" if cfg.precision == "auto" else cfg.precision)
