"""Bus bandwidth of collectives by message size, as NCCL's tests define it: comparable with the speed of the links."""

import statistics

import torch
import torch.distributed as dist

from configurator import UserError, refuse, too_small
from measure import rates as results
from run.logger import device_name
from scale import parallel

NAMES = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


def measure(cfg):
    """Prints a table of GB/s and us; cfg: a bench.CommConfig. Every rank calls it."""
    refuse(too_small(cfg, {"rounds": 1, "max_mib": 1}))
    if cfg.out:
        results.refuse_unwritable("out", cfg.out)
    world = parallel.start(cfg.device)
    if world.size == 1:
        raise UserError(
            "bench.py comm needs several ranks; try torchrun --standalone --nproc_per_node=4 bench.py comm"
        )
    n, say = world.size, print if world.main else lambda *_, **__: None
    say(f"{n} x {device_name(world.device)}; GB/s of bus bandwidth (us)\n{'MiB':>8}", end="")
    say("".join(f"{name:>24}" for name in NAMES))
    size, bus, times = 1, [], []
    while size <= cfg.max_mib:
        whole = torch.ones(size * 2**19, device=world.device, dtype=torch.bfloat16)
        part, other = whole[: whole.numel() // n].clone(), torch.empty_like(whole)
        calls = [
            (2 * (n - 1) / n, dist.all_reduce, [whole]),
            ((n - 1) / n, dist.all_gather_into_tensor, [whole, part]),
            ((n - 1) / n, dist.reduce_scatter_tensor, [part, whole]),
            ((n - 1) / n, dist.all_to_all_single, [other, whole]),
        ]
        cells, rates, us = [], {"mib": size}, {"mib": size}
        for name, (share, call, tensors) in zip(NAMES, calls, strict=True):
            try:
                seconds = seconds_of(lambda c=call, t=tensors: c(*t), world.device, cfg.rounds)
                rates[name], us[name] = share * whole.numel() * 2 / seconds / 1e9, seconds * 1e6
                cells.append(f"{rates[name]:8.1f} ({us[name]:9.0f})")
            except RuntimeError:  # gloo has no reduce-scatter
                cells.append("n/a")
        say(f"{size:>8}" + "".join(f"{c:>24}" for c in cells), flush=True)
        bus, times, size = [*bus, rates], [*times, us], size * 4
    if cfg.out and world.main:
        figures, name = {"bus_gb_per_s": bus, "us": times}, device_name(world.device)
        results.write(cfg.out, "comm", cfg, name, n, torch.__version__, figures)


def seconds_of(call, device, rounds):
    """Median seconds of a collective that all ranks start together, after two warm-up calls."""
    times = []
    for _ in range(rounds + 2):
        parallel.barrier()
        began = parallel.synchronize(device)
        call()
        times.append(parallel.synchronize(device) - began)
    return statistics.median(times[2:])
