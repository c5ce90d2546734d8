"""The logs of runs, log.jsonl: read for plot.py, and compared over seeds for its --against."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus import as_user_error
from system.errors import UserError, listed, warn

ALIKE = 1.03  # the most and the least tokens of runs that are compared without a word
# the t above |t| in 95% of Student's distribution with so many degrees of freedom
T95 = {math.inf: 1.960, 10: 2.228, 5: 2.571, 4: 2.776, 3: 3.182, 2: 4.303, 1.5: 6.017, 1: 12.706}


@dataclass
class End:
    """Where a run's curve ends: the last finite loss, of `kind` "val", or else "train"."""

    kind: str
    step: float
    value: float


class Run:
    """A run by its log; `name`, `color` and `dash` (matplotlib's) are for who draws it.

    lines: see `read`.
    start: the line of the last start.
    seed: the settings seed and shuffle_seed, as text; its folder where the log has none.
    diverged: whether its last loss is NaN.
    """

    def __init__(self, folder, name=""):
        self.folder = folder
        self.name = name
        self.lines = read(folder)
        starts = self.lines.get("start", {0: {}})
        self.start = starts[max(starts)]
        settings = dict(self.start.get("rows", [])).get("settings", f"seed={folder}")
        self.seed = " ".join(word for word in settings.split() if "seed=" in word)
        losses = [self.series(kind, "loss")[1] for kind in ("train", "val")]
        self.diverged = any(np.isnan(values[-1:]).any() for values in losses)

    def series(self, kind, key):
        """(steps, values) of a figure, float arrays; NaN where the log has null.

        The validation before the first step is left out of a log with training: it is far above the
        rest.
        """
        lines = self.lines.get(kind, {})
        steps = [step for step in sorted(lines) if key in lines[step]]
        if kind == "val" and "train" in self.lines and 0 in steps:
            steps.remove(0)
        values = np.array([lines[step][key] for step in steps], dtype=float)  # null is NaN
        return np.array(steps, dtype=float), values

    def place(self, steps, x):
        """Where steps lie on the axis x; NaN if the log does not say."""
        if x == "steps":
            return steps
        if x == "seconds" and "step_ms" in self.start:  # the median, in a small log of results/
            return steps * self.start["step_ms"] / 1e3
        at, values = self.series("train", "dt_ms" if x == "seconds" else "tokens")
        if not len(at):
            return math.nan * steps
        if x == "seconds":
            starts = list(self.lines.get("start", {}))
            # the first step after a start compiles
            values[np.isin(at - 1, starts)] = np.median(values)
            values = np.cumsum(values) / 1e3
        return np.interp(steps, [0, *at], [0, *values])

    @property
    def held_out(self):
        """What it was validated on last; None: the log does not say."""
        lines = self.lines["val"]
        return lines[max(lines)].get("held_out")

    def end(self, y):
        """The End of validation, or else of the running mean of training."""
        for kind in ("val", "train"):
            steps, values = self.series(kind, y)
            finite = np.isfinite(values)
            if finite.any():
                if kind == "train":
                    values = smooth(values)
                return End(kind, steps[finite][-1], values[finite][-1])
        raise UserError(f"{self.folder}: its log has no {y}; try --y=loss")


def read(folder):
    """{kind: {step: line}} of a log; the last line of a step counts, a torn last line does not.

    A run that was resumed at a step takes those behind it anew, so earlier lines of them go. An
    extra is "extras.NAME" in a line.
    """
    path = Path(folder)
    if path.is_dir():
        path /= "log.jsonl"
    found = {}
    with as_user_error(f"{path} is not the log of a run"):
        *texts, _ = path.read_text().split("\n")  # behind the last newline stands what is torn
        for text in texts:
            line = json.loads(text)
            kind, step = line["kind"], line["step"]
            for name, value in line.get("extras", {}).items():
                line[f"extras.{name}"] = value
            if kind == "start":
                for name, lines in found.items():
                    found[name] = {at: kept for at, kept in lines.items() if at <= step}
            found.setdefault(kind, {})[step] = line
    return found


def smooth(values):
    """Mean over a window of 1/20 of the run that is centred on each point, shorter at the ends.

    NaN stays NaN and is left out of the means beside it.
    """
    window = np.ones(len(values) // 40 * 2 + 1)
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0), window, "same")
    counts = np.convolve(finite, window, "same")
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def load(folders, names=None):
    """[Run] of folders or files. names: one text, with commas between; None: those of the files.

    These are whole paths where two would be the same.
    """
    found = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in folders]
    if len(set(found)) < len(found):
        found = folders
    if names is not None:
        found = names.split(",")
    if len(found) != len(folders):
        raise UserError(f"names={names} has {len(found)} names for {len(folders)} runs")
    return [Run(folder, name.strip()) for folder, name in zip(folders, found)]


