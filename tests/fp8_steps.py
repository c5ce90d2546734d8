"""fp8 over ranks, for test_fp8_ranks.py: train.py's steps on random rows."""

import dataclasses

import conftest
import torch

import kernels
from settings import Config

STEPS = 2


def run(words, unit_mib=None):
    """[[loss, gradient norm, validation loss] of each step], the same on every rank. Call it through ranks.call."""
    import train
    from configurator import configure
    from scale import memory, parallel

    cfg = configure(Config, words)
    world = parallel.join(cfg)
    attention = "flash"
    if world.device.type == "cpu":
        attention = "math"
        conftest.stand_in_for_cublas()
        kernels.served.add("cpu")
    if unit_mib is not None:
        memory.UNIT_MIB = unit_mib
    cfg = dataclasses.replace(cfg, precision="fp8", ops="fused", attention=attention)
    found = steps(cfg, world, train.Training(cfg, world), parallel.sum_over_ranks)
    parallel.stop()
    return found


def steps(cfg, world, job, sum_over_ranks):
    torch.manual_seed(1)
    rows = torch.randint(0, cfg.vocab_size, (STEPS, cfg.batch_tokens // cfg.block_size, cfg.block_size + 1))
    mine = rows[:, world.rank :: world.size].to(world.device)
    found = []

    def mean(value):
        return sum_over_ranks(value).item() / world.size

    for step in range(STEPS):
        micros = iter(mine[step].split(cfg.batch_size))

        def next_batch(micros=micros):
            batch = next(micros)
            return batch[:, :-1], batch[:, 1:]

        loss, norm = job.step(next_batch, cfg.lr)
        job.raw.eval()
        with torch.no_grad(), job.autocast:
            after = torch.stack(
                [job.raw(r[:, :-1], r[:, 1:], "none").mean() for r in mine[step].split(cfg.batch_size)]
            )
        job.raw.train()
        found.append([mean(loss), norm.item(), mean(after.mean())])
    return found
