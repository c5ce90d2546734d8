"""Curves of one or several runs.

    python plot.py out/gpt2_124m                                   # -> out/gpt2_124m/curves.png
    python plot.py out/a out/b --out=compare.png --reference=build_nanogpt.json

Reads each run's log.jsonl. Panels: loss (training thin and smoothed, validation as points), HellaSwag if a run has it,
learning rate, gradient norm, tokens per second.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path


from configurator import UserError, run

COLORS = ["#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2"]
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb"}
STYLE |= {"font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False}


@dataclass
class Config:
    out: str | None = None  # the PNG to write; None: curves.png in the first run's folder
    reference: str | None = None  # a JSON file, {"name": …, "points": {step: validation loss, …}}, drawn dashed


def main(cfg, runs):
    if not runs:
        raise UserError("give the folder of a run, or of several: python plot.py out/gpt2_124m")
    out = cfg.out or Path(runs[0]) / "curves.png"
    reference = read_reference(cfg.reference) if cfg.reference else None
    if Path(out).is_dir():
        raise UserError(f"out={out} is a folder; expected a file's name, {Path(out) / 'curves.png'} for example")
    draw(runs, out, reference)
    print(f"drawn: {out}")


def read(folder):
    """{kind: {step: line}} of a run's log.jsonl. A later line of a step replaces an earlier one; a torn last line is
    ignored."""
    path = Path(folder) / "log.jsonl"
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
            found.setdefault(entry["kind"], {})[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a line of a log: {line[:60]!r}") from None
    if not any(len(series(found, kind, "loss")[0]) for kind in ("train", "val")):
        raise UserError(f"{path}: it holds no finite training or validation loss; nothing to draw")
    return found


def read_reference(path):
    """{"name": str, "points": {step: loss}} of a JSON file, with steps as ints."""
    try:
        given = json.loads(Path(path).read_text())
        points = {int(step): float(loss) for step, loss in given["points"].items()}
        if points and all(map(math.isfinite, points.values())):
            return {"name": str(given["name"]), "points": points}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a JSON file for --reference") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f'{path}: expected {{"name": "…", "points": {{"50": 6.04, …}}}}')


def labels(runs):
    """Name of each run's folder, or the whole path where two folders have the same name."""
    names = [Path(folder).resolve().name for folder in runs]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(runs, names)]


def series(log, kind, key):
    """(steps, values) as float arrays, without missing, NaN or infinite values (a diverged run)."""
    points = sorted((step, line[key]) for step, line in log.get(kind, {}).items() if line.get(key) is not None)
    points = np.array(points, dtype=float).reshape(-1, 2)
    return points[np.isfinite(points[:, 1])].T


def smooth(values, width=None):
    """Mean over a window centred on each point (default: 1/40 of the run), shorter at the ends; it does not lag."""
    half = max(1, len(values) // 40) // 2 if width is None else width // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def draw(runs, out_path, reference=None):
    """Draws the runs (folders) into the PNG `out_path`; reference: {"name": str, "points": {step: loss}}."""
    import matplotlib  # takes a second, and --help does without

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    logs = {label: read(folder) for label, folder in zip(labels(runs), runs)}
    small = [("lr", "learning rate"), ("norm", "gradient norm"), ("tok_per_s", "thousand tokens/s")]
    if any(log.get("hellaswag") for log in logs.values()):
        small.insert(0, ("hellaswag", "HellaSwag acc_norm"))
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(10, 5.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # inches, so that outer tick labels are not cut
        grid = figure.add_gridspec(2, len(small), height_ratios=[2, 1])
        draw_loss(figure.add_subplot(grid[0, :]), logs, reference)
        for i, (key, title) in enumerate(small):
            draw_small(figure.add_subplot(grid[1, i]), logs, key, title)
        try:
            figure.savefig(out_path, dpi=110, facecolor="white")
        except (OSError, ValueError) as error:  # ValueError: an unknown kind of picture
            raise UserError(f"{out_path}: cannot write the picture ({error})") from None
        finally:
            plt.close(figure)


def draw_loss(axes, logs, reference):
    """Training and validation loss of every run, and the reference."""
    axes.set(title="loss, nats a token", xlabel="step")
    highest, lowest = [], []
    for color, (name, log) in zip(COLORS * len(logs), logs.items()):
        steps, loss = series(log, "train", "loss")
        if len(loss):
            draw_smoothed(axes, steps, loss, color, f"{name}, training")
        at, val = series(log, "val", "loss")
        if len(val):
            label = f"{name}, validation: {val[-1]:.3f}"
            axes.plot(at, val, "o", color=color, markersize=4.5, markeredgecolor="white", label=label)
        both = np.concatenate([loss, val])
        lowest.append(both.min())
        highest.append(np.quantile(both, 0.97) if len(both) > 20 else both.max())  # without the steep first steps
    if reference:
        points = sorted((int(step), loss) for step, loss in reference["points"].items())
        axes.plot(*zip(*points), "--s", color="#374151", markersize=3, linewidth=1, label=reference["name"])
        lowest.append(min(loss for _, loss in points))
        highest.append(max(loss for _, loss in points))
    margin = 0.05 * (max(highest) - min(lowest)) + 1e-3
    axes.set_ylim(min(lowest) - margin, max(highest) + margin)
    axes.legend(loc="upper right")


def draw_smoothed(axes, steps, values, color, label=None):
    """A thin line and its running mean."""
    axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
    axes.plot(steps, smooth(values), color=color, linewidth=1.4, label=label)


def draw_small(axes, logs, key, title):
    """One of the panels below the loss."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title(title)
    axes.set_xlabel("step")
    for color, log in zip(COLORS * len(logs), logs.values()):
        if key == "hellaswag":
            axes.plot(*series(log, "hellaswag", "acc_norm"), "o-", color=color, markersize=3, linewidth=1)
            continue
        steps, values = series(log, "train", key)
        if key == "norm":
            draw_smoothed(axes, steps, values, color)
        else:
            axes.plot(steps, values / 1e3 if key == "tok_per_s" else values, color=color, linewidth=1)
    if key == "hellaswag":
        axes.axhline(0.25, color="#9ca3af", linestyle=":", linewidth=1)
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate("chance", (0.98, 0.25), color="#6b7280", **place)
    if key == "norm":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if key in ("norm", "lr"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if key == "tok_per_s":
        axes.set_ylim(bottom=0)


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if not word.startswith("-")]
    sys.argv[1:] = [word for word in sys.argv[1:] if word.startswith("-")]
    run(lambda cfg: main(cfg, folders), Config)
