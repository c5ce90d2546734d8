"""The table of `plot.py A* --against B*`: means over seeds, and whether two groups differ."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measure.logs import SEEDS, differences, folder_names
from system.errors import UserError, listed, refuse, warn

FIGURES = {"loss": "loss", "bpb": "bits a byte"}  # {key in a log: in words}
ANGLES = np.linspace(0, math.pi / 2, 20_001)  # of t_quantile


@dataclass
class Group:
    """Runs that differ in their seeds alone."""

    name: str
    seeds: list
    figures: dict  # {"loss": an array of each run's, "bpb", "seconds", "tokens"}; NaN: not known
    rows: set  # what they were validated on


def compare(runs, others):
    """Prints means over seeds, and how `runs` differ from `others`; returns all groups of runs."""
    check(runs + others)
    side = grouped(runs)
    groups = side + grouped(others)
    names = differences([recipe(group[0]) for group in groups]) or beginnings(groups)
    found = [summary(name, group) for name, group in zip(names, groups)]
    if any(group.rows != found[0].rows for group in found):
        what = "not all runs were validated on the same rows, as far as their logs say"
        warn(f"{what}: losses may not compare; bits a byte do, of the same text")
    print(*table(found[: len(side)], found[len(side) :]), sep="\n")
    return groups


def check(runs):
    """Refuses runs given twice, and those without a validation; warns of those without an end."""
    folders = [Path(run.folder).resolve() for run in runs]
    wrong = [f"{folder} is given twice" for folder in set(folders) if folders.count(folder) > 1]
    for run in runs:
        if not len(run.series("val", "loss")[0]):
            wrong.append(f"{run.folder}: no validation loss in its log, which a table needs")
        small = ("start", "step_ms") in run.figures  # a log of results/, which has no such line
        if not small and run.last("done") < run.last("train"):
            warn(f"{run.folder} has not come to its end: the table has its last validation")
    refuse(wrong)


def grouped(runs):
    """[runs that differ in their seeds alone]."""
    groups = {}
    for run in runs:
        groups.setdefault(frozenset(recipe(run).items()), []).append(run)
    return list(groups.values())


def recipe(run):
    """{setting: text} of a run but for seeds."""
    return {name: text for name, text in run.settings.items() if name not in SEEDS}


def beginnings(groups):
    """What the names of each group's folders begin with, or else those names."""
    folders = [run.folder for group in groups for run in group]
    names = dict(zip(folders, folder_names(folders)))
    found = []
    for group in groups:
        own = [names[run.folder] for run in group]
        found.append(os.path.commonprefix(own).rstrip("_-. 0123456789/") or listed(own))
    return found


def summary(name, group):
    """The Group of some runs. Raises UserError for two with the same seed."""
    own = [tuple(run.settings.get(name) for name in SEEDS) for run in group]
    if len(set(own)) < len(own) and all(run.settings for run in group):
        folders = listed([str(run.folder) for run in group])
        raise UserError(f"{folders}: two have the same seed, which counts once; leave one out")
    names = ("loss", "bpb", "seconds", "tokens")
    figures = {name: np.array([final(run, name) for run in group]) for name in names}
    return Group(name, own, figures, {run.at_last_validation("held_out") for run in group})


def final(run, figure):
    """A figure at the last validation of a run; NaN where its log does not say."""
    try:
        if figure in FIGURES:
            return run.end(figure)[1]
        return run.place(run.end("loss")[0], figure)
    except UserError:
        return math.nan


def table(groups, others):
    """Its lines: each Group, then the difference of each of `groups` from each of `others`."""
    width = max(len(group.name) for group in groups + others)
    found = [
        f"{'runs':<{width}}  seeds  {'loss':<17}{'bits a byte':<17}{'seconds':>9}{'tokens':>15}"
    ]
    for group in groups + others:
        loss, bits, seconds, tokens = group.figures.values()
        means = f"{in_words(loss, '.4f', True):<17}{in_words(bits, '.4f', True):<17}"
        costs = f"{in_words(seconds, ',.0f'):>9}{in_words(tokens, ',.0f'):>15}"
        found.append(f"{group.name:<{width}}  {len(group.seeds):>5}  {means}{costs}")
    for group in groups:
        for other in others:
            found += ["", f"{group.name} less {other.name}, with 95% intervals"]
            found += welch_and_paired(group, other)
    return found


def in_words(values, form, spread=False):
    """The mean and, with `spread`, ± the standard deviation."""
    if np.isnan(values).any():
        return "n/a"
    words = f"{values.mean():{form}}"
    if spread and len(values) > 1:
        words += f" ±{values.std(ddof=1):{form}}"
    return words


def welch_and_paired(group, other):
    """Lines for each loss that both have: Welch's interval, and that of pairs of the same seed."""
    found = []
    for key, figure in FIGURES.items():
        a = group.figures[key]
        b = other.figures[key]
        if np.isnan([*a, *b]).any():
            continue
        interval = interval_and_verdict(a.mean() - b.mean(), *welch(a, b))
        found.append(f"{figure:<13}{'Welch':<16}{interval}")
        same_rows = group.rows == other.rows and len(group.rows) == 1 and None not in group.rows
        if same_rows and sorted(group.seeds) == sorted(other.seeds):
            pairs = a - b[[other.seeds.index(seed) for seed in group.seeds]]
            interval = interval_and_verdict(pairs.mean(), *welch(pairs))
            found.append(f"{figure:<13}{'paired by seed':<16}{interval}")
    return found


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
