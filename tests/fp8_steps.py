"""Prints [[loss, gradient norm, validation loss] of each step] in fp8, for test_fp8.py: train.py's on random rows."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import conftest
import torch

STEPS = 2


def main(words):
    import parallel
    import train
    from configurator import configure

    cfg = configure(train.Config, words)
    world = parallel.join(cfg)
    attention = "flash"
    if world.device.type == "cpu":
        attention = "math"
        conftest.stand_in_for_cublas()
    cfg = dataclasses.replace(cfg, precision="fp8", ops="fused", attention=attention)
    found = steps(cfg, world, train.build(cfg, world), parallel.sum_over_ranks)
    if world.main:
        print(json.dumps(found))
    parallel.stop()
    time.sleep(0.2)  # a thread of gloo's that frees the last tensor while Python ends would abort


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
            after = torch.stack([job.raw(r[:, :-1], r[:, 1:], "none").mean() for r in mine[step].split(cfg.batch_size)])
        job.raw.train()
        found.append([mean(loss), norm.item(), mean(after.mean())])
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main(sys.argv[1:])
