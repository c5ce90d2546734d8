"""The table of `plot.py A* --against B*`: means over seeds, and whether two groups of runs differ."""

import math
from dataclasses import dataclass

import numpy as np

ANGLES = np.linspace(0, math.pi / 2, 20_001)


@dataclass
class Group:
    """Runs that differ in their seeds alone."""

    name: str
    seeds: list
    figures: dict  # {"loss": a float for each run, "bpb", "seconds", "tokens"}; None: not known
    rows: str | None  # what they were validated on; None: not known, or not the same


def table(groups, others):
    """Its lines: each Group, then the difference of each of `groups` from each of `others`."""
    width = max(len(group.name) for group in groups + others)
    found = [f"{'runs':<{width}}  seeds  {'loss':<17}{'bits a byte':<17}{'seconds':>9}{'tokens':>15}"]
    for group in groups + others:
        loss, bits, seconds, tokens = group.figures.values()
        costs = f"{in_words(seconds, ',.0f'):>9}{in_words(tokens, ',.0f'):>15}"
        means = f"{in_words(loss, '.4f', True):<17}{in_words(bits, '.4f', True):<17}"
        found.append(f"{group.name:<{width}}  {len(group.seeds):>5}  {means}{costs}")
    for group in groups:
        for other in others:
            found += ["", f"{group.name} less {other.name}, with 95% intervals", *compared(group, other)]
    return found


def in_words(values, form, spread=False):
    """The mean and, with `spread`, ± the standard deviation."""
    if values is None:
        return "n/a"
    deviation = f" ±{values.std(ddof=1):{form}}" if spread and len(values) > 1 else ""
    return f"{values.mean():{form}}{deviation}"


def compared(group, other):
    """A line for each loss that both have: Welch's interval, and that of pairs of runs with the same seed."""
    found = []
    for key, figure in (("loss", "loss"), ("bpb", "bits a byte")):
        a, b = group.figures[key], other.figures[key]
        if a is None or b is None:
            continue
        found.append(f"{figure:<13}{'Welch':<16}{answer(a.mean() - b.mean(), *welch(a, b))}")
        if group.rows and group.rows == other.rows and sorted(group.seeds) == sorted(other.seeds):
            pairs = a - b[[other.seeds.index(seed) for seed in group.seeds]]
            found.append(f"{figure:<13}{'paired by seed':<16}{answer(pairs.mean(), *welch(pairs))}")
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


def answer(difference, error, freedom):
    """A difference with its interval, in words."""
    if math.isnan(error):
        return f"{difference:+.4f}  not established: one seed on a side"
    margin = t_quantile(freedom) * error
    low, high = difference - margin, difference + margin
    verdict = "lower" if high < 0 else "higher" if low > 0 else "not established"
    return f"{difference:+.4f}  {low:+.4f} to {high:+.4f}  {verdict}"


def t_quantile(freedom):
    """The t above |t| in 95% of Student's distribution with `freedom` degrees, 1 or more, perhaps not whole.

    With t = sqrt(freedom) tan(angle) the angle has the density cos(angle)^(freedom - 1), here summed up.
    """
    density = np.cos((ANGLES[1:] + ANGLES[:-1]) / 2) ** (freedom - 1)
    share = np.append(0, density.cumsum()) / density.sum()
    return math.sqrt(freedom) * math.tan(np.interp(0.95, share, ANGLES))
