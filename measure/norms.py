"""The picture of `plot.py --norms`: where a spike comes from, matrix by matrix."""

import re

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from system.errors import UserError

QUANTITIES = ("weight", "gradient", "update")
BEGINNING = 0.1  # part of a run in which no maximum is sought


def draw(runs):
    """A figure of a run's lines of norms: RMS of each matrix over its median of the run, in colour.

    Above are the loss, the gradient norm and the rate. Prints where each quantity rises most.
    """
    run = runs[0]
    steps = run.series("norms", "step")[0].astype(int)
    if len(runs) > 1 or not len(steps):
        raise UserError("--norms draws one run that was trained with --norms_interval=N")
    keys = [key for kind, key in run.figures if kind == "norms" and key.startswith("weight.")]
    names = by_kind([key.removeprefix("weight.") for key in keys])
    rows = [name for members in names.values() for name in members]
    heights = [1.2, 1 + max(2.5, 0.045 * len(rows))]  # inches
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 1 + sum(heights)), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True, height_ratios=heights)
        for upper, key in zip(axes[0], ("loss", "norm", "lr")):
            ink = matplotlib.rcParams["text.color"]
            upper.plot(*run.series("train", key), color=ink, linewidth=0.8)
            upper.set_title(key)
        for lower, quantity in zip(axes[1], QUANTITIES):
            figures = [run.figures["norms", f"{quantity}.{name}"] for name in rows]
            values = over_median(figures, steps)
            colors = draw_matrix(lower, steps, values)
            lower.set_title(f"{quantity}: RMS / median of the run")
            label_kinds(lower, names, labelled=quantity == QUANTITIES[0])
            late = values.filled(0)
            late[:, steps < BEGINNING * steps[-1]] = 0
            row, column = np.unravel_index(late.argmax(), late.shape)
            place = f"{rows[row]} at step {steps[column]}"
            print(f"{quantity}: at most {late[row, column]:.1f} times its median, in {place}")
        ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
        figure.colorbar(colors, ax=axes[1], ticks=ticks, format="{x:g}").minorticks_off()
    return figure


def by_kind(names):
    """{kind: names} of matrices, where "attn.q" is the kind of "blocks.3.attn.q"."""
    found = {}
    for name in names:
        found.setdefault(re.sub(r"^blocks\.\d+\.", "", name), []).append(name)
    return found


def over_median(figures, steps):
    """(figures, steps): values over their median of the run, masked if one is 0 or not finite."""
    values = np.array([[values.get(step) for step in steps] for values in figures], dtype=float)
    values = np.ma.masked_equal(np.nan_to_num(values), 0)
    return values / np.ma.median(values, axis=1, keepdims=True)


def draw_matrix(axes, steps, values):
    """Values over steps, a row a matrix, the first on top; returns what a colour bar belongs to."""
    limits = matplotlib.colors.LogNorm(1 / 8, 8)
    rows = len(values)
    axes.set(xlabel="step", ylim=(rows - 0.5, -0.5))
    axes.grid(False)
    return axes.pcolormesh(
        steps, range(rows), values, norm=limits, cmap="RdBu_r", shading="nearest"
    )


def label_kinds(axes, names, labelled):
    """A line above the first row of each kind, with the kind's name if they are labelled."""
    first = -0.5
    firsts = []
    for members in names.values():
        axes.axhline(first, color="gray", linewidth=0.5)
        firsts.append(first)
        first += len(members)
    axes.set_yticks(firsts, list(names) if labelled else [""] * len(names), va="top")
