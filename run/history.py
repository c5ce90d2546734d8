"""A run's history, as its log.jsonl and config.json tell it. Imports no torch."""

import json
from pathlib import Path

import numpy as np

from configurator import UserError
from run.files import read_json, text

DRAWN = ("loss", "bpb", "dt_ms", "tokens", "norm", "lr", "acc_norm", "flops_per_token", "step_ms")


class Run:
    """A run as it is drawn. folder: a run's, or a log's file; log: see `read`; config: config.json, or {}; start: the
    line of its start block."""

    def __init__(self, folder, name, color, width):
        self.folder, self.name, self.color, self.width, self.log = folder, name, color, width, read(folder)
        path = Path(folder) / "config.json"
        self.config = read_json(path, form={"tokenizer?": (text, None)}) if path.exists() else {}
        self.start = start_of(self.log)

    def place(self, steps, x):
        """Where steps lie on the axis x; UserError if the log does not say."""
        if x == "steps":
            return steps
        if x == "seconds" and self.start.get(
            "step_ms"
        ):  # a small log of results/: a step's time, measured by itself
            return steps * self.start["step_ms"] / 1e3
        at, values = series(self.log, "train", "dt_ms" if x == "seconds" else "tokens")
        factor = self.start.get("flops_per_token") if x == "flops" else 1
        if not len(at) or factor is None:
            raise UserError(f"{self.folder}: its log does not hold what x={x} needs; try --x=steps")
        first, values = (at[0] - 1, np.cumsum(values) / 1e3) if x == "seconds" else (0, values * factor)
        return np.interp(steps, [first, *at], [0, *values])

    def factor(self, y):
        """What turns nats a token into y, over the validation tokens; None if their bytes are not known."""
        if y == "loss":
            return 1
        bpb, loss = (series(self.log, "val", key)[1] for key in ("bpb", "loss"))
        return bpb[-1] / loss[-1] if len(bpb) and len(loss) else None


def start_of(log):
    """The line of a log's start block, the last one's if the run was resumed; {} without one."""
    return max(log.get("start", {0: {}}).items())[1]


def read(folder):
    """{kind: {step: line}} of a run's log.jsonl. A later line of a step replaces an earlier one; a torn last line is
    ignored."""
    path = Path(folder)
    path = path if path.is_file() else path / "log.jsonl"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected the folder of a run of train.py") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text, so it is not a log") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if any(not isinstance(entry.get(key), int | float | None) for key in DRAWN):
                raise ValueError
            found.setdefault(entry["kind"], {})[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {line[:60]!r}") from None
    if not any(len(series(found, kind, "loss")[0]) for kind in ("train", "val")):
        raise UserError(f"{path}: it holds no finite training or validation loss; nothing to draw")
    return found


def series(log, kind, key):
    """(steps, values) as float arrays, without missing, NaN or infinite values (a diverged run)."""
    points = sorted(
        (step, line[key]) for step, line in log.get(kind, {}).items() if line.get(key) is not None
    )
    points = np.array(points, dtype=float).reshape(-1, 2)
    return points[np.isfinite(points[:, 1])].T


def smooth(values, width=None):
    """Mean over a window centred on each point (default: 1/40 of the run), shorter at the ends; it does not lag."""
    half = max(1, len(values) // 40) // 2 if width is None else width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
