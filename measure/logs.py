"""The logs of runs, log.jsonl: read for plot.py, and compared over seeds for its --against."""

import json
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from system.errors import UserError, listed, warn

ALIKE = 1.03  # the most and the least tokens of runs that are compared without a word
ANGLES = np.linspace(0, math.pi / 2, 20_001)  # of t_quantile


@dataclass
class End:
    """Where a run's curve ends: the last finite loss, of `kind` "val", or else "train"."""

    kind: str
    step: float
    value: float


class Run:
    """A run by its log.

    lines: see `read`; the key of an extra is "extras.NAME".
    start: the line of the last start.
    seed: the settings seed and shuffle_seed, as texts; its folder where the log has no settings.
    diverged: whether its last loss is NaN.
    """

    color = "C0"  # matplotlib's
    dash = "-"

    def __init__(self, folder):
        self.folder = str(folder)
        self.name = ""
        self.lines = read(folder)
        for lines in self.lines.values():
            for line in lines.values():
                for name, value in line.get("extras", {}).items():
                    line[f"extras.{name}"] = value
        starts = self.lines.get("start", {0: {}})
        self.start = starts[max(starts)]
        words = shlex.split(dict(self.start.get("rows", [])).get("settings", ""))
        self.seed = tuple(word for word in words if "seed=" in word) if words else self.folder
        losses = [self.series(kind, "loss")[1] for kind in ("train", "val")]
        if not np.isfinite(np.concatenate(losses)).any():
            raise UserError(f"{folder}: its log has no finite loss")
        self.diverged = any(np.isnan(values[-1:]).any() for values in losses)

    def series(self, kind, key):
        """(steps, values) of a figure, float arrays; NaN where it was not finite.

        The validation before the first step is left out of a log with training: it is far above the
        rest.
        """
        lines = self.lines.get(kind, {})
        steps = [step for step in sorted(lines) if key in lines[step]]
        if kind == "val" and "train" in self.lines and 0 in steps:
            steps.remove(0)
        values = np.array([lines[step][key] for step in steps], dtype=float)  # null is NaN
        values[np.isinf(values)] = np.nan
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

    A run that was resumed at a step takes those behind it anew, so earlier lines of them go.
    """
    path = Path(folder)
    try:
        if path.is_dir():
            path /= "log.jsonl"
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a run's log: {error}") from None
    found = {}
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            kind, step = line["kind"], line["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {error!r}") from None
            continue
        if kind == "start":
            for kept in found.values():
                for later in [other for other in kept if other > step]:
                    del kept[later]
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
    runs = [Run(folder) for folder in folders]
    found = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in folders]
    if len(set(found)) < len(found):
        found = folders
    if names is not None:
        found = [name.strip() for name in names.split(",")]
    if len(found) != len(runs):
        raise UserError(f"names={names} has {len(found)} names, but there are {len(runs)} runs")
    for run, name in zip(runs, found):
        run.name = str(name)
    return runs


# -- two sides, each of runs that differ in their seeds alone


def compare(runs, others, y):
    """Prints both sides' means of the figure y over seeds, and how `runs` differ from `others`."""
    both = [*runs, *others]
    first = Side(runs, y)
    second = Side(others, y)
    held_out = {run.held_out for run in both}
    order = None
    if len(held_out) > 1:
        what = "not all runs were validated on the same rows, as far as their logs say"
        warn(f"{what}: losses may not compare; --y=bpb does, of the same text")
    elif None not in held_out and set(first.seeds) == set(second.seeds):
        order = [second.seeds.index(seed) for seed in first.seeds]
    width = max(len(first.name), len(second.name))
    print(f"{'runs':<{width}}  seeds  {y:<17}{'seconds':>9}{'tokens':>15}")
    for side in (first, second):
        means = f"{in_words(side.ends):<17}{side.seconds.mean():>9,.0f}{side.tokens.mean():>15,.0f}"
        print(f"{side.name:<{width}}  {len(side.runs):>5}  {means}")
    print(f"\n{first.name} less {second.name}, with 95% intervals")
    show_intervals(y, first.ends, second.ends, order)
    tokens = [*first.tokens, *second.tokens]
    least = min(tokens)
    if max(tokens) > ALIKE * least:
        words = f"tokens differ, {least:,.0f} to {max(tokens):,.0f}"
        print(f"{words}; training's loss before {least:,.0f}:")
        means = [side.training_before(least) for side in (first, second)]
        show_intervals("equal tokens", *means, order)


class Side:
    """Runs of one recipe, with arrays of each run's figures at its last validation.

    Raises UserError for runs without one, or of the same seed.
    """

    def __init__(self, runs, y):
        self.runs = runs
        names = [run.name for run in runs]
        self.name = os.path.commonprefix(names).rstrip("_-. /") or listed(names)
        self.seeds = [run.seed for run in runs]
        if len(set(self.seeds)) < len(runs):
            raise UserError(f"{listed(names)}: two have the same seed, which counts once")
        found = []
        for run in runs:
            end = run.end(y)
            if run.diverged or end.kind != "val":
                raise UserError(f"{run.folder} does not end with a finite validation {y}")
            places = [run.place(end.step, x) for x in ("seconds", "tokens")]
            found.append([end.value, *places])
        self.ends, self.seconds, self.tokens = np.array(found).T

    def training_before(self, tokens):
        """Each run's mean training loss over the last fifth of its first tokens."""
        found = []
        for run in self.runs:
            steps, loss = run.series("train", "loss")
            at = run.place(steps, "tokens")
            found.append(np.nanmean(loss[(at > 0.8 * tokens) & (at <= tokens)]))
        return np.array(found)


def in_words(values):
    """The mean ± the standard deviation."""
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{values.mean():.4f} ±{values.std(ddof=1):.4f}"


def show_intervals(words, a, b, order):
    """Prints the difference of the means of a and b with Welch's interval, and that of pairs.

    order: of b, so that pairs have the same seed; None: there are no pairs.
    """
    samples = {"Welch": [a, b]}
    if order:
        samples["paired by seed"] = [a - b[order]]
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
    """A difference with its interval, in words."""
    if math.isnan(error):
        return f"{difference:+.4f}  not established: one seed on a side"
    margin = t_quantile(freedom) * error
    low, high = difference - margin, difference + margin
    verdict = "not established"
    if high < 0:
        verdict = "lower"
    if low > 0:
        verdict = "higher"
    return f"{difference:+.4f}  {low:+.4f} to {high:+.4f}  {verdict}"


def t_quantile(freedom):
    """The t above |t| in 95% of Student's distribution with `freedom` degrees, 1 or more.

    These need not be whole. With t = sqrt(freedom) tan(angle) the angle has the density
    cos(angle)^(freedom - 1), here summed up.
    """
    density = np.cos((ANGLES[1:] + ANGLES[:-1]) / 2) ** (freedom - 1)
    share = np.append(0, density.cumsum()) / density.sum()
    return math.sqrt(freedom) * math.tan(np.interp(0.95, share, ANGLES))
