"""Curves of one or several runs, as a picture.

    python plot.py out/gpt2_124m                                 # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --x=tokens --y=bpb --out=compare.svg
    python plot.py out/a assets/build_nanogpt.jsonl              # beside the losses of another program

Panels: loss, HellaSwag, learning rate, gradient norm and tokens per second, as far as a run has them.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

import configurator
from configurator import UserError
from run import files

COLORS = ["#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2"]
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb"}
STYLE |= {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.xmargin": 0.015}
STYLE |= {"legend.frameon": False, "axes.formatter.useoffset": False, "text.parse_math": False}
matplotlib.rcParams.update(STYLE | {"svg.fonttype": "none"})
AXES = dict(steps="step", tokens="tokens", seconds="seconds of training steps")
UNITS = {"loss": "nats a token", "bpb": "bits per byte"}
PANELS = {  # key of a log's lines: (their kind, title)
    "acc_norm": ("hellaswag", "HellaSwag acc_norm; dotted: chance"),
    "lr": ("train", "learning rate"),
    "norm": ("train", "gradient norm"),
    "tok_per_s": ("train", "tokens/s"),
}
KEYS = ("loss", "bpb", "tokens", "dt_ms", "step_ms", *PANELS)
NUMBER = lambda v: v is None or files.number(v) and abs(v) < 1e39  # float32's largest is 3.4e38
LINE = {"kind": files.text, "step": files.count} | {f"{key}?": NUMBER for key in KEYS}


@dataclass
class Config:
    words = ()  # folders of runs, or files of logs
    x: Literal["steps", "tokens", "seconds"] = "steps"  # seconds: of training steps alone
    y: Literal["loss", "bpb"] = "loss"  # bpb: bits per byte, which compare between tokenizers
    out: str | None = None  # .png, .svg or .pdf; None: curves.png in the first folder


def main(cfg):
    if not cfg.words:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    figure, first = draw(load(cfg.words), cfg.x, cfg.y), Path(cfg.words[0])
    out = Path(cfg.out or (first / "curves.png" if first.is_dir() else first.with_suffix(".png")))
    try:
        with warnings.catch_warnings(record=True) as missing:  # one for each glyph
            warnings.filterwarnings("always", "Glyph .* missing")
            figure.savefig(out, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:  # ValueError: an unknown kind of picture
        raise UserError(f"{out}: cannot write the picture ({error})") from None
    configurator.warn(missing and "the font lacks characters of the names, which are drawn as boxes")
    print(f"drawn: {out}")


def load(folders):
    """[Run]; later ones have narrower lines, so that equal curves do not hide one another."""
    names = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in folders]
    names = [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names)]
    widths = np.linspace(1.3 + 0.9 * min(len(folders) - 1, 2), 1.3, len(folders))
    return [Run(*each) for each in zip(folders, names, COLORS * len(folders), widths)]


class Run:
    """A run as it is drawn. log: see `read`; start: the line that the last start wrote, or {}."""

    def __init__(self, folder, name, color, width):
        self.folder, self.color, self.width, self.log = folder, color, width, read(folder)
        self.name = name.encode(errors="replace").decode()  # one that is not UTF-8
        self.start = max(self.log.get("start", {0: {}}).items())[1]

    def place(self, steps, x):
        """Where steps lie on the axis x; UserError if the log does not say."""
        if x == "steps":
            return steps
        if x == "seconds" and self.start.get("step_ms"):  # a small log of results/ has a step's median
            return steps * self.start["step_ms"] / 1e3
        at, values = series(self.log, "train", "dt_ms" if x == "seconds" else "tokens")
        if not len(at):
            raise UserError(f"{self.folder}: its log does not hold what x={x} needs; try --x=steps")
        first, values = (at[0] - 1, np.cumsum(values) / 1e3) if x == "seconds" else (0, values)
        return np.interp(steps, [first, *at], [0, *values])

    def losses(self, kind, y):
        """(steps, losses) of kind train or val; in bits per byte by the ratio at the last validation."""
        steps, loss = series(self.log, kind, "loss")
        if y == "loss":
            return steps, loss
        lines = self.log.get("val", {}).values()
        ratios = [line["bpb"] / line["loss"] for line in lines if line.get("bpb") and line.get("loss")]
        if not ratios:
            raise UserError(f"{self.folder}: no bits per byte in its log; try --y=loss")
        return steps, loss * ratios[-1]


def read(folder):
    """{kind: {step: line}} of a log; of a step's lines the last counts, and a torn last line is ignored."""
    path, found = Path(folder), {}
    try:
        path = path / "log.jsonl" if path.is_dir() else path
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', 'not text')}; expected a run's log") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line, parse_constant=lambda name: None)  # NaN, Infinity: a diverged run
            for wrong in files.misfits(entry, LINE):
                raise ValueError(wrong)
            found.setdefault(entry["kind"], {})[entry["step"]] = entry
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {error}") from None
    if not any(len(series(found, kind, "loss")[0]) for kind in ("train", "val")):
        raise UserError(f"{path}: it holds no finite training or validation loss; nothing to draw")
    return found


