"""Runs a list of trainings and measurements, one on each GPU, and keeps a small log of each.

    python results/run_list.py results/modern/ablation.txt --data_dir=data/fineweb-edu --gpus=8

A line of a list is a run: its name, then the words of `train.py`, of which the first begins with
`config/` or `--`, or another program and its words (`bench.py step config/gpt2_124m.py`). Words
after a `*` are put before those of all later lines. Two words may stand before them: `ranks=N`
starts torchrun on N GPUs, `code=FOLDER` another checkout's code.

A training writes out_dir/NAME/ and at its end keep/NAME.jsonl, which plot.py draws: the settings,
all validation losses, scores and samples, one training step in many, the median time of a step and
the seconds of all. Of another program keep/NAME.log holds what it printed. A run whose log is there
is passed over: the same command goes on with a list that was stopped. It ends with a table of the
trainings. If this program is killed, its runs get SIGTERM, on Linux.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator
from corpus import as_user_error
from measure.logs import read
from results import processes
from system import errors
from system.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("kind", "step", "tokens", "loss", "lr", "norm")  # of a training step


@dataclass
class Config:
    words = ()  # lists of runs
    data_dir: str = "data/fineweb-edu"  # shards that all trainings read
    out_dir: str = "out/lists"  # folders of the trainings, and what each run prints, NAME.console
    keep: str = "results/lists"  # folder of the small logs
    gpus: int = 1  # GPUs that the runs share
    lines: int = 200  # training steps kept in a small log


def main(cfg):
    errors.refuse(configurator.too_small(cfg, {"gpus": 1, "lines": 1}))
    runs = [run for path in cfg.words for run in read_list(path)]
    waiting = [run for run in runs if not kept(cfg, run).exists() and run["ranks"] <= cfg.gpus]
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cfg.gpus))))
    free, under_way = names.split(",")[: cfg.gpus], []
    for folder in (cfg.keep, cfg.out_dir):
        Path(folder).mkdir(parents=True, exist_ok=True)
    while waiting or under_way:
        while waiting and max(1, waiting[0]["ranks"]) <= len(free):
            run = waiting.pop(0)
            run["gpus"], free = free[: max(1, run["ranks"])], free[max(1, run["ranks"]) :]
            run["process"] = start(cfg, run)
            under_way.append(run)
        for run in [run for run in under_way if run["process"].poll() is not None]:
            under_way.remove(run)
            free += run["gpus"]
            ended(cfg, run)
        time.sleep(0.5)
    for run in runs:
        if kept(cfg, run).exists() and run["words"][0] == "train.py":
            print(row(run["name"], kept(cfg, run)))
    missing = [run["name"] for run in runs if not kept(cfg, run).exists()]
    print("without a log: " + ", ".join(missing) if missing else "every run has its log")
    return int(bool(missing))


def read_list(path):
    """[{"name", "words", "ranks": 0 without torchrun, "code"}] of a list's file."""
    runs, common = [], []
    with as_user_error(f"{path} cannot be read as a list of runs"):
        lines = Path(path).read_text().splitlines()
    for line in lines:
        name, *words = shlex.split(line, comments=True) or [None]
        options = dict(ranks=0, code=ROOT)
        while words and words[0].startswith(("ranks=", "code=")):
            key, _, options[key] = words.pop(0).partition("=")
        if name == "*":
            common = words
        elif name:
            words = common + words
            if not words or words[0].startswith(("config/", "--")):
                words = ["train.py", *words]
            runs.append(options | dict(name=name, words=words, ranks=int(options["ranks"])))
    if len({run["name"] for run in runs}) < len(runs):
        raise UserError(f"{path}: two runs have the same name")
    return runs


def kept(cfg, run):
    return Path(cfg.keep) / (run["name"] + (".jsonl" if run["words"][0] == "train.py" else ".log"))


def start(cfg, run):
    """Starts a run on its GPUs."""
    words, out = [sys.executable], Path(cfg.out_dir).resolve() / run["name"]
    if run["ranks"]:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run['ranks']}"]
    words += run["words"]
    if run["words"][0] == "train.py":
        words += [f"--data_dir={Path(cfg.data_dir).resolve()}", f"--out_dir={out}"]
        words += ["--overwrite", "--save_interval=0"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(run["gpus"])}
    print(
        f"{run['name']:<28} GPU {env['CUDA_VISIBLE_DEVICES']:<5} {shlex.join(run['words'])}",
        flush=True,
    )
    with open(f"{out}.console", "w") as file:
        return processes.start(
            words, cwd=run["code"], env=env, stdout=file, stderr=subprocess.STDOUT
        )


def ended(cfg, run):
    """Prints how a run ended, and writes its small log if it ended well."""
    out = Path(cfg.out_dir) / run["name"]
    console = Path(f"{out}.console").read_text()
    if run["process"].returncode:
        return print(
            f"{run['name']:<28} ended with {run['process'].returncode}; see {out}.console",
            flush=True,
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=run["code"], capture_output=True, text=True
    )
    if run["words"][0] == "train.py":
        lines = small(read(out), cfg.lines)
        lines[0] |= dict(
            commit=commit.stdout.strip(), seed=json.loads((out / "config.json").read_text())["seed"]
        )
        text = "".join(json.dumps(line) + "\n" for line in lines)
    else:
        launcher = f"torchrun --nproc_per_node={run['ranks']}" if run["ranks"] else "python"
        text = (
            f"$ {launcher} {shlex.join(run['words'])}      # at {commit.stdout.strip()}\n{console}"
        )
    kept(cfg, run).write_text(text)
    printed = console.splitlines() or ["printed nothing"]
    steps = [line for line in printed if line.startswith("step ")] or printed
    print(f"{run['name']:<28} {steps[-1]}", flush=True)


def row(name, path):
    """A line with a training's last validation loss and its seconds, from its small log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "val"]
    seconds = lines[0].get("seconds")  # None in older logs
    time = "" if seconds is None else f"{seconds:8.1f} s of steps, {lines[0]['step_ms']} ms each"
    return f"{name:<28} {f'{losses[-1]:.4f}' if losses else 'n/a':>7}{time}"


def small(log, count):
    """The lines that are kept of a run's log: without times, but for the median time of a step."""
    # the first steps compile and warm up
    times = [line["dt_ms"] for line in log["train"].values()][5:]
    start = max(log["start"].items())[1]
    rows = [row for row in start["rows"] if row[0] in ("device", "parameters", "step", "settings")]
    start["rows"], start["step_ms"] = rows, None
    if times:
        start["step_ms"] = round(statistics.median(times), 2)
        start["seconds"] = round((sum(times) + 5 * start["step_ms"]) / 1000, 1)
    found = [line for kind in ("val", "hellaswag", "sample") for line in log.get(kind, {}).values()]
    every, last = max(1, len(log["train"]) // count), max(log["train"])
    for step, line in log["train"].items():
        if step <= 10 or step % every == 0 or step == last:
            found.append({key: line[key] for key in KEPT})
    lines = [start, *sorted(found, key=lambda line: line["step"])]
    return [
        {k: float(f"{x:.7g}") if isinstance(x, float) else x for k, x in line.items()}
        for line in lines
    ]


if __name__ == "__main__":
    configurator.run(main, Config)
