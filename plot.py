"""Curves of one or several runs, as a picture.

    python plot.py out/gpt2_124m                                 # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --names=before,after --x=seconds --out=compare.svg
    python plot.py out/a out/b --no_panels --dark --out=slide.png    # the losses alone, for a slide
    python plot.py out/a assets/build_nanogpt.jsonl              # beside the losses of another program
    python plot.py out/gate_* --against out/base_* --out=gate.png    # means over seeds, and their difference
    python plot.py out/a --norms                  # -> out/a/norms.png: where a spike comes from, by matrix

Shows the loss and, of several runs, its end once more, larger. Below are small panels, as far as a run has
them: HellaSwag, learning rate, gradient norm, tokens per second, figures of your own that the model's forward
returns (extras), and evaluations of your own.

With --against it prints a table too: runs that differ in seeds alone are a group, with its mean loss ± the
standard deviation; of each two groups the difference, with a 95% interval. --norms shows what a run with
--norms_interval has logged.
"""

import itertools
import json
import math
import os
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import configurator
import settings
from configurator import UserError, listed, refuse
from measure import seeds
from system import files

# blue, orange, green, pink, ochre, sky, after Okabe and Ito's, which the colour-blind can tell apart
LIGHT = dict(paper="#ffffff", ink="#1f2328", grid="#e5e7eb")
LIGHT |= dict(colors=["#0072b2", "#d55e00", "#009e73", "#b8528c", "#b07d00", "#3a9bd6"])
DARK = dict(paper="#0d1117", ink="#e6edf3", grid="#262c36")
DARK |= dict(colors=["#4aa8ff", "#ff8a4c", "#2ecc9b", "#f08ac0", "#f2c14e", "#9be0ff"])
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1))]  # of the first six runs, the next six, and so on
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
STYLE |= {"axes.titlelocation": "left", "axes.titlesize": "medium"}
STYLE |= {"axes.formatter.useoffset": False, "text.parse_math": False, "svg.fonttype": "none"}

AXES = dict(steps="step", tokens="tokens", seconds="seconds of training steps")
UNITS = {"loss": "nats a token", "bpb": "bits per byte"}
BEGINNING = 0.1  # part of a run whose losses may lie above the panel: their fall would press the rest flat
END = 0.6  # part of the axis from which on the second panel shows the end of several runs
JOINED = 4  # marks from which on a line joins them
MOST = 6  # panels of extras, and of evaluations of your own

NUMBER = lambda v: v is None or files.number(v) and abs(v) < 1e39  # float32's largest is 3.4e38
LINE = {"kind": files.text, "step": files.count}
KEYS = "loss bpb stderr bpb_stderr tokens lr norm dt_ms tok_per_s step_ms acc_norm".split()
OURS = LINE | {f"{key}?": NUMBER for key in KEYS} | {"extras?": {str: NUMBER}, "rows?": [[lambda v: True]]}
NORMS = ("weight", "gradient", "update")
OURS |= {"held_out?": files.text} | {f"{kind}?": {str: NUMBER} for kind in NORMS}
DRAWN = ("start", "train", "val", "hellaswag", "norms")  # kinds of lines that are of this form
NOT_DRAWN = ("sample", "saved", "done", "stopped", "skipped", "spike")  # any other kind is an evaluation


@dataclass(frozen=True)
class Panel:
    """A small panel of one figure of the lines of a kind, or, without a kind, of one of the extras."""

    title: str
    kind: str | None
    key: str


HELLASWAG = Panel("HellaSwag acc_norm; dotted: chance", "hellaswag", "acc_norm")
RATE = Panel("learning rate", "train", "lr")
NORM = Panel("gradient norm", "train", "norm")
SPEED = Panel("tokens/s", "train", "tok_per_s")


@dataclass
class Config:
    words = ()  # folders of runs, or files of logs
    against: tuple[str, ...] = ()  # folders of other runs, from which those before are to differ
    norms: bool = False  # a run's RMS of each matrix' weight, gradient and update, over its median
    x: Literal["steps", "tokens", "seconds"] = "steps"  # seconds: of training steps alone
    y: Literal["loss", "bpb"] = "loss"  # bpb: bits per byte, which compare between tokenizers
    names: str | None = None  # of the runs, with commas between; None: the settings that differ, or folders
    panels: bool = True  # --no_panels: the losses alone, for a slide
    dark: bool = False  # light lines on a dark ground
    out: str | None = None  # .png, .svg or .pdf; None: curves.png, or norms.png, in the first folder


