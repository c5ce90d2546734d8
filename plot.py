"""Curves of one or several runs, as a picture.

    python plot.py out/gpt2_124m                   # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --names=before,after --x=seconds --out=both.svg
    python plot.py out/a out/b --no_panels --dark --out=slide.png # losses alone
    python plot.py out/a assets/build_nanogpt.jsonl     # beside another program
    python plot.py out/gate_* --against out/base_*      # means over seeds
    python plot.py out/a --norms   # norms.png: which matrix a spike comes from

Shows the loss and, of several runs, its end once more, larger. Below are small
panels, as far as a run has them: HellaSwag, learning rate, gradient norm,
tokens per second, figures of your own that the model's forward returns
(extras), and evaluations of your own.

With --against it prints a table too: runs that differ in seeds alone are a
group, with its mean loss ± the standard deviation; of each two groups the
difference, with a 95% interval. --norms shows what a run with --norms_interval
has logged.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import configurator
from measure import norms, seeds
from measure.logs import OURS, load, smooth
from measure.pictures import colors, theme, write
from system.errors import UserError, warn
from system.files import number

DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1))]  # of the first six runs, the next six, and so on
AXES = {"steps": "step", "tokens": "tokens", "seconds": "seconds of training steps"}
UNITS = {"loss": "nats a token", "bpb": "bits per byte"}
LOOKS = {"train": "training thin", "val": "validation with marks"}
# part of a run whose losses may lie above the panel: their fall would press the rest flat
BEGINNING = 0.1
END = 0.6  # part of the axis from which on the second panel shows the end of several runs
JOINED = 4  # marks from which on a line joins them
MOST = 6  # panels of extras, and of evaluations of your own


@dataclass(frozen=True)
class Panel:
    """What a panel shows: a figure of the lines of some kinds."""

    title: str
    kinds: tuple[str, ...]
    key: str


HELLASWAG = Panel("HellaSwag acc_norm; dotted: chance", ("hellaswag",), "acc_norm")
RATE = Panel("learning rate", ("train",), "lr")
SHARE = Panel("learning rate / its peak", ("train",), "lr")
NORM = Panel("gradient norm", ("train",), "norm")
SPEED = Panel("tokens/s", ("train",), "tok_per_s")


@dataclass
class Config:
    words = ()  # folders of runs, or files of logs
    against: tuple[str, ...] = ()  # folders of other runs, from which those before are to differ
    norms: bool = False  # a run's RMS of each matrix' weight, gradient and update, over its median
    x: Literal["steps", "tokens", "seconds"] = "steps"  # seconds: of training steps alone
    y: Literal["loss", "bpb"] = "loss"  # bpb: bits per byte, which compare between tokenizers
    names: str | None = None  # of the runs, with commas; None: the settings that differ, or folders
    panels: bool = True  # --no_panels: the losses alone, for a slide
    dark: bool = False  # light lines on a dark ground
    out: str | None = None  # .png, .svg or .pdf; None: curves.png or norms.png in the first folder


def main(cfg):
    if not cfg.words:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    runs = load([*cfg.words, *cfg.against], cfg.names)
    groups = [[run] for run in runs]
    if cfg.against:
        count = len(cfg.words)
        groups = seeds.compare(runs[:count], runs[count:])
    first = Path(cfg.words[0])
    if first.is_dir():
        out = first / ("norms.png" if cfg.norms else "curves.png")
    else:
        out = first.with_suffix(".png")
    with theme(cfg.dark):
        paint(groups)
        figure = norms.draw(runs) if cfg.norms else draw(runs, cfg.x, cfg.y, cfg.panels)
        write(figure, cfg.out or out)


def paint(groups):
    """Gives the runs of a group one colour, and each its own dashes."""
    palette = colors()
    for i, group in enumerate(groups):
        for j, run in enumerate(group):
            run.color = palette[i % len(palette)]
            run.dash = DASHES[(i // len(palette) + j) % len(DASHES)]


def draw(runs, x, y, panels=True):
    """A figure of the losses and, with `panels`, of all else that the logs hold."""
    small = choose_panels(runs) if panels else []
    rows = math.ceil(len(small) / 4)
    heights = [3.7, 1.9 * rows] if small else [4.4]  # inches
    with matplotlib.rc_context({"font.size": 9 if panels else 11}):
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        draw_losses(parts[0], runs, x, y, panels)
        for i, panel in enumerate(small, 1):
            axes = parts[1].add_subplot(rows, math.ceil(len(small) / rows), i)
            axes.set_xlim(figure.axes[0].get_xlim())
            draw_panel(axes, runs, x, panel)
        for axes in figure.axes:
            axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == "tokens" else "{x:,g}")
    return figure


def draw_losses(part, runs, x, y, panels):
    """Training and validation loss; of several runs the end once more.

    Names and last losses stand at the right.
    """
    looks = []
    for kind, look in LOOKS.items():
        if any(len(run.series(kind, y)[0]) for run in runs):
            looks.append(look)
    loss = Panel(f"loss, {UNITS[y]}: {', '.join(looks)}", ("train", "val"), y)
    if len(runs) == 1:
        faint = 0.9
    elif panels:
        faint = 0.55
    else:
        faint = 0.35
    widths = [2, 1] if panels and len(runs) > 1 else [1]
    both = part.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes in both:
        at_end = axes is not both[0]
        curves = draw_curves(axes, runs, x, loss, faint, at_end)
        right = max(at[-1] for at, _ in curves) or 1
        left = END * right if at_end else -0.015 * right
        axes.set(xlabel=AXES[x], xlim=(left, 1.015 * right))
        axes.set_title("the end" if at_end else loss.title)
        fit(axes, [worth_showing(at, values, left) for at, values in curves])
    label_ends(axes, runs, x, y)


def draw_panel(axes, runs, x, panel):
    """One of the panels below the losses."""
    curves = draw_curves(axes, runs, x, panel)
    axes.set_title(panel.title)
    axes.locator_params(axis="x", nbins=5)
    if panel is HELLASWAG:
        axes.axhline(0.25, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=":")
    elif panel is SPEED:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.15 * max(np.quantile(values, 0.98) for _, values in curves))
    elif panel is NORM or panel.key.startswith("extras."):
        fit(axes, [values[at >= BEGINNING * at[-1]] for at, values in curves])


def draw_curves(axes, runs, x, panel, faint=1, at_end=False):
    """A panel's curves: running means of training, marks of evaluations; returns [(x, y)].

    Training is `faint` where a line joins a run's evaluations; at_end: it is then left out.
    """
    curves = []
    for run in runs:
        beside = len(run.series("val", panel.key)[0]) >= JOINED
        for kind in panel.kinds:
            steps, values = run.series(kind, panel.key)
            if not len(steps) or (kind == "train" and beside and at_end):
                continue
            at = run.place(steps, x)
            if panel in (RATE, SHARE):
                if panel is SHARE:
                    values = values / max(values)
                axes.plot(at, values, color=run.color, linestyle=run.dash, linewidth=1.2)
            elif kind == "train":
                alpha = faint if beside else 1
                values = draw_training(axes, run, at, values, alpha, noise=len(runs) == 1)
            else:
                draw_marks(axes, run, at, values)
            curves.append((at, values))
    return curves


def draw_training(axes, run, at, values, alpha, noise):
    """Draws a running mean, of at most some 2,000 points, and returns it.

    noise: the values themselves are drawn too, faintly.
    """
    few = slice(None, None, max(1, len(values) // 2000))
    mean = smooth(values)
    style = {"color": run.color, "linestyle": run.dash, "linewidth": 1.1}
    axes.plot(at[few], mean[few], alpha=alpha, label=f"_{run.name}, training", **style)
    if noise:
        axes.plot(at[few], values[few], color=run.color, linewidth=0.6, alpha=0.2, zorder=1.5)
    return mean


def draw_marks(axes, run, at, values):
    """Points, joined unless there are so few that the line would lie across the curve."""
    axes.plot(
        at,
        values,
        color=run.color,
        linestyle=run.dash if len(values) >= JOINED else "",
        linewidth=1.8,
        marker="o",
        markersize=5 if len(values) <= 30 else 3,
        markeredgecolor=axes.get_facecolor(),
        zorder=2.5,
        label=run.name,
    )


def worth_showing(at, values, left):
    """The losses right of `left` but for the beginning's, without those of a run that diverges."""
    beginning = BEGINNING * at[-1]
    first = values[at >= beginning][0]
    shown = values[at >= max(left, beginning)]
    return shown[shown <= first + abs(first) / 2]


