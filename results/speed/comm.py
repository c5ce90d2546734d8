"""Bus bandwidth of collectives by message size, comparable with a link's speed.

It is defined as in NCCL's tests.

    torchrun --standalone --nproc_per_node=4 results/speed/comm.py
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configurator import run, too_small
from results.processes import need_gpu
from run.logger import device_name
from scale import parallel, shards
from system.errors import UserError, refuse


@dataclass
class Config:
    device: str = "auto"  # auto, cpu, cuda
    max_mib: int = 1024  # largest message, in MiB of bf16


def main(cfg):
    """Prints a table of GB/s and us. Every rank calls it."""
    refuse(too_small(cfg, {"max_mib": 1}))
    need_gpu(cfg.device, "--max_mib=16, over several ranks")
    world = parallel.start(cfg.device)
    if (n := world.size) == 1:
        raise UserError(
            "comm.py needs several ranks; try torchrun --nproc_per_node=4 results/speed/comm.py"
        )
    say = print if world.main else lambda *_, **__: None
    say(f"{n} x {device_name(world.device)}; GB/s of bus bandwidth (us)\n{'MiB':>8}", end="")
    # torch 2.13's name, and the one before
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    for size in [4**k for k in range(16) if 4**k <= cfg.max_mib]:
        whole = torch.ones(size * 2**19, device=world.device, dtype=torch.bfloat16)
        part, other = whole[: whole.numel() // n].clone(), torch.empty_like(whole)
        calls = {  # name: bytes that pass a link, as a share of the message; the call
            "all_reduce": (2 * (n - 1) / n, dist.all_reduce, [whole]),
            "all_gather": ((n - 1) / n, shards.all_gather_single, [whole, part]),
            "reduce_scatter": ((n - 1) / n, reduce_scatter, [part, whole]),
            "all_to_all": ((n - 1) / n, dist.all_to_all_single, [other, whole]),
        }
        if size == 1:
            say("".join(f"{name:>24}" for name in calls))
        cells = [
            cell(share * whole.numel() * 2, call, tensors)
            for share, call, tensors in calls.values()
        ]
        say(f"{size:>8}" + "".join(f"{c:>24}" for c in cells), flush=True)
    parallel.stop()


def cell(moved, call, tensors, rounds=10):
    """GB/s and median us of a collective that moves so many bytes, after two warm-ups."""
    times, device = [], tensors[0].device
    for _ in range(rounds + 2):
        parallel.barrier()
        began = parallel.synchronize(device)
        call(*tensors)
        times.append(parallel.synchronize(device) - began)
    seconds = statistics.median(times[2:])
    return f"{moved / seconds / 1e9:8.1f} ({seconds * 1e6:9.0f})"


if __name__ == "__main__":
    run(main, Config)
