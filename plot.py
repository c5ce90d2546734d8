"""Curves of one or several runs, as a picture or as a page.

    python plot.py out/gpt2_124m                                   # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --x=tokens --y=bpb --out=compare.svg
    python plot.py out/a out/b --html                              # -> out/a/curves.html, which needs no network
    python plot.py results/modern/*_300M.jsonl --x=tokens          # small logs that the repository keeps
    python plot.py out/a --reference=assets/build_nanogpt.json
    python plot.py out/sizes_* --fit --out=fit.png                 # ends of 6 or more runs against compute; best size

Reads each run's log.jsonl and config.json, or one log's file. Panels: loss (validation with marks, training thin and
smoothed), HellaSwag, learning rate, gradient norm, tokens per second, MFU and memory, as far as a run has them. The
page adds a table of the runs, the settings that differ, the start block with the machine, and the samples by step.
"""

import contextlib
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import configurator
from configurator import UserError, refuse, without_effect
from run.files import read_json
from run.history import Run, series, smooth

COLORS = ["#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2"]
LISTED = 12  # curves in a legend, so that it leaves the picture free
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb"}
STYLE |= {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False}
STYLE |= {"axes.xmargin": 0.015, "axes.formatter.useoffset": False, "svg.fonttype": "none"}
AXES = {
    "steps": "step",
    "tokens": "tokens",
    "seconds": "seconds of training steps",
    "flops": "FLOPs of the model",
}
PANELS = {  # key of a log's lines: (their kind, title, factor)
    "acc_norm": ("hellaswag", "HellaSwag acc_norm", 1),
    "lr": ("train", "learning rate", 1),
    "norm": ("train", "gradient norm", 1),
    "tok_per_s": ("train", "thousand tokens/s", 1e-3),
    "mfu": ("train", "MFU, %", 100),
    "gib": ("train", "peak memory of a GPU, GiB", 1),
}


@dataclass
class Config:
    words = ()  # folders of runs, or files of logs
    x: Literal["steps", "tokens", "seconds", "flops"] = "steps"  # seconds: of training steps alone
    y: Literal["auto", "loss", "bpb"] = "auto"  # auto: bits per byte where the tokenizers differ, else loss
    html: bool = False  # write a page: curves over each x, differing settings, machine, samples
    fit: bool = False  # the ends of runs of several sizes against compute, with a fit (run/fit.py)
    out: str | None = (
        None  # .png, .svg, .pdf or .html; None: curves.png in the first folder, with fit ./fit.png
    )
    reference: str | None = (
        None  # a JSON file, {"name": …, "points": {step: validation loss, …}}, drawn dashed
    )


def main(cfg, folders):
    if not folders:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    if cfg.fit:
        why = "cannot change the picture of --fit; give one or the other"
        refuse(without_effect(cfg, ("x", "y", "html", "reference"), why))
        return draw_fit(folders, cfg.out or "fit.png")
    html = cfg.html or str(cfg.out).endswith(".html")
    first, suffix = Path(folders[0]), ".html" if html else ".png"
    out = cfg.out or (first.with_suffix(suffix) if first.is_file() else first / f"curves{suffix}")
    reference = read_reference(cfg.reference) if cfg.reference else None
    if Path(out).is_dir():
        raise UserError(
            f"out={out} is a folder; expected a file's name, {Path(out) / 'curves.png'} for example"
        )
    (write_page if html else draw)(folders, out, reference, cfg.x, cfg.y)
    print(f"drawn: {out}")


def load(folders):
    """[Run]; the later ones have narrower lines, so that equal curves do not hide one another."""
    widths = np.linspace(1.3 + 0.9 * min(len(folders) - 1, 2), 1.3, len(folders))
    colors = COLORS * math.ceil(len(folders) / len(COLORS))
    return [Run(*each) for each in zip(folders, labels(folders), colors, widths)]


def labels(runs):
    """Name of each run's folder, or the whole path where two folders have the same name."""
    names = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in runs]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(runs, names)]


def choose_y(runs, y):
    """y, where auto is resolved; UserError if a run has no bits per byte and they are asked for."""
    tokenizers = {run.config.get("tokenizer") for run in runs} - {None}
    without = [run.name for run in runs if run.factor("bpb") is None]
    if y == "bpb" and without:
        raise UserError(f"no bits per byte in the log of {', '.join(without)}; try --y=loss")
    if y == "auto" and len(tokenizers) > 1 and without:
        print(
            f"warning: the tokenizers differ, and {', '.join(without)} has no bits per byte; losses do not compare"
        )
    return y if y != "auto" else "bpb" if len(tokenizers) > 1 and not without else "loss"


