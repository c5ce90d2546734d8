"""A long run of a small model with everything on: do its memory and step time stay as they are?

    python tests/soak.py                             # 5,000 steps on two CPU ranks, 2 to 4 minutes
    python tests/soak.py --ranks=1 --device=cuda     # on a GPU

It trains on bytes of Python's own source under torchrun, with evaluation, HellaSwag, samples and
asynchronous saves, and reads the ranks' resident memory twice a second and the step time from
log.jsonl. Memory may grow by 2% over the last four fifths of the run, by a least-squares line, and
a step's time by 10% from the second fifth to the last. It prints a table and ends with 1 if
something does not hold. Linux alone, for /proc.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from conftest import ROOT, flags, read_log, stdlib_bytes, write_shard
from ranks import environment
from saved import problem

import configurator
from system import errors
from system.errors import UserError

GROWTH, SLOWER = 0.02, 0.10  # of memory over the last four fifths, of the step time
SETTLED = 0.2  # share of the run that is left out of the memory's line: caches fill


@dataclass
class Config:
    steps: int = 5000  # training steps; everything else happens 20 times in the run
    ranks: int = 2  # processes of torchrun
    device: str = "cpu"  # cpu, cuda
    out_dir: str = "out/soak"  # data, log and checkpoints
    every_s: float = 0.5  # seconds between two looks at the memory


def main(cfg):
    """Runs and prints the table; the exit code: 0 if all of the table holds."""
    errors.refuse(configurator.too_small(cfg, {"steps": 100, "ranks": 1}))
    folder = Path(cfg.out_dir).resolve()
    samples = train(cfg, command(cfg, *make_data(folder / "data")), folder / "run")
    log = read_log(folder / "run")
    rows = [*complete(cfg, folder / "run", log), *flat(cfg, samples, log)]
    for what, found, limit, holds in rows:
        print(f"{what:<40} {found:<34} {limit:<22} {'holds' if holds else 'FAILS'}")
    return int(not all(holds for *_, holds in rows))


def make_data(folder):
    """(folder of shards, HellaSwag file): a million bytes and 200 examples that teach nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = stdlib_bytes(1_000_000)
    write_shard(folder / "py_val_000000.bin", tokens[:50_000])
    write_shard(folder / "py_train_000001.bin", tokens[50_000:])
    own = dict(endings=["odd", "even", "red", "big"])
    examples = [own | dict(ctx=f"{i} is", label=i % 4) for i in range(200)]
    (folder / "hellaswag.jsonl").write_text("\n".join(map(json.dumps, examples)))
    return folder, folder / "hellaswag.jsonl"


def command(cfg, data, hellaswag):
    every = max(1, cfg.steps // 20)
    settings = dict(max_steps=cfg.steps, log_interval=every, shuffle_seed=1, dropout=0.1)
    settings |= dict(eval_interval=every, eval_tokens=4096, sample_interval=every)
    settings |= dict(hellaswag_interval=every, hellaswag_file=hellaswag, sample_prompt="def ")
    settings |= dict(save_interval=every, async_save=True, keep_last=2, device=cfg.device)
    # launching kernels is nearly all that so small a step does: few of them
    if cfg.device == "cuda":
        settings |= dict(compile=True, batch_size=16)
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={cfg.ranks} train.py"
    return [sys.executable, *launcher.split(), *flags(data, data.parent / "run", **settings)]


def train(cfg, words, out_dir):
    """Runs the command; returns rows of the ranks' MiB, at even times, as an array."""
    shutil.rmtree(out_dir, ignore_errors=True)
    samples, log = [], out_dir.parent / "console.log"
    with open(log, "w") as console:
        options = dict(cwd=ROOT, env=environment(), stdout=console, stderr=console)
        process = subprocess.Popen(words, **options)
        try:
            while process.poll() is None:
                used = memory_of_ranks(process.pid)
                if (out_dir / "log.jsonl").exists() and len(used) == cfg.ranks:
                    samples.append(used)
                time.sleep(cfg.every_s)
        finally:
            process.terminate()
    if process.returncode:
        raise UserError(f"the run ended with {process.returncode}; see {log}")
    return np.array(samples, dtype=float)


def memory_of_ranks(torchrun):
    """[MiB of resident memory of each rank], in the order in which torchrun started them."""
    try:
        pids = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    except OSError:  # a process ended in the meantime
        return []
    return [n * os.sysconf("SC_PAGE_SIZE") / 2**20 for n in pages if n]  # 0: it has ended


def complete(cfg, folder, log):
    """Rows of the table, (what, found, limit, whether it holds), on whether all work was done."""
    saved = list(folder.glob("step_*"))
    kinds = [line["kind"] for line in log]
    counts = [kinds.count(kind) for kind in ("train", "val", "hellaswag", "sample")]
    times = 1 + cfg.steps // max(1, cfg.steps // 20)
    bad = [path for path in saved if problem(path)]
    left = list(folder.glob(".writing*"))
    whole = len(saved) in (2, 3) and not bad and not left
    found = f"{len(saved)}, damaged {len(bad)}, unfinished {len(left)}"
    expected = [cfg.steps, times, times, times - 1]  # samples are not made before the first step
    return [
        ("lines: train, val, HellaSwag, sample", str(counts), str(expected), counts == expected),
        ("checkpoints", found, "2 and the best, 0, 0", whole),
    ]


def flat(cfg, samples, log):
    """Rows of the table, as `complete`: have memory and step time stayed?"""
    rows, late = [], samples[int(SETTLED * len(samples)) :]
    # medians: an evaluation takes some MiB for a moment
    parts = np.array_split(late, min(16, len(late)))
    late = np.array([np.median(part, axis=0) for part in parts])
    for rank, memory in enumerate(late.T):
        slope, first = np.polyfit(range(len(memory)), memory, 1)
        rise = slope * (len(memory) - 1)
        growth = rise / memory.mean()
        found = f"{first:.1f} to {first + rise:.1f} MiB, {growth:+.2%}"
        limit = f"growth under {GROWTH:.0%}"
        rows.append((f"memory of rank {rank}", found, limit, growth < GROWTH))
    dt = np.array([[line["step"], line["dt_ms"]] for line in log if line["kind"] == "train"])
    at, ms = dt.T
    ends = [(cfg.steps * a, cfg.steps * (a + 0.2)) for a in (0.2, 0.8)]
    second, last = (np.median(ms[(at > a) & (at <= b)]) for a, b in ends)
    slower = last / second - 1
    found, limit = f"{second:.2f} to {last:.2f} ms, {slower:+.1%}", f"growth under {SLOWER:.0%}"
    return [*rows, ("step time, median of fifths", found, limit, slower < SLOWER)]


if __name__ == "__main__":
    configurator.run(main, Config)
