"""Runs a list of trainings and measurements, one on each GPU at a time, and keeps a small log of each.

    python measure/sweep.py results/modern/ablation.txt --data_dir=data/fineweb-edu --gpus=8

A line of a list is a run: its name, then what follows `train.py` on its command line, or another program of the top
level and its words (`bench.py step config/gpt2_124m.py`). Words after a `*` are put before those of all later lines.
Two words may stand before them: `ranks=N` starts it under torchrun, on N GPUs, `code=FOLDER` with another checkout's
code. `#` starts a comment.

A training writes out_dir/NAME/ and at its end the small log keep/NAME.jsonl, which plot.py draws: the settings, all
validation losses, scores and samples, one training step in many, and the median time of a step. Of another program
keep/NAME.log holds what it printed. A run whose log is there is passed over, so that a list can be started again. At
the end, and with --show at once, a table of the last losses.
"""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import configurator
from configurator import UserError
from run import files
from run.history import read, series, start_of
from run.source import HERE, git_revision

PLACES = (
    "data_dir",
    "out_dir",
    "overwrite",
    "hellaswag_file",
)  # settings that mean nothing on another machine
KEPT = ("kind", "step", "tokens", "loss", "lr", "norm")  # of a training step


@dataclass
class Config:
    words = ()  # lists of runs
    data_dir: str = "data/fineweb-edu"  # shards that all trainings read
    out_dir: str = "out/sweep"  # folders of the trainings, and what each run prints, NAME.console
    keep: str = "results/sweep"  # folder of the small logs
    gpus: int = 1  # GPUs that the runs share
    lines: int = 200  # training steps kept in a small log
    show: bool = False  # print the table of the small logs there are, and run nothing
    commit: str | None = None  # recorded in the small logs; None: git's


@dataclass
class Run:
    """A run of a list. words: what follows `python`; process, gpus: while it runs."""

    name: str
    words: list
    ranks: int = 0  # of torchrun; 0: without it
    code: str = os.fspath(HERE)
    process: subprocess.Popen | None = None
    gpus: list | None = None

    @property
    def trains(self):
        return self.words[0] == "train.py"

    @property
    def width(self):
        """GPUs that it takes."""
        return max(1, self.ranks)


def main(cfg, lists):
    """Runs what has no small log yet and prints the table; the exit code: 0 if every run has ended well."""
    configurator.refuse(configurator.too_small(cfg, {"gpus": 1, "lines": 1}))
    if not lists:
        raise UserError("give a list of runs: python measure/sweep.py results/modern/ablation.txt")
    runs = [run for path in lists for run in read_list(path)]
    if twice := {run.name for run in runs if [other.name for other in runs].count(run.name) > 1}:
        raise UserError(f"two runs are named {sorted(twice)[0]}; expected a name of its own for each")
    gpus, waiting = visible(cfg), [run for run in runs if not cfg.show and not small_log(cfg, run).exists()]
    for run in [run for run in waiting if run.width > len(gpus)]:
        print(f"{run.name:<28} left out: it needs {run.width} GPUs, gpus={len(gpus)}", flush=True)
        waiting.remove(run)
    if lost := [run for run in waiting if not (Path(run.code) / run.words[0]).is_file()]:
        raise UserError(f"{lost[0].name}: no {lost[0].words[0]} in {lost[0].code}; expected a checkout")
    if waiting:
        work(cfg, waiting, gpus)
    table(cfg, runs)
    return int(not cfg.show and not all(small_log(cfg, run).exists() for run in runs))


def read_list(path):
    """[Run] of a list's file."""
    runs, common = [], []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            name, *words = shlex.split(line, comments=True) or [None]
            options = {}
            while words and words[0].startswith(("ranks=", "code=")):
                key, _, options[key] = words.pop(0).partition("=")
            ranks = int(options.pop("ranks", 0))
        except ValueError as error:  # a number, or a quote that is not closed
            raise UserError(
                f"{path}:{number}: {error}; expected NAME [ranks=N] [code=FOLDER] WORDS"
            ) from None
        if name == "*":
            common = words
        elif name:
            runs.append(Run(name, command(common + words), ranks, **options))
    return runs


def command(words):
    """The words with their program first, which is train.py unless they name one."""
    return words if words and words[0].endswith(".py") and "/" not in words[0] else ["train.py", *words]


def read_text(path):
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: {getattr(error, 'strerror', 'not UTF-8 text')}; expected a list of runs"
        ) from None


def small_log(cfg, run):
    return Path(cfg.keep) / (run.name + (".jsonl" if run.trains else ".log"))


def console(cfg, run):
    return Path(cfg.out_dir) / f"{run.name}.console"