def read_reference(path):
    """{"name": str, "points": {step: loss}} of a JSON file, with steps as ints."""
    given = read_json(path)
    try:
        points = {int(step): float(loss) for step, loss in given["points"].items()}
        if points and all(map(math.isfinite, points.values())):
            return {"name": str(given["name"]), "points": points}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f'{path}: expected {{"name": "…", "points": {{"50": 6.04, …}}}}')


def draw(folders, out_path, reference=None, x="steps", y="auto"):
    """Draws the runs in `folders` into the picture `out_path`; reference: {"name": str, "points": {step: loss}}."""
    runs = load(folders)
    with drawing(runs, x, choose_y(runs, y), reference) as figure:
        save(figure, out_path)


def save(figure, out_path):
    try:
        figure.savefig(out_path, dpi=110, facecolor="white")
    except (OSError, ValueError) as error:  # ValueError: an unknown kind of picture
        raise UserError(f"{out_path}: cannot write the picture ({error})") from None


def draw_fit(logs, out_path):
    """Prints and draws what run/fit.py finds in these runs."""
    from run import fit

    ends, left_out = fit.ends_of(load(logs))
    print(*left_out, sep="\n", end="\n" * bool(left_out))  # also where the others are too few
    law, factors, lines = fit.fit(ends)
    print(*lines, sep="\n")
    with styled(4.2) as figure:
        fit.draw(figure, law, factors, COLORS)
        save(figure, out_path)
    print(f"drawn: {out_path}")


@contextlib.contextmanager
def styled(height):
    """An empty figure, 10 inches wide, to be drawn and saved within the context, which holds its style."""
    import matplotlib  # takes half a second, and --help does without
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(10, height), layout="constrained")


@contextlib.contextmanager
def drawing(runs, x, y, reference=None):
    """A figure of all panels, to be saved within the context, which holds its style."""
    from matplotlib.ticker import EngFormatter

    if reference and (x, y) != ("steps", "loss"):
        raise UserError(f"--reference has losses by step, which --x={x} --y={y} cannot show")
    known = {
        key
        for key, (kind, *_) in PANELS.items()
        if any(len(series(run.log, kind, key)[0]) > 1 for run in runs)
    }
    panels = [key for key in PANELS if key in known]
    columns = max(1, len(panels) if len(panels) < 5 else 3)
    rows = math.ceil(len(panels) / columns)
    with styled(3.7 + 1.9 * rows) as figure:
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # inches, so that outer tick labels are not cut
        heights = [2, rows] if rows else [2]
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        whole, end = parts[0].subplots(1, 2, width_ratios=[3, 2])
        draw_loss(whole, runs, x, y, reference)
        draw_loss(end, runs, x, y, reference)
        show_end(end)
        for i, key in enumerate(panels):
            axes = parts[1].add_subplot(rows, columns, i + 1, xlim=whole.get_xlim())
            draw_panel(axes, runs, x, key)
            axes.locator_params(axis="x", nbins=5)
        for axes in figure.axes:
            axes.set_xlabel(AXES[x])
            if x in ("tokens", "flops"):
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        yield figure


def draw_loss(axes, runs, x, y, reference):
    """Training and validation loss of every run, and the reference."""
    unit = "nats a token" if y == "loss" else "bits per byte"
    axes.set_title(f"loss, {unit}: training thin, validation with marks")
    highest, lowest = [], []
    for run in runs:
        (steps, loss), (at, val) = (series(run.log, kind, "loss") for kind in ("train", "val"))
        loss, val = loss * run.factor(y), val * run.factor(y)
        if len(loss):
            label = f"_{run.name}, training" if len(val) else run.name
            draw_smoothed(axes, run, run.place(steps, x), loss, label, 0.6)
        if len(val):
            marks = dict(marker="o", markersize=run.width + 3, markeredgecolor="white", markeredgewidth=0.6)
            label = f"{run.name}: {val[-1]:.3f}"
            axes.plot(
                run.place(at, x), val, color=run.color, linewidth=run.width, zorder=3, label=label, **marks
            )
        both = np.concatenate([loss, val])
        lowest.append(both.min())
        highest.append(max([np.quantile(both, 0.97), *loss[:1], *val[:1]]))
    if reference:
        points = sorted((int(step), loss) for step, loss in reference["points"].items())
        axes.plot(*zip(*points), "--s", color="#374151", markersize=3, linewidth=1, label=reference["name"])
        lowest.append(min(loss for _, loss in points))
        highest.append(max(loss for _, loss in points))
    fit_y(axes, min(lowest), max(highest))
    curves, names = axes.get_legend_handles_labels()
    listed = sorted(np.argsort([curve.get_ydata()[-1] for curve in curves])[:LISTED])
    title = f"the {LISTED} lowest of {len(curves)}" if len(curves) > LISTED else None
    axes.legend([curves[i] for i in listed], [names[i] for i in listed], loc="upper right", title=title)