def series(log, kind, key):
    """(steps, values) as float arrays, without missing values."""
    points = [(step, row[key]) for step, row in sorted(log.get(kind, {}).items()) if row.get(key) is not None]
    return np.array(points, dtype=float).reshape(-1, 2).T


def smooth(values):
    """Mean over a window of 1/40 of the run that is centred on each point, shorter at the ends."""
    window = np.ones(2 * (max(1, len(values) // 40) // 2) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def draw(runs, x, y):
    """A figure of all panels."""
    most = lambda key: max(len(series(run.log, PANELS[key][0], key)[0]) for run in runs)
    panels = [key for key in PANELS if most(key) > 1 + (key == "acc_norm")]  # two scores show noise
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2, 1])
    draw_loss(upper.subplots(), runs, x, y)
    for i, key in enumerate(panels):
        draw_panel(lower.add_subplot(1, len(panels), i + 1, xlim=figure.axes[0].get_xlim()), runs, x, key)
    for axes in figure.axes:
        axes.set_xlabel(AXES[x])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def draw_loss(axes, runs, x, y):
    """Training and validation loss of every run."""
    values, shown = [], []  # shown: what the legend has, which leaves names with _ out by itself
    for run in runs:
        (steps, loss), (at, val) = run.losses("train", y), run.losses("val", y)
        if len(loss):
            label = f"_{run.name}, training" if len(val) else run.name
            line = draw_smoothed(axes, run, run.place(steps, x), loss, label, 0.6)
            shown += [] if len(val) else [line]
        if len(val):
            look = dict(marker="o", markersize=run.width + 3, markeredgecolor="w", linewidth=run.width)
            look |= dict(color=run.color, label=f"{run.name}: {val[-1]:.3f}")
            shown += axes.plot(run.place(at, x), val, **look)
        both = np.concatenate([loss, val])
        values += [both.min(), np.quantile(both, 0.97), *loss[:1], *val[:1]]
    fit_y(axes, values)
    axes.set_title(f"loss, {UNITS[y]}: training thin, validation with marks")
    axes.legend(handles=shown, loc="upper right", ncols=1 + len(runs) // 12)


def fit_y(axes, values):
    """The limits of y, and a logarithmic scale where the first values would press the last ones together."""
    low, high = min(values), max(values)
    if 0 < 2 * low < high:
        axes.set_yscale("log", subs=())
        axes.set_ylim(0.95 * low, 1.1 * high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5) if high < 10 * low else (1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        margin = 0.05 * (high - low) + 1e-3
        axes.set_ylim(low - margin, high + margin)


def draw_smoothed(axes, run, x, values, label, width=1):
    """A thin line and its running mean, which is returned, of at most some 2,000 points each."""
    few = slice(None, None, max(1, len(values) // 2000))
    axes.plot(x[few], values[few], color=run.color, linewidth=0.6, alpha=0.25, zorder=1.5)
    look = dict(color=run.color, linewidth=width * run.width, label=label)
    return axes.plot(x[few], smooth(values)[few], **look)[0]


def draw_panel(axes, runs, x, key):
    """One of the panels below the loss."""
    (kind, title), values = PANELS[key], []
    axes.set_title(title)
    axes.locator_params(axis="x", nbins=5)
    for run in runs:
        steps, y = series(run.log, kind, key)
        if len(y):
            draw_smoothed(axes, run, run.place(steps, x), y, f"_{run.name}")
        values += [*y]
    if key == "acc_norm":
        axes.axhline(0.25, color="#9ca3af", linestyle=":")
    elif key == "norm":
        fit_y(axes, values)
    elif key == "tok_per_s":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.1 * np.quantile(values, 0.98))


if __name__ == "__main__":
    configurator.run(main, Config)
