"""A long run of a small model with everything switched on: do its memory and its step time stay as they are?

    python tests/soak.py                             # 5,000 steps on two CPU ranks, 2 to 4 minutes; draws docs/soak.png
    python tests/soak.py --ranks=1 --device=cuda --picture=out/soak/soak.png    # on a GPU

It trains on bytes of Python's own source under torchrun, with evaluation, HellaSwag, samples and asynchronous saves,
and reads the ranks' resident memory and CPU time twice a second and the step time from log.jsonl. Memory may grow by 2%
over the last four fifths of the run, by a least-squares line, and a step's time by 10% from the second fifth to the
last: the time that passes, which other programs on the machine lengthen too, and the CPU's. It prints a table and ends
with 1 if something does not hold. Linux alone, for /proc.
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
from conftest import ROOT, stdlib_bytes, write_shard

import configurator
import plot
from configurator import UserError
from plot import Run, series
from run import checkpoint
from run.files import read_json

GROWTH, SLOWER = 0.02, 0.10  # what is let pass: of memory over the last four fifths, of the step time
SETTLED = 0.2  # share of the run that is left out of the memory's line: caches fill


@dataclass
class Config:
    steps: int = 5000  # training steps; everything else happens 20 times in the run
    ranks: int = 2  # processes of torchrun
    device: str = "cpu"  # cpu, cuda
    out_dir: str = "out/soak"  # data, log and checkpoints
    picture: str | None = "docs/soak.png"  # memory and step time against the step; None: not drawn
    every_s: float = 0.5  # seconds between two looks at the memory


def main(cfg):
    """Runs, prints the table, draws; the exit code: 0 if all of the table holds."""
    configurator.refuse(configurator.too_small(cfg, {"steps": 100, "ranks": 1}))
    folder = Path(cfg.out_dir).resolve()
    samples = train(cfg, command(cfg, *make_data(folder / "data")), folder / "run")
    run = Run(folder / "run", "soak", plot.COLORS[0], 1.3)
    rows = [*complete(cfg, run), *flat(cfg, samples, run.log)]
    for what, found, limit, holds in rows:
        print(f"{what:<49} {found:<34} {limit:<22} {'holds' if holds else 'FAILS'}")
    if cfg.picture:
        draw(cfg.picture, samples, run)
    return int(not all(holds for *_, holds in rows))


def make_data(folder):
    """(folder of shards, file of HellaSwag's form), a million bytes and 200 examples that teach nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = stdlib_bytes(1_000_000)
    write_shard(folder / "py_val_000000.bin", tokens[:50_000])
    write_shard(folder / "py_train_000001.bin", tokens[50_000:])
    examples = [dict(ctx=f"{i} is", endings=["odd", "even", "red", "big"], label=i % 4) for i in range(200)]
    (folder / "hellaswag.jsonl").write_text("\n".join(map(json.dumps, examples)))
    return folder, folder / "hellaswag.jsonl"


def command(cfg, data, hellaswag):
    every = max(1, cfg.steps // 20)
    settings = dict(
        data_dir=data, tokenizer="bytes", vocab_size=257, out_dir=data.parent / "run", overwrite=True
    )
    settings |= dict(device=cfg.device, max_steps=cfg.steps, log_interval=every, shuffle_seed=1, dropout=0.1)
    settings |= dict(
        eval_interval=every, eval_tokens=4096, hellaswag_interval=every, hellaswag_file=hellaswag
    )
    settings |= dict(sample_interval=every, n_samples=2, sample_tokens=16, sample_prompt="def ")
    settings |= dict(save_interval=every, async_save=True, keep_last=2)
    if cfg.device == "cuda":  # launching kernels is nearly all that so small a step does: few of them
        settings |= dict(compile=True, batch_size=16)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={cfg.ranks}",
    ]
    return [*launcher, "train.py", "config/test.py", *(f"--{key}={value}" for key, value in settings.items())]


def train(cfg, words, out_dir):
    """Runs the command; returns rows of (step, CPU seconds of all ranks, MiB of rank 0, of rank 1, ...) as an array."""
    shutil.rmtree(out_dir, ignore_errors=True)
    env, samples = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, []
    with open(out_dir.parent / "console.log", "w") as console:
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=console, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                used, step = use_of_ranks(process.pid), last_step(out_dir / "log.jsonl")
                if step and len(used) == cfg.ranks:
                    cpu, memory = zip(*(used[rank] for rank in range(cfg.ranks)))
                    samples.append([step, sum(cpu), *memory])
                time.sleep(cfg.every_s)
        finally:
            process.terminate()
    if process.returncode:
        raise UserError(f"the run ended with {process.returncode}; see {out_dir.parent / 'console.log'}")
    if not samples:
        raise UserError("the ranks' memory could not be read from /proc, which Linux alone has")
    return np.array(samples, dtype=float)


def use_of_ranks(torchrun):
    """{rank: (CPU seconds, MiB of resident memory)} of the ranks that torchrun has started and that have not ended."""
    found, tick, page = {}, os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    try:
        for pid in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            stat = (
                Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            )  # from field 3 on, see man 5 proc
            use = (int(stat[11]) + int(stat[12])) / tick, int(stat[21]) * page / 2**20
            found |= dict.fromkeys(rank, use)
    except OSError:  # a process ended in the meantime
        pass
    return found


def last_step(log):
    """The step of the last whole line of log.jsonl; 0 without one."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 10_000))
            return json.loads(file.read().split(b"\n")[-2])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def complete(cfg, run):
    """Rows of the table, (what, found, limit, whether it holds): has all been done that was to be?"""
    status, folders = read_json(Path(run.folder) / "status.json"), list(Path(run.folder).glob("step_*"))
    counts = {kind: len(run.log.get(kind, ())) for kind in ("train", "val", "hellaswag", "sample")}
    times = 1 + cfg.steps // max(1, cfg.steps // 20)
    bad = [folder.name for folder in folders if checkpoint.problem(folder)]
    left = [path.name for path in Path(run.folder).glob(".writing*")]
    found = f"{len(folders)}, damaged {len(bad)}, unfinished {len(left)}"
    return [
        ("status.json", f"{status['state']}, step {status['step']}", f"done, {cfg.steps}", status["state"] == "done"),
        ("lines: train, val, HellaSwag, sample", " ".join(map(str, counts.values())), f"{cfg.steps} and {times} each",
         [*counts.values()] == [cfg.steps, times, times, times]),
        ("checkpoints", found, "2 and the best, 0, 0", len(folders) in (2, 3) and not bad and not left),
    ]  # fmt: skip


def flat(cfg, samples, log):
    """Rows of the table, as `complete`: have memory and step time stayed?"""
    rows, late = [], settled(samples)
    for rank, memory in enumerate(late.T[2:]):
        line = fitted(late[:, 0], memory)
        growth = (line[-1] - line[0]) / line.mean()
        found = f"{line[0]:.1f} to {line[-1]:.1f} MiB, {growth:+.2%}"
        rows.append(
            (f"memory of rank {rank}, least squares", found, f"growth under {GROWTH:.0%}", growth < GROWTH)
        )
    fifths, (steps, dt) = (
        [(cfg.steps * a, cfg.steps * (a + 0.2)) for a in (0.2, 0.8)],
        series(log, "train", "dt_ms"),
    )
    passed = [np.median(dt[(steps > a) & (steps <= b)]) for a, b in fifths]
    inside = [samples[(samples[:, 0] > a) & (samples[:, 0] <= b)] for a, b in fifths]
    own = [1e3 * np.ptp(part[:, 1]) / max(1, np.ptp(part[:, 0])) if len(part) else np.nan for part in inside]
    for what, (second, last) in (("step time, median", passed), ("CPU time a step, all ranks", own)):
        found = f"{second:.2f} to {last:.2f} ms, {last / second - 1:+.1%}"
        rows.append(
            (
                f"{what}, second and last fifth",
                found,
                f"growth under {SLOWER:.0%}",
                last / second - 1 < SLOWER,
            )
        )
    return rows


def settled(samples):
    """The samples of the last four fifths, as medians of 16 parts: an evaluation takes some MiB for a moment."""
    late = samples[samples[:, 0] >= SETTLED * samples[-1, 0]]
    return np.array([np.median(part, axis=0) for part in np.array_split(late, min(16, len(late)))])


def fitted(x, y):
    """Values at x of the least-squares line through (x, y)."""
    return np.polyval(np.polyfit(x, y, 1), x)


def draw(path, samples, run):
    """Memory of each rank with its line, and the step time, against the step."""
    with plot.styled(3.4) as figure:
        memory, speed = figure.subplots(1, 2)
        memory.set_title("memory of each rank, MiB, with its line")
        late = settled(samples)
        for rank, color in zip(range(samples.shape[1] - 2), plot.COLORS * 8):
            memory.plot(samples[:, 0], samples[:, rank + 2], color=color, linewidth=1.2, label=f"rank {rank}")
            memory.plot(
                late[:, 0], fitted(late[:, 0], late[:, rank + 2]), "--", color="#374151", linewidth=0.8
            )
        memory.set_ylim(0, 1.15 * samples[:, 2:].max())
        memory.legend(loc="lower right")
        steps, dt = series(run.log, "train", "dt_ms")
        speed.set_title("time of a step, ms: as logged, and of the CPU for all ranks")
        plot.draw_smoothed(speed, run, steps, dt, "as logged")
        at, cpu = (
            samples[::20, 0],
            samples[::20, 1] * 1e3,
        )  # over 20 looks: the kernel counts in hundredths of a second
        speed.plot(
            at[1:],
            np.diff(cpu) / np.maximum(1, np.diff(at)),
            color=plot.COLORS[1],
            linewidth=1.2,
            label="CPU",
        )
        speed.legend(loc="lower right")
        speed.set_ylim(0, 1.3 * np.quantile(dt, 0.98))
        for axes in (memory, speed):
            axes.set_xlabel("step")
        plot.save(figure, path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    configurator.run(main, Config)