# -- two sides, each of runs that differ in their seeds alone


def compare(runs, others, y):
    """Prints both sides' means of the figure y over seeds, and how `runs` differ from `others`."""
    sides = [Side(runs, y), Side(others, y)]
    first, second = sides
    same_rows = len({run.held_out for run in [*runs, *others]}) == 1
    if not same_rows:
        what = "not all runs were validated on the same rows, as far as their logs say"
        warn(f"{what}: losses may not compare; --y=bpb does, of the same text")
    paired = same_rows and first.seeds == second.seeds
    width = max(len(side.name) for side in sides)
    print(f"{'runs':<{width}}  seeds  {y:<17}{'seconds':>9}{'tokens':>15}")
    for side in sides:
        spread = f" ±{side.ends.std(ddof=1):.4f}" if len(side.ends) > 1 else ""
        loss = f"{side.ends.mean():.4f}{spread}"
        spent = f"{side.seconds.mean():>9,.0f}{side.tokens.mean():>15,.0f}"
        print(f"{side.name:<{width}}  {len(side.ends):>5}  {loss:<17}{spent.replace('nan', '  -')}")
    print(f"\n{first.name} less {second.name}, with 95% intervals")
    show_intervals(y, first.ends, second.ends, paired)
    tokens = [*first.tokens, *second.tokens]
    least = min(tokens)
    if max(tokens) > ALIKE * least:
        words = f"tokens differ, {least:,.0f} to {max(tokens):,.0f}"
        print(f"{words}; training's loss before {least:,.0f}:")
        show_intervals("equal tokens", *[side.training_before(least) for side in sides], paired)


class Side:
    """Runs of one recipe by their seeds, with arrays of each one's figures at its last validation.

    Raises UserError for runs without one, or of the same seed.
    """

    def __init__(self, runs, y):
        self.runs = sorted(runs, key=lambda run: run.seed)
        self.seeds = [run.seed for run in self.runs]
        names = [run.name for run in runs]
        self.name = os.path.commonprefix(names).rstrip("_-. /") or listed(names)
        if len(set(self.seeds)) < len(runs):
            raise UserError(f"{listed(names)}: two have the same seed, which counts once")
        found = []
        for run in self.runs:
            end = run.end(y)
            if run.diverged or end.kind != "val":
                raise UserError(f"{run.folder} does not end with a finite validation {y}")
            found.append([end.value, run.place(end.step, "seconds"), run.place(end.step, "tokens")])
        self.ends, self.seconds, self.tokens = np.array(found).T

    def training_before(self, tokens):
        """Each run's mean training loss over the last fifth of its first tokens."""
        found = []
        for run in self.runs:
            steps, loss = run.series("train", "loss")
            at = run.place(steps, "tokens")
            found.append(np.nanmean(loss[(at > 0.8 * tokens) & (at <= tokens)]))
        return np.array(found)


def show_intervals(words, a, b, paired):
    """Prints the difference of the means of a and b with its interval by Welch, and by pairs."""
    samples = {"Welch": [a, b]}
    if paired:
        samples["paired by seed"] = [a - b]
    for name, arrays in samples.items():
        interval = interval_and_verdict(a.mean() - b.mean(), *welch(*arrays))
        print(f"{words:<14}{name:<16}{interval}")


def welch(*samples):
    """(standard error of the difference, degrees of freedom) of the means of one or two arrays.

    Welch 1947, https://doi.org/10.1093/biomet/34.1-2.28. NaN where one has a single value.
    """
    if min(map(len, samples)) < 2:
        return math.nan, math.nan
    parts = [x.var(ddof=1) / len(x) for x in samples]
    rest = sum(part**2 / (len(x) - 1) for part, x in zip(parts, samples))
    return math.sqrt(sum(parts)), sum(parts) ** 2 / rest if rest else 1.0


def interval_and_verdict(difference, error, freedom):
    """A difference with its 95% interval, in words."""
    if math.isnan(error):
        return f"{difference:+.4f}  not established: one seed on a side"
    # log t over 1 / freedom, straight between the rows, is at most 1% too large
    margin = error * math.exp(np.interp(1 / freedom, [1 / n for n in T95], np.log([*T95.values()])))
    verdict = "not established"
    if abs(difference) > margin:
        verdict = "lower" if difference < 0 else "higher"
    return f"{difference:+.4f}  {difference - margin:+.4f} to {difference + margin:+.4f}  {verdict}"