def visible(cfg):
    """Names of the GPUs to use: cfg.gpus of those that CUDA_VISIBLE_DEVICES leaves."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cfg.gpus))))
    return names.split(",")[: cfg.gpus]


def work(cfg, waiting, free):
    """Starts the runs in their order, each as soon as enough of the `free` GPUs are, until all have ended."""
    under_way = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs under way are stopped as well
    Path(cfg.keep).mkdir(parents=True, exist_ok=True)
    try:
        while waiting or under_way:
            while waiting and waiting[0].width <= len(free):
                run, waiting = waiting[0], waiting[1:]
                run.gpus, free = free[: run.width], free[run.width :]
                start(cfg, run)
                under_way.append(run)
            for run in [run for run in under_way if run.process.poll() is not None]:
                under_way.remove(run)
                free = sorted(free + run.gpus)
                ended(cfg, run)
            time.sleep(0.5)
    finally:
        for run in under_way:
            run.process.terminate()


def start(cfg, run):
    """Starts a run on its GPUs."""
    out = Path(cfg.out_dir).resolve() / run.name
    out.parent.mkdir(parents=True, exist_ok=True)
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"] if run.ranks else []
    )
    more = [
        f"--data_dir={Path(cfg.data_dir).resolve()}",
        f"--out_dir={out}",
        "--overwrite",
        "--save_interval=0",
    ]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(run.gpus)}
    with open(console(cfg, run), "w") as file:
        words = [sys.executable, *launcher, *run.words, *(more if run.trains else [])]
        run.process = subprocess.Popen(words, cwd=run.code, env=env, stdout=file, stderr=subprocess.STDOUT)
    print(f"{run.name:<28} GPU {env['CUDA_VISIBLE_DEVICES']:<5} {shlex.join(run.words)}", flush=True)


def ended(cfg, run):
    """Says how a run ended, and writes its small log if it ended well."""
    out = Path(cfg.out_dir) / run.name
    if run.process.returncode:
        print(f"{run.name:<28} ended with {run.process.returncode}; see {console(cfg, run)}", flush=True)
        return
    if run.trains:
        lines = small(read(out), files.read_json(out / "config.json")["seed"], cfg)
        text = "".join(json.dumps(line) + "\n" for line in lines)
    else:
        launcher = f"torchrun --nproc_per_node={run.ranks}" if run.ranks else "python"
        text = f"$ {launcher} {shlex.join(run.words)}      # at {cfg.commit or git_revision()}\n"
        text += console(cfg, run).read_text()
    files.write_atomic(small_log(cfg, run), text.encode())
    table(cfg, [run])


def small(log, seed, cfg):
    """The lines that are kept of a run's log (see history.read): without times, but for a step's median."""
    times = series(log, "train", "dt_ms")[1][5:]  # the first steps compile and warm up
    start = start_of(log)
    rows = dict(row for row in start["rows"] if row[0] in ("device", "parameters", "step", "settings"))
    rows["settings"] = " ".join(
        word for word in rows["settings"].split() if word.partition("=")[0] not in PLACES
    )
    step_ms = round(statistics.median(times), 2) if len(times) else None
    start = dict(start, commit=cfg.commit or git_revision(), seed=seed, rows=[*rows.items()], step_ms=step_ms)
    found = [line for kind in ("val", "hellaswag", "sample") for line in log.get(kind, {}).values()]
    every, last = max(1, len(log["train"]) // cfg.lines), max(log["train"])
    for step, line in log["train"].items():
        if step <= 10 or step % every == 0 or step == last:
            found.append({key: line[key] for key in KEPT})
    lines = [start, *sorted(found, key=lambda line: line["step"])]
    return [
        {key: float(f"{x:.7g}") if isinstance(x, float) else x for key, x in line.items()} for line in lines
    ]


def table(cfg, runs):
    """Prints a line for each run: how it ended."""
    width = max([28, *(len(run.name) for run in runs)])
    for run in runs:
        there = small_log(cfg, run).exists()
        print(
            f"{run.name:<{width}} {outcome(cfg, run) if there else f'     no log in {cfg.keep}'}", flush=True
        )


def outcome(cfg, run):
    """A training's last losses in words; of another program the line `step`, or else the last that it printed."""
    path = small_log(cfg, run)
    if not run.trains:
        lines = path.read_text().splitlines()
        return next((line for line in lines if line.startswith("step ")), lines[-1])
    log = read(path)
    step, last = max(log["train"].items())
    val, right, ms = (
        log["val"].get(step, {}),
        log.get("hellaswag", {}).get(step, {}),
        start_of(log)["step_ms"] or 0.0,
    )
    figures = [
        (val.get("loss"), "loss"),
        (val.get("bpb"), "bits a byte"),
        (right.get("acc_norm"), "HellaSwag"),
    ]
    words = [f"{what} {value:.4f}" for value, what in figures if value is not None]
    took = f"{step:>6} steps x {ms:>6.1f} ms = {step * ms / 1e3:>6.1f} s"
    return f"{last['tokens'] / 1e6:>7.1f}M tokens {took}  {'  '.join(words)}"


if __name__ == "__main__":
    configurator.run(lambda cfg: main(cfg, cfg.words), Config)
