"""The speed of two checkouts on one GPU: a process holds the run of each, and both step in turn.

    git worktree add ../before 8ed107b
    python results/pairs.py --before=../before --after=. -- config/gpt2_124m.py --precision=fp8

The words after `--` are those of `bench.py step`. Each process compiles once and times bursts of
--steps steps, by their median; which of the two begins changes from pair to pair. Both models share
the GPU's memory: on 80 GiB, GPT-2 124M needs --batch_size=32.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "pairs: "  # begins the lines of a child's output that are meant for this program


def child(words):
    """Holds the current folder's run, and times as many steps as each line of stdin says."""
    sys.path[0] = os.getcwd()
    from bench import StepConfig
    from configurator import configure
    from measure import step
    from scale import parallel

    cfg = configure(StepConfig, words)
    world = parallel.join(cfg)
    own, _, job = step.build(cfg, world)
    next_batch = step.synthetic(own, world)
    for _ in range(1 + cfg.settle):
        step.step(job, next_batch, own)
    print(f"{MARK}{own.batch_tokens}", flush=True)
    for line in sys.stdin:
        times = step.step_times(job, next_batch, dataclasses.replace(cfg, steps=int(line)))
        print(f"{MARK}{statistics.median(times) * 1e3}", flush=True)


def answer(process):
    """The number in the next line of a child that is meant for this program."""
    for line in process.stdout:
        if line.startswith(MARK):
            return float(line.removeprefix(MARK))
    sys.exit(f"error: a checkout's process ended with {process.wait()}; its error stands above")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--before", "--after"):
        parser.add_argument(name, required=True, help="folder of a checkout")
    for name, default in (("--pairs", 10), ("--steps", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("words", nargs="+", help="of bench.py step: a config file and settings")
    args = parser.parse_args()
    for folder in (args.before, args.after):
        if not os.path.isfile(os.path.join(folder, "bench.py")):
            parser.error(f"{folder} is no checkout: it has no bench.py")
    sys.path.insert(0, str(ROOT))  # here alone: a child's modules are its checkout's
    from results.processes import need_gpu, start
    from system.errors import UserError

    try:
        need_gpu("cpu" if "--device=cpu" in args.words else "auto", "and a small model")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    command = [sys.executable, os.path.abspath(__file__), "--child", *args.words]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    sides = {name: start(command, cwd=getattr(args, name), **pipes) for name in ("before", "after")}
    tokens = [answer(process) for process in sides.values()][0]  # both compile at the same time
    times = {name: [] for name in sides}
    print(f"{'pair':>4}{'before, ms':>14}{'after, ms':>14}{'after / before':>18}")
    for pair in range(args.pairs):
        for name in list(sides)[:: 1 if pair % 2 == 0 else -1]:
            print(args.steps, file=sides[name].stdin, flush=True)
            times[name].append(answer(sides[name]))
        before, after = times["before"][-1], times["after"][-1]
        print(f"{pair + 1:>4}{before:14.2f}{after:14.2f}{after / before - 1:>+18.2%}", flush=True)
    ratios = [after / before - 1 for before, after in zip(*times.values())]
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:<8}{median:10.2f} ms, {tokens / median * 1e3:,.0f} tokens/s")
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"after / before: {median:+.2%}, the median of the pairs ({least:+.2%} to {most:+.2%})")


if __name__ == "__main__":
    child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