def show_end(axes):
    """Limits a panel of losses to the ends of the runs.

    It begins at half of the shortest run, but not before a fifth of the longest one.
    """
    lines = [line.get_data() for line in axes.lines if not line.get_label().startswith("_child")]
    first, ends = min(x[0] for x, _ in lines), [x[-1] for x, _ in lines]
    start, last = first + max((min(ends) - first) / 2, (max(ends) - first) / 5), max(ends)
    values = np.concatenate([np.asarray(y)[np.asarray(x) >= start] for x, y in lines])
    axes.set_xlim(start, last + 0.03 * (last - start) if last > first else last + 1)
    fit_y(axes, values.min(), values.max())
    axes.set_title("the end")
    axes.get_legend().remove()


def fit_y(axes, low, high):
    """The limits of y, and a logarithmic scale where the first loss would press the last ones together."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullFormatter, NullLocator

    if 0 < 2 * low < high:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.04, high * (high / low) ** 0.04)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if high < 6 * low else (1, 2, 5))
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        margin = 0.05 * (high - low) + 1e-3
        axes.yaxis.set_major_locator(AutoLocator())
        axes.set_ylim(low - margin, high + margin)


def draw_smoothed(axes, run, x, values, label, width=1):
    """A thin line and its running mean, of at most some 2,000 points each."""
    few = slice(None, None, max(1, len(values) // 2000))
    axes.plot(x[few], values[few], color=run.color, linewidth=0.6, alpha=0.25, zorder=1.5)
    axes.plot(x[few], smooth(values)[few], color=run.color, linewidth=width * run.width, label=label)


def draw_panel(axes, runs, x, key):
    """One of the panels below the loss."""
    kind, title, factor = PANELS[key]
    axes.set_title(title)
    values = []
    for run in runs:
        steps, y = series(run.log, kind, key)
        values += [*(y * factor)]
        if key in ("acc_norm", "lr"):
            marks = {"marker": "o", "markersize": run.width + 2} if key == "acc_norm" else {}
            look = {"color": run.color, "linewidth": run.width, "label": f"_{run.name}"}
            axes.plot(run.place(steps, x), y, **look, **marks)
        elif len(y):
            draw_smoothed(axes, run, run.place(steps, x), y * factor, f"_{run.name}")
    if key == "acc_norm":
        axes.axhline(0.25, color="#9ca3af", linestyle=":", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate("chance", (0.98, 0.25), color="#6b7280", **place)
    elif key == "norm":
        fit_y(axes, min(values), max(values))
    elif key == "lr":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, 1.1 * np.quantile(values, 0.98))


def write_page(folders, out_path, reference=None, x="steps", y="auto"):
    """Writes one HTML page about the runs in `folders`, with the curves over every x that their logs know."""
    from run import page

    runs, curves = load(folders), {}
    y = choose_y(runs, y)
    for name in sorted(AXES, key=lambda name: name != x):
        try:
            with drawing(runs, name, y, reference if name == "steps" else None) as figure:
                picture = io.StringIO()
                figure.savefig(picture, format="svg")
                svg = re.sub(r".*?(?=<svg)", "", picture.getvalue(), count=1, flags=re.DOTALL)
                curves[AXES[name]] = svg, page.readings(figure)
        except UserError:
            if name == x:
                raise
    try:
        Path(out_path).write_text(page.build(runs, curves), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out_path}: cannot write the page ({error.strerror})") from None


if __name__ == "__main__":
    configurator.run(lambda cfg: main(cfg, cfg.words), Config)
