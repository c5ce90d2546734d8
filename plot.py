"""Curves of one or several runs, as a picture.

    python plot.py out/gpt2_124m                   # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --names=before,after --x=seconds --out=both.svg
    python plot.py out/a out/b --no_panels --dark --out=slide.png # losses alone
    python plot.py out/a assets/build_nanogpt.jsonl     # beside another program
    python plot.py out/gate_* --against out/base_*      # means over seeds

Shows the loss and, of several runs of about one length, its end once more,
larger. Below are small panels, as far as a run has them: HellaSwag, learning
rate, gradient norm, tokens per second, figures of your own that the model's
forward returns (extras), and evaluations of your own. A step that is NaN is a
gap.

With --against it prints a table too: the runs of a side differ in seeds alone,
and each side has its mean loss ± the standard deviation; then the difference
with a 95% interval, and, where the sides read different numbers of tokens, that
after equal ones.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

import configurator
from corpus import as_user_error
from measure.logs import compare, load, smooth
from system.errors import UserError

DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1))]  # of the first six runs, the next six, and so on
AXES = {"steps": "step", "tokens": "tokens", "seconds": "seconds of training steps"}
UNITS = {"loss": "nats a token", "bpb": "bits per byte"}
# part of a run whose losses may lie above the panel: their fall would press the rest flat
BEGINNING = 0.1
END = 0.6  # part of the axis from which on the second panel shows the end of several runs
# kinds of lines that are not evaluations of your own
OURS = "start train val hellaswag sample saved done stopped skipped spike".split()
# Blue, orange, green, pink, ochre and sky, which follow Okabe and Ito's: the colour-blind can tell
# them apart.
LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b8528c", "#b07d00", "#3a9bd6"]
DARK = ["#4aa8ff", "#ff8a4c", "#2ecc9b", "#f08ac0", "#f2c14e", "#9be0ff"]


@dataclass
class Panel:
    """What a panel shows: a figure of the lines of some kinds.

    fitted: without a beginning that is far above the rest.
    """

    title: str
    key: str
    kinds: tuple[str, ...] = ("train",)
    fitted: bool = True


HELLASWAG = Panel("HellaSwag acc_norm; chance is 0.25", "acc_norm", ("hellaswag",), fitted=False)
RATE = Panel("learning rate / its peak", "lr", fitted=False)
NORM = Panel("gradient norm", "norm")
SPEED = Panel("tokens/s", "tok_per_s", fitted=False)


@dataclass
class Config:
    words = ()  # folders of runs, or files of logs
    against: tuple[str, ...] = ()  # folders of other runs, from which those before are to differ
    x: Literal["steps", "tokens", "seconds"] = "steps"  # seconds: of training steps alone
    y: Literal["loss", "bpb"] = "loss"  # bpb: bits per byte, which compare between tokenizers
    names: str | None = None  # of the runs, with commas between; None: those of their folders
    panels: bool = True  # --no_panels: the losses alone, for a slide
    dark: bool = False  # light lines on a dark ground
    out: str | None = None  # .png, .svg or .pdf; None: curves.png in the first folder


def main(cfg):
    if not cfg.words:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    runs = load([*cfg.words, *cfg.against], cfg.names)
    groups = [[run] for run in runs]
    if cfg.against:
        count = len(cfg.words)
        groups = [runs[:count], runs[count:]]
        compare(*groups, cfg.y)
    paint(groups, DARK if cfg.dark else LIGHT)
    first = Path(cfg.words[0])
    out = Path(cfg.out or (first / "curves.png" if first.is_dir() else first.with_suffix(".png")))
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style(cfg.dark)):
        figure = draw(runs, cfg.x, cfg.y, cfg.panels)
        with as_user_error(f"{out} cannot be written"):
            figure.savefig(out, dpi=160)
    print(f"drawn: {out}")


def style(dark):
    """matplotlib's settings of the light theme, or the dark one."""
    paper, ink, grid = ("#0d1117", "#e6edf3", "#262c36") if dark else ("#fff", "#1f2328", "#e5e7eb")
    return {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.xmargin": 0.015,
        "axes.titlesize": "medium",
        "axes.formatter.useoffset": False,
        "text.parse_math": False,
    }