def fit(axes, shown):
    """Limits of y for these arrays."""
    values = np.concatenate(shown)
    if len(values):
        margin = 0.06 * np.ptp(values) or 0.05 * abs(values[0]) or 1
        axes.set_ylim(values.min() - margin, values.max() + margin)


def label_ends(axes, runs, x, y):
    """Right of the panel each run's last loss and name, in its colour.

    A line leads to its end, unless it would cross much of the panel.
    """
    ends = [run.end(y) for run in runs]
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    heights = np.clip([(loss - low) / (high - low) for _, loss in ends], 0, 1)
    # in points; a panel is some 220 high
    size = min(matplotlib.rcParams["font.size"] + 1, 200 / len(runs))
    places = spread(heights, 1.35 * size / 220)
    for run, (step, loss), height, place in zip(runs, ends, heights, places):
        words = f"{loss:.3f}"
        error = run.at_last_validation("stderr" if y == "loss" else "bpb_stderr")
        # one run alone: of a difference between runs, on the same text, the error is far less
        if error and len(runs) == 1:
            words += f" ±{error:.3f}"
        end = run.place(step, x)
        line = None
        if end >= (left + right) / 2:
            line = {"arrowstyle": "-", "color": run.color, "linewidth": 0.7, "alpha": 0.6}
            # the line begins at the text's left edge; shrink: points left free at its ends
            line |= {"relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3}
        axes.annotate(
            f"{words}  {run.name[-40:]}",
            xy=(end, low + height * (high - low)),
            xytext=(1.03, place),
            textcoords="axes fraction",
            color=run.color,
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=line,
        )


def spread(places, gap):
    """The places, moved by little to be `gap` apart, in order.

    Neighbours that are nearer push each other away, each by half of what they lack.
    """
    order = np.argsort(places)
    found = places[order]
    for _ in range(1000):  # 24 at one place are then 0.99 of the gap apart, 40 are 0.94
        half = np.clip(gap - np.diff(found), 0, None) / 2
        found[1:] += half
        found[:-1] -= half
    return found[np.argsort(order)]


def choose_panels(runs):
    """[Panel] of what the logs hold in at least two points; HellaSwag: three, as two show noise."""

    def points(panel):
        return max(len(run.series(panel.kinds[0], panel.key)[0]) for run in runs)

    panels = [HELLASWAG] if points(HELLASWAG) > 2 else []
    for what, own in own_panels(runs).items():
        panels += own[:MOST]
        if len(own) > MOST:
            left_out = ", ".join(panel.title for panel in own[MOST:])
            warn(f"of {what} {MOST} are drawn; left out: {left_out}")
    peaks = [max(run.series("train", "lr")[1], default=1) for run in runs]
    rate = SHARE if max(peaks) > 2 * min(peaks) else RATE  # Muon's rate would press the others flat
    return panels + [panel for panel in (rate, NORM, SPEED) if points(panel) > 1]


def own_panels(runs):
    """{"evaluations", "extras": [Panel]} of your own, of the numbers in the lines of the logs."""
    evaluations = {}
    extras = {}
    for run in runs:
        for (kind, key), values in run.figures.items():
            if not any(number(value) for value in values.values()):
                continue
            if kind in ("train", "val") and key.startswith("extras."):
                extras[key] = Panel(key.removeprefix("extras."), ("train", "val"), key)
            elif kind not in OURS and key not in ("step", "seconds"):
                evaluations[kind, key] = Panel(f"{kind} {key}", (kind,), key)
    return {"evaluations": list(evaluations.values()), "extras": list(extras.values())}


if __name__ == "__main__":
    configurator.run(main, Config)