def main(cfg):
    if not cfg.words:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    theme = DARK if cfg.dark else LIGHT
    runs = load([*cfg.words, *cfg.against], cfg.names, theme)
    if cfg.against:
        print_table(runs[: len(cfg.words)], runs[len(cfg.words) :], theme)
    figure = draw_norms(runs, theme) if cfg.norms else draw(runs, cfg.x, cfg.y, cfg.panels, theme)
    first, name = Path(cfg.words[0]), "norms.png" if cfg.norms else "curves.png"
    out = Path(cfg.out or (first / name if first.is_dir() else first.with_suffix(".png")))
    write(figure, out)


def write(figure, out):
    """Writes a figure to the file `out`."""
    try:
        with warnings.catch_warnings(record=True) as missing:  # one for each glyph
            warnings.filterwarnings("always", "Glyph .* missing")
            figure.savefig(out, dpi=160)
    except (OSError, ValueError) as error:  # ValueError: an unknown kind of picture
        raise UserError(f"{out}: cannot write the picture ({error})") from None
    configurator.warn(missing and "the font lacks characters of the names, which are drawn as boxes")
    print(f"drawn: {out}")


# -- logs


def load(folders, names=None, theme=LIGHT):
    """[Run] of folders or files. names: one text, with commas between."""
    colors, runs = theme["colors"], []
    for i, folder in enumerate(folders):
        runs.append(Run(folder, "", colors[i % len(colors)], DASHES[i // len(colors) % len(DASHES)]))
    found = differences([run.settings() for run in runs]) or folder_names(folders)
    if names is not None:
        found = [name.strip() for name in names.split(",")]
    if len(found) != len(runs):
        raise UserError(f"names={names} has {len(found)} names, but there are {len(runs)} runs")
    for run, name in zip(runs, found):
        run.name = name.encode(errors="replace").decode()  # one that is not UTF-8
        run.alone = len(runs) == 1
    return runs


def folder_names(folders):
    """The last part of each path; the whole path where that is no name of one alone."""
    names = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names)]


APART = "out_dir resume overwrite wandb device batch_size eval_interval eval_tokens hellaswag_interval"
APART += " sample_interval sample_prompt save_interval keep_last async_save log_interval timeout_s"


SEEDS = "seed shuffle_seed"


def differences(given):
    """Names, "lr=0.001", from what differs in [{setting: text}]; None where it makes no short, own names."""
    keys = dict.fromkeys(key for each in given for key in each if key not in APART.split())
    full = [{key: each.get(key, str(getattr(settings.Config, key, None))) for key in keys} for each in given]
    differ = [key for key in keys if len({each[key] for each in full}) > 1]
    names = [", ".join(f"{key}={each[key]}" for key in differ) for each in full]
    short = len(differ) in (1, 2) and max(map(len, names)) <= 36
    return names if short and all(given) and len({*names}) == len(names) else None


class Run:
    """A run as it is drawn. log: see `read`; start: the line that the last start wrote, or {}."""

    def __init__(self, folder, name, color, dash):
        self.folder, self.name, self.color, self.dash = folder, name, color, dash
        self.alone = False  # in its picture
        self.log = read(folder)
        self.start = max(self.log.get("start", {0: {}}).items())[1]

    def settings(self):
        """{name: text} of the settings that the log's line of its start lists; {} if there is none."""
        text = " ".join(str(row[-1]) for row in self.start.get("rows", ()) if row[:1] == ["settings"])
        try:
            words = shlex.split(text)
        except ValueError:  # older logs do not quote
            words = text.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def place(self, steps, x):
        """Where steps lie on the axis x; UserError if the log does not say."""
        if x == "steps":
            return steps
        if x == "seconds" and self.start.get("step_ms"):  # a small log of results/ has a step's median
            return steps * self.start["step_ms"] / 1e3
        at, values = series(self.log, "train", "dt_ms" if x == "seconds" else "tokens")
        if not len(at):
            raise UserError(f"{self.folder}: its log does not hold what x={x} needs; try --x=steps")
        first = 0
        if x == "seconds":  # a start's first step compiles
            values = np.where(np.isin(at - 1, [*self.log.get("start", ())]), np.median(values), values)
            first, values = at[0] - 1, np.cumsum(values) / 1e3
        return np.interp(steps, [first, *at], [0, *values])

    def losses(self, kind, y):
        """(steps, losses) of kind train or val; in bits per byte by the ratio at the last validation.

        The validation before the first step is left out of a log with training: it is far above the rest.
        """
        steps, loss = series(self.log, kind, "loss")
        if kind == "val" and self.log.get("train"):
            steps, loss = steps[steps > 0], loss[steps > 0]
        if y == "loss":
            return steps, loss
        lines = self.log.get("val", {}).values()
        ratios = [line["bpb"] / line["loss"] for line in lines if line.get("bpb") and line.get("loss")]
        if not ratios:
            raise UserError(f"{self.folder}: no bits per byte in its log; try --y=loss")
        return steps, loss * ratios[-1]

    def end(self, y):
        """(step, loss) of the last validation, or else of the running mean of training."""
        steps, loss = self.losses("val", y)
        if not len(steps):
            steps, loss = self.losses("train", y)
            loss = smooth(loss)
        return steps[-1], loss[-1]

    def stderr(self, y):
        """The standard error of the last validation over documents, or None."""
        lines = self.log.get("val", {0: {}})
        return lines[max(lines)].get("stderr" if y == "loss" else "bpb_stderr")


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
            for wrong in files.misfits(entry, OURS if entry["kind"] in DRAWN else LINE):
                raise ValueError(wrong)
            found.setdefault(entry["kind"], {})[entry["step"]] = entry
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {error}") from None
    if not any(len(series(found, kind, "loss")[0]) for kind in ("train", "val")):
        raise UserError(f"{path}: it holds no finite training or validation loss; nothing to draw")
    return found


def series(log, kind, key, extra=False):
    """(steps, values) as float arrays, without missing values. extra: the key is one of a line's extras."""
    points = []
    for step, row in sorted(log.get(kind, {}).items()):
        value = row.get("extras", {}).get(key) if extra else row.get(key)
        if value is not None and NUMBER(value):
            points.append((step, value))
    return np.array(points, dtype=float).reshape(-1, 2).T


def smooth(values):
    """Mean over a window of 1/20 of the run that is centred on each point, shorter at the ends."""
    window = np.ones(2 * (max(1, len(values) // 20) // 2) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


# -- several seeds


def print_table(runs, others, theme):
    """Means over seeds, and how `runs` differ from `others`; gives the runs of a group one colour."""
    folders = [Path(run.folder).resolve() for run in runs + others]
    wrong = [f"{folder} is given twice" for folder in {*folders} if folders.count(folder) > 1]
    for run in runs + others:
        if not len(run.losses("val", "loss")[0]):
            wrong.append(f"{run.folder}: no validation loss in its log, which a table needs")
        if "step_ms" not in run.start and max(run.log.get("done", [0])) < max(run.log.get("train", [0])):
            configurator.warn(f"{run.folder} has not come to its end: the table has its last validation")
    refuse(wrong)
    sides = [[*grouped(side).values()] for side in (runs, others)]
    groups = sides[0] + sides[1]
    for group, color in zip(groups, itertools.cycle(theme["colors"])):
        for run, run.dash in zip(group, itertools.cycle(DASHES)):
            run.color = color
    names = differences([recipe(group[0]) for group in groups]) or map(beginning, groups)
    found = [summary(name, group) for name, group in zip(names, groups)]
    if len({group.rows for group in found}) > 1:
        what = "not all runs were validated on the same rows, as far as their logs say"
        configurator.warn(f"{what}: losses may not compare; bits a byte do, of the same text")
    print(*seeds.table(found[: len(sides[0])], found[len(sides[0]) :]), sep="\n")


def grouped(runs):
    """{recipe: runs}."""
    groups = {}
    for run in runs:
        groups.setdefault(str(sorted(recipe(run).items())), []).append(run)
    return groups


def recipe(run):
    """{setting: text} of a run but for seeds, and for what decides no loss."""
    return {name: text for name, text in run.settings().items() if name not in f"{APART} {SEEDS}".split()}


def beginning(group):
    """What the names of a group's folders begin with, or else those names."""
    names = folder_names([run.folder for run in group])
    return os.path.commonprefix(names).rstrip("_-. 0123456789") or listed(names)


def summary(name, group):
    """The seeds.Group of some runs. Raises UserError for two with the same seed."""
    own = [str([run.settings().get(key) for key in SEEDS.split()]) for run in group]
    if len({*own}) < len(own) and all(run.settings() for run in group):
        folders = listed([str(run.folder) for run in group])
        raise UserError(f"{folders}: two have the same seed, which counts once; leave one out")
    ends = [run.end("loss")[0] for run in group]
    figures = {}
    for figure in ("loss", "bpb", "seconds", "tokens"):
        try:
            if figure in UNITS:
                values = [run.end(figure)[1] for run in group]
            else:
                values = [run.place(end, figure) for run, end in zip(group, ends)]
            figures[figure] = np.array(values)
        except UserError:  # a log does not say
            figures[figure] = None
    rows = {run.log["val"][end].get("held_out") for run, end in zip(group, ends)}
    return seeds.Group(name, own, figures, rows.pop() if len(rows) == 1 else None)


# -- pictures


def draw(runs, x, y, panels=True, theme=LIGHT):
    """A figure of the losses and, with `panels`, of all else that the logs hold."""
    small = choose_panels(runs) if panels else []
    rows = -(-len(small) // 4)
    heights = [3.7, 1.9 * rows] if small else [4.4]  # inches
    with matplotlib.rc_context(STYLE | theme_style(theme) | {"font.size": 9 if panels else 11}):
        figure = Figure(figsize=(10, sum(heights)), layout="constrained")
        upper, *lower = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_losses(upper, runs, x, y, panels)
        for i, panel in enumerate(small):
            axes = lower[0].add_subplot(rows, -(-len(small) // rows), i + 1, xlim=figure.axes[0].get_xlim())
            draw_panel(axes, runs, x, panel)
        for axes in figure.axes:
            axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == "tokens" else "{x:,g}")
    return figure


def theme_style(theme):
    """matplotlib's settings of a theme."""
    style = {"grid.color": theme["grid"]}
    style |= dict.fromkeys(["figure.facecolor", "axes.facecolor"], theme["paper"])
    inks = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]
    return style | dict.fromkeys(inks, theme["ink"])


def draw_losses(part, runs, x, y, panels):
    """Training and validation loss; of several runs the end once more; names and last losses at the right."""
    widths = [2, 1] if panels and len(runs) > 1 else [1]
    first, *end = part.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    kinds = {"train": "training thin", "val": "validation with marks"}
    kinds = [words for kind, words in kinds.items() if any(len(run.losses(kind, y)[0]) for run in runs)]
    title = f"loss, {UNITS[y]}: {', '.join(kinds)}"
    faint = 0.9 if len(runs) == 1 else 0.55 if panels else 0.35
    for axes in (first, *end):
        curves = [curve for run in runs for curve in draw_loss(axes, run, x, y, faint, axes is first)]
        axes.set_xlabel(AXES[x])
        right = max(at[-1] for at, _ in curves) or 1
        left = None if axes is first else END * right
        axes.set_xlim(left or -0.015 * right, 1.015 * right)
        fit(axes, [worth_showing(at, values, left) for at, values in curves])
        axes.set_title("the end" if left else title)
    label_ends(axes, runs, x, y)


def draw_loss(axes, run, x, y, faint, both):
    """Both losses of a run, or training only where validation is no line; returns the curves, [(x, y)]."""
    curves = []
    steps, loss = run.losses("train", y)
    at, val = run.losses("val", y)
    if len(steps) and (both or len(val) < JOINED):
        look = dict(linewidth=1.1, alpha=faint if len(val) >= JOINED else 1, label=f"_{run.name}, training")
        curves.append(draw_smoothed(axes, run, run.place(steps, x), loss, **look))
    if len(val):
        curves.append(draw_marks(axes, run, run.place(at, x), val, label=run.name))
    return curves


def draw_smoothed(axes, run, x, values, **look):
    """A running mean, of at most some 2,000 points, with the values of a run alone as noise; returns it."""
    few = slice(None, None, max(1, len(values) // 2000))
    mean = smooth(values)
    axes.plot(x[few], mean[few], color=run.color, linestyle=run.dash, **look)
    if run.alone:
        axes.plot(x[few], values[few], color=run.color, linewidth=0.6, alpha=0.2, zorder=1.5)
    return x, mean


def draw_marks(axes, run, x, values, **look):
    """Points, joined unless there are so few that the line would lie across the curve; returns them."""
    look |= dict(marker="o", markersize=5 if len(values) <= 30 else 3, linewidth=1.8)
    look |= dict(linestyle=run.dash if len(values) >= JOINED else "", zorder=2.5)
    axes.plot(x, values, color=run.color, markeredgecolor=matplotlib.rcParams["axes.facecolor"], **look)
    return x, values


def worth_showing(at, values, left=None):
    """The losses right of `left`, or all but the beginning's, without those of a run that diverges."""
    after = values[at >= BEGINNING * at[-1]]
    shown = after if left is None else values[at >= left]
    return shown[shown <= after[0] + abs(after[0]) / 2]


def fit(axes, shown):
    """Limits of y for these arrays."""
    values = np.concatenate(shown)
    if len(values):
        margin = 0.06 * np.ptp(values) or 0.05 * abs(values[0]) or 1
        axes.set_ylim(values.min() - margin, values.max() + margin)


def label_ends(axes, runs, x, y):
    """The last loss and the name of each run, right of the panel, in its colour, with a line to its end."""
    ends = [run.end(y) for run in runs]
    low, high = axes.get_ylim()
    heights = np.clip([(loss - low) / (high - low) for _, loss in ends], 0, 1)
    size = min(matplotlib.rcParams["font.size"] + 1, 200 / len(runs))  # points; a panel has some 220
    for run, (step, loss), height, place in zip(runs, ends, heights, spread(heights, 1.35 * size / 220)):
        # of a difference between runs, which read the same documents, the error is far less
        error = run.stderr(y) if run.alone else None
        words = f"{loss:.3f}" + (f" ±{error:.3f}" if error else "") + f"  {run.name[-40:]}"
        line = dict(arrowstyle="-", color=run.color, linewidth=0.7, alpha=0.6)
        line |= dict(relpos=(0, 0.5), shrinkA=1, shrinkB=3)  # from the text's left edge; points left free
        end = run.place(np.array([step]), x)[0], low + height * (high - low)
        look = dict(color=run.color, fontsize=size, va="center", annotation_clip=False, arrowprops=line)
        axes.annotate(words, end, (1.03, place), textcoords="axes fraction", **look)


def spread(places, gap):
    """The places, each moved as little as possible (least squares) until they are `gap` apart, in order."""
    order, groups = np.argsort(places), []  # [mean of the group's places without their gaps, its size]
    for rank, i in enumerate(order):
        groups.append([places[i] - gap * rank, 1])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, n), (b, m) = groups[-2:]
            groups[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    found = np.empty(len(places))
    found[order] = np.repeat(*zip(*groups)) + gap * np.arange(len(places))
    return found


def choose_panels(runs):
    """[Panel] of what the logs hold: of two points at least, of HellaSwag three, since two show noise."""
    most = lambda panel: max(len(series(run.log, panel.kind, panel.key)[0]) for run in runs)
    panels = [HELLASWAG] if most(HELLASWAG) > 2 else []
    for what, own in (("evaluations", own_evaluations(runs)), ("extras", own_extras(runs))):
        panels += own[:MOST]
        if len(own) > MOST:
            left_out = ", ".join(panel.title for panel in own[MOST:])
            configurator.warn(f"of {what} {MOST} are drawn; left out: {left_out}")
    return panels + [panel for panel in (RATE, NORM, SPEED) if most(panel) > 1]


def own_evaluations(runs):
    """[Panel] of the numbers in lines of kinds that are not a run's own."""
    found = {}
    for run in runs:
        for kind, lines in run.log.items():
            if kind not in DRAWN + NOT_DRAWN:
                found |= {(kind, key): Panel(f"{kind} {key}", kind, key) for key in numbers(lines.values())}
    return [*found.values()]


def own_extras(runs):
    """[Panel] of the extras in lines of training and validation."""
    found = {}
    for run in runs:
        for kind in ("train", "val"):
            extras = [line.get("extras", {}) for line in run.log.get(kind, {}).values()]
            found |= {key: Panel(key, None, key) for key in numbers(extras)}
    return [*found.values()]


def numbers(rows):
    """The names of the numbers in objects of a log, in their order, but for the step and how long it took."""
    known = ("step", "seconds")
    drawn = lambda key, value: key not in known and value is not None and NUMBER(value)
    return dict.fromkeys(key for row in rows for key, value in row.items() if drawn(key, value))


def draw_panel(axes, runs, x, panel):
    """One of the panels below the losses."""
    curves, peaks = [], [max(series(run.log, "train", "lr")[1], default=1) or 1 for run in runs]
    share = panel == RATE and max(peaks) > 2 * min(peaks)  # Muon's rate would press the others flat
    for run, peak in zip(runs, peaks):
        for kind in [panel.kind] if panel.kind else ["train", "val"]:
            steps, values = series(run.log, kind, panel.key, extra=panel.kind is None)
            if not len(steps):
                continue
            at, values = run.place(steps, x), values / peak if share else values
            if panel == RATE:
                axes.plot(at, values, color=run.color, linestyle=run.dash, linewidth=1.2)
            elif kind == "train":
                curves.append(draw_smoothed(axes, run, at, values, linewidth=1.2))
            else:
                curves.append(draw_marks(axes, run, at, values))
    axes.set_title(f"{panel.title} / its peak" if share else panel.title)
    axes.locator_params(axis="x", nbins=5)
    if panel == HELLASWAG:
        axes.axhline(0.25, color=matplotlib.rcParams["text.color"], linewidth=1, linestyle=":")
    elif panel == SPEED:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.15 * max(np.quantile(values, 0.98) for _, values in curves))
    elif panel == NORM or panel.kind is None:
        fit(axes, [values[at >= BEGINNING * at[-1]] for at, values in curves])


# -- norms


def draw_norms(runs, theme):
    """A figure of a run's lines of norms: RMS of each matrix over its median of the run, in colour.

    Above are the loss, the gradient norm and the rate. Prints where each kind rises most.
    """
    lines = runs[0].log.get("norms")
    if len(runs) > 1 or not lines:
        raise UserError("--norms draws one run that was trained with --norms_interval=N")
    steps, names = sorted(lines), [*lines[max(lines)]["weight"]]
    kind_of = lambda name: re.sub(r"^blocks\.\d+\.", "", name)
    kinds = [*dict.fromkeys(map(kind_of, names))]
    names.sort(key=lambda name: kinds.index(kind_of(name)))
    firsts = [[*map(kind_of, names)].index(kind) - 0.5 for kind in kinds]
    heights = [1.2, 1 + max(2.5, 0.045 * len(names))]  # inches
    with matplotlib.rc_context(STYLE | theme_style(theme) | {"font.size": 9}):
        figure = Figure(figsize=(11, 1 + sum(heights)), layout="constrained")
        axes = figure.subplots(2, 3, sharex=True, height_ratios=heights)
        for (upper, lower), kind, key in zip(axes.T, NORMS, ("loss", "norm", "lr")):
            upper.plot(*series(runs[0].log, "train", key), color=theme["ink"], linewidth=0.8)
            upper.set_title(key)
            values = [[lines[step][kind].get(name) or math.nan for step in steps] for name in names]
            values = np.ma.masked_invalid(values)  # zero, or not finite
            values /= np.ma.median(values, axis=1, keepdims=True)
            look = dict(norm=matplotlib.colors.LogNorm(1 / 8, 8), cmap="RdBu_r", shading="nearest")
            colors = lower.pcolormesh(steps, range(len(names)), values, **look)
            lower.set_title(f"{kind}: RMS / median of the run")
            lower.set(xlabel="step", ylim=(len(names) - 0.5, -0.5))
            lower.set_yticks(firsts, kinds if kind == NORMS[0] else [""] * len(kinds), va="top")
            lower.grid(False)
            for first in firsts:
                lower.axhline(first, color="gray", linewidth=0.5)
            late = np.where(np.array(steps) >= BEGINNING * steps[-1], values.filled(0), 0)
            row, column = np.unravel_index(late.argmax(), late.shape)
            place = f"{names[row]} at step {steps[column]}"
            print(f"{kind}: at most {late[row, column]:.1f} times its median, in {place}")
        ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
        figure.colorbar(colors, ax=axes[1], ticks=ticks, format="{x:g}").minorticks_off()
    return figure


if __name__ == "__main__":
    configurator.run(main, Config)