def paint(groups, colors):
    """Gives the runs of a group one colour, and each its own dashes."""
    for i, group in enumerate(groups):
        for j, run in enumerate(group):
            run.color = colors[i % len(colors)]
            run.dash = DASHES[(i // len(colors) + j) % len(DASHES)]


def draw(runs, x, y, panels):
    """A figure of the losses and, with `panels`, of all else that the logs hold."""
    lengths = [run.place(run.end(y).step, x) for run in runs]
    if np.isnan(lengths).any():
        raise UserError(f"not all logs hold what x={x} needs; try --x=steps")
    small = choose_panels(runs) if panels else []
    rows = math.ceil(len(small) / 4)
    heights = [4.0, 1.9 * rows + 0.01]  # inches
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, height_ratios=heights)
    # a curve that ends before the second panel begins would be missed there
    enlarged = panels and len(runs) > 1 and min(lengths) > (1 + END) / 2 * max(lengths)
    draw_losses(upper, runs, x, y, enlarged)
    for i, panel in enumerate(small, 1):
        axes = lower.add_subplot(rows, math.ceil(len(small) / rows), i)
        draw_panel(axes, runs, x, panel)
    return figure


def draw_losses(part, runs, x, y, enlarged):
    """Training and validation loss, with the names of the runs; the end once more, larger."""
    both = part.subplots(1, 2, width_ratios=[2, 1]) if enlarged else [part.subplots()]
    panel = Panel(f"loss, {UNITS[y]}: training thin, validation with marks", y, ("train", "val"))
    draw_panel(both[0], runs, x, panel)
    label_ends(both[0], runs, x, y)
    if enlarged:
        _, right = both[0].get_xlim()
        both[1].set_xlim(END * right, right)
        draw_panel(both[1], runs, x, Panel("the end", y, panel.kinds), END * right)
    for axes in both:
        axes.set_xlabel(AXES[x])


def draw_panel(axes, runs, x, panel, begin=0):
    """The curves of a panel: running means of training, marks of evaluations.

    begin: where the panel does.
    """
    shown = np.array([])  # what the limits of y are to hold
    for run in runs:
        for kind in panel.kinds:
            steps, values = run.series(kind, panel.key)
            if not np.isfinite(values).any():
                continue
            at = run.place(steps, x)
            look = dict(color=run.color, linestyle=run.dash, linewidth=1.1)
            if kind != "train":
                look |= dict(marker="o", markersize=5, linewidth=1.8, zorder=2.5)
                look["markeredgecolor"] = axes.get_facecolor()
            elif panel is RATE:
                values = values / np.nanmax(values)
            else:
                if len(runs) == 1:  # the values themselves
                    axes.plot(at, values, color=run.color, linewidth=0.6, alpha=0.2)
                values = smooth(values)
                look["alpha"] = 0.6
            axes.plot(at, values, **look)
            late = at >= BEGINNING * at[-1]
            first = values[late][0]
            # without those of a run that diverges, and NaN
            kept = values <= first + abs(first) / 2
            shown = np.append(shown, values[late & kept & (at >= begin)])
    axes.set_title(panel.title, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == "tokens" else "{x:,.0f}")
    if panel is SPEED:
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(0)
    elif panel.fitted and len(shown):
        margin = 0.06 * np.ptp(shown) or 0.05 * abs(shown[0]) or 1
        axes.set_ylim(shown.min() - margin, shown.max() + margin)


def label_ends(axes, runs, x, y):
    """Each run's last loss and name right of the panel, and a line to the end of its curve."""
    low, high = axes.get_ylim()
    size = min(10, 200 / len(runs))  # in points; a panel is some 240 high
    place = -1.0
    for run in sorted(runs, key=lambda run: run.end(y).value):
        end = run.end(y)
        height = np.clip((end.value - low) / (high - low), 0, 1)
        place = max(height, 0.03, place + 1.35 * size / 240)
        words = f"{end.value:.3f}"
        if run.diverged:
            words = "NaN"
        elif end.kind == "train":
            words += " in training"
        axes.annotate(
            f"{words}  {run.name[-40:]}",
            xy=(run.place(end.step, x), low + height * (high - low)),
            xytext=(1.03, place),
            textcoords="axes fraction",
            color=run.color,
            fontsize=size,
            va="center",
            annotation_clip=False,
            # the line begins at the text's left edge
            arrowprops=dict(arrowstyle="-", color=run.color, linestyle=":", relpos=(0, 0.5)),
        )


def choose_panels(runs):
    """[Panel] of what the logs hold in at least three points."""
    own = {}  # evaluations and extras
    for run in runs:
        for kind, lines in run.lines.items():
            values = [item for line in lines.values() for item in line.items()]
            keys = {key for key, value in values if type(value) in (int, float)}  # no text
            for key in sorted(keys):
                if key.startswith("extras."):
                    own[key] = Panel(key.removeprefix("extras."), key, ("train", "val"))
                elif kind not in OURS and key not in ("step", "seconds"):
                    own[kind, key] = Panel(f"{kind} {key}", key, (kind,), fitted=False)
    return [
        panel
        for panel in (*own.values(), HELLASWAG, RATE, NORM, SPEED)
        if any(len(run.series(panel.kinds[0], panel.key)[0]) > 2 for run in runs)
    ]


if __name__ == "__main__":
    configurator.run(main, Config)
