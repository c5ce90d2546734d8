"""The logs of runs, log.jsonl, as plot.py draws and compares them."""

import json
import shlex
from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np

from settings import Config
from system import files
from system.errors import UserError

# kinds of lines that are not evaluations of your own
OURS = "start train val hellaswag norms sample saved done stopped skipped spike".split()
SEEDS = ("seed", "shuffle_seed")
# settings that decide no loss, and name no run
APART = (
    "out_dir resume overwrite wandb device batch_size eval_interval eval_tokens hellaswag_interval "
    "sample_interval sample_prompt save_interval keep_last async_save log_interval timeout_s"
).split()


class Run:
    """A run by its log.

    figures: {(kind, key): {step: value}}, where the key of an extra is "extras.NAME".
    """

    color = "C0"  # matplotlib's
    dash = "-"

    def __init__(self, folder):
        self.folder = folder
        self.name = ""
        self.figures = {}
        for kind, lines in read(folder).items():
            for step, line in lines.items():
                for key, value in flat(line).items():
                    self.figures.setdefault((kind, key), {})[step] = value
        if not any(len(self.series(kind, "loss")[0]) for kind in ("train", "val")):
            raise UserError(
                f"{folder}: it holds no finite training or validation loss; nothing to draw"
            )

    @cached_property
    def settings(self):
        """{name: text} of the settings of the last start, without APART; {} if it lists none."""
        starts = self.figures.get(("start", "rows"), {0: []})
        rows = starts[max(starts)]
        text = " ".join(str(row[-1]) for row in rows if row[:1] == ["settings"])
        try:
            words = shlex.split(text)
        except ValueError:  # older logs do not quote
            words = text.split()
        pairs = [word.split("=", 1) for word in words if "=" in word]
        return {name: value for name, value in pairs if name not in APART}

    def series(self, kind, key):
        """(steps, values) of a figure, float arrays without missing values.

        bpb: losses in bits per byte. The validation before the first step is left out of a log with
        training: it is far above the rest.
        """
        if key == "bpb" and kind in ("train", "val"):
            steps, loss = self.series(kind, "loss")
            return steps, loss * self.bits_per_nat()
        points = []
        trained = ("train", "loss") in self.figures
        for step, value in sorted(self.figures.get((kind, key), {}).items()):
            for wrong in files.misfits(value, (None, files.number), key):
                raise UserError(f"{self.folder}: not a log: in {kind} {step} {wrong}")
            at_start = step == 0 and (kind, key) == ("val", "loss") and trained
            if value is not None and not at_start:
                points.append((step, value))
        return np.array(points, dtype=float).reshape(-1, 2).T

    def bits_per_nat(self):
        """The bits per byte over the loss, at the last validation that has both."""
        bits = self.figures.get(("val", "bpb"), {})
        loss = self.figures.get(("val", "loss"), {})
        ratios = [bits[step] / loss[step] for step in sorted(bits) if bits[step] and loss.get(step)]
        if not ratios:
            raise UserError(f"{self.folder}: no bits per byte in its log; try --y=loss")
        return ratios[-1]

    def place(self, steps, x):
        """Where steps lie on the axis x; UserError if the log does not say."""
        if x == "steps":
            return steps
        step_ms = self.series("start", "step_ms")[1]  # the median, in a small log of results/
        if x == "seconds" and len(step_ms):
            return steps * step_ms[-1] / 1e3
        at, values = self.series("train", "dt_ms" if x == "seconds" else "tokens")
        if not len(at):
            raise UserError(f"{self.folder}: its log does not hold what x={x} needs; try --x=steps")
        if x == "seconds":
            starts = self.figures.get(("start", "step"), [])
            # the first step after a start compiles
            values[np.isin(at - 1, list(starts))] = np.median(values)
            values = np.cumsum(values) / 1e3
        return np.interp(steps, [0, *at], [0, *values])

    def end(self, y):
        """(step, loss) of the last validation, or else of the running mean of training."""
        steps, loss = self.series("val", y)
        if not len(steps):
            steps, loss = self.series("train", y)
            loss = smooth(loss)
        return steps[-1], loss[-1]

    def last(self, kind):
        """The step of the last line of a kind, or 0."""
        return max(self.figures.get((kind, "step"), [0]))

    def at_last_validation(self, key):
        """A figure of the last validation, or None."""
        return self.figures.get(("val", key), {}).get(self.end("loss")[0])


def flat(line):
    """A line in which the entries of objects have keys as "extras.NAME" too."""
    found = {}
    for key, value in line.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def load(folders, names=None):
    """[Run] of folders or files. names: one text, with commas between."""
    runs = [Run(folder) for folder in folders]
    if names is None:
        found = differences([run.settings for run in runs]) or folder_names(folders)
    else:
        found = [name.strip() for name in names.split(",")]
    if len(found) != len(runs):
        raise UserError(f"names={names} has {len(found)} names, but there are {len(runs)} runs")
    for run, name in zip(runs, found):
        run.name = name.encode(errors="replace").decode()  # one that is not UTF-8
    return runs


def folder_names(folders):
    """The last part of each path; the whole path where that is no name of one alone."""
    names = [Path(folder).resolve().name.removesuffix(".jsonl") for folder in folders]
    count = Counter(names)
    return [name if count[name] == 1 else str(folder) for folder, name in zip(folders, names)]


def differences(given):
    """Names, "lr=0.001", from what differs in [{setting: text}].

    None if these are not short, or two are the same.
    """
    differing = {}
    for setting in {name: None for each in given for name in each}:
        default = str(getattr(Config, setting, None))
        values = [each.get(setting, default) for each in given]
        if len(set(values)) > 1:
            differing[setting] = [f"{setting}={value}" for value in values]
    names = [", ".join(words) for words in zip(*differing.values())]
    if all(given) and len(differing) in (1, 2) and len(set(names)) == len(names):
        return names if max(map(len, names)) <= 36 else None


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
        raise UserError(
            f"{path}: {getattr(error, 'strerror', 'not text')}; expected a run's log"
        ) from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            # NaN and Infinity, of a run that diverged, become None
            entry = json.loads(line, parse_constant=lambda name: None)
            for wrong in files.misfits(entry, {"kind": files.text, "step": files.count}):
                raise ValueError(wrong)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {error}") from None
            continue
        if entry["kind"] == "start":
            found = {kind: up_to(entry["step"], lines) for kind, lines in found.items()}
        found.setdefault(entry["kind"], {})[entry["step"]] = entry
    return found


def up_to(last, lines):
    """Of {step: line} those up to the step `last`."""
    return {step: line for step, line in lines.items() if step <= last}


def smooth(values):
    """Mean over a window of 1/20 of the run that is centred on each point, shorter at the ends."""
    window = np.ones(2 * (max(1, len(values) // 20) // 2) + 1)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
