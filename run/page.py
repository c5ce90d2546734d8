"""The page of plot.py --html: one file about several runs that needs no network. Imports no torch."""

import json
import statistics
from dataclasses import asdict
from html import escape
from pathlib import Path

from run.history import series
from settings import Config

LAST, MEDIAN, MOST = (lambda values: values[-1]), statistics.median, max
SUMMARY = {  # row of the first table: (kind of line, key, what of its values, how it is written)
    "steps": ("train", "step", LAST, "{:,.0f}"),
    "tokens": ("train", "tokens", LAST, "{:,.0f}"),
    "minutes of training steps": ("train", "dt_ms", lambda values: sum(values) / 6e4, "{:,.1f}"),
    "validation loss, nats a token": ("val", "loss", LAST, "{:.4f}"),
    "bits per byte": ("val", "bpb", LAST, "{:.4f}"),
    "HellaSwag acc_norm": ("hellaswag", "acc_norm", LAST, "{:.4f}"),
    "tokens a second, median": ("train", "tok_per_s", MEDIAN, "{:,.0f}"),
    "MFU, median": ("train", "mfu", MEDIAN, "{:.1%}"),
    "peak memory of a GPU, GiB": ("train", "gib", MOST, "{:.1f}"),
}


def build(runs, curves):
    """The page's text. runs: [history.Run]; curves: {x's title: (SVG, its readings)}."""
    inputs = "".join(
        f'<label><input type="radio" name="x" value="{i}"> {x}</label> ' for i, x in enumerate(curves)
    )
    parts = {
        "title": escape(", ".join(run.name for run in runs)),
        "runs": table(runs, [summary(run.log) for run in runs]),
        "inputs": inputs if len(curves) > 1 else "",
        "curves": "".join(f'<div class="curves">{svg}</div>' for svg, _ in curves.values()),
        "readings": json.dumps([readings for _, readings in curves.values()]).replace("<", "\\u003c"),
        "compared": "between the runs" if len(runs) > 1 else "from the defaults",
        "settings": table(runs, different(runs)),
        "start": table(runs, [dict(run.start.get("rows", [])) for run in runs]),
        "samples": samples(runs),
    }
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def readings(figure):
    """What the page shows under the mouse, of each panel: its box as fractions, the limits of x, and its curves."""
    panels = []
    for axes in figure.axes:
        (x0, y0), (x1, y1) = figure.transFigure.inverted().transform(axes.get_window_extent())
        lines = [line for line in axes.lines if not line.get_label().startswith("_child")]
        curves = [
            {"name": line.get_label().lstrip("_"), "color": line.get_color(), "x": short(x), "y": short(y)}
            for line, (x, y) in ((line, line.get_data()) for line in lines)
        ]
        panels.append(
            {
                "box": [x0, 1 - y1, x1, 1 - y0],
                "x": axes.get_xlim(),
                "xlabel": axes.get_xlabel(),
                "curves": curves,
            }
        )
    return panels


def short(values):
    """At most some 500 of the values, in 5 digits."""
    return [float(f"{value:.5g}") for value in values[:: max(1, len(values) // 500)]]


def table(runs, columns):
    """Rows (name -> text) of each run side by side; a row that no run has is left out."""
    names = dict.fromkeys(name for column in columns for name in column)
    if not names:
        return "<p>none</p>"
    head = "".join(f'<th style="color:{run.color}">{escape(run.name)}</th>' for run in runs)
    cells = {
        name: "".join(f"<td>{escape(str(column.get(name, '')))}</td>" for column in columns) for name in names
    }
    rows = "".join(f"<tr><th>{escape(name)}</th>{texts}</tr>" for name, texts in cells.items())
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def summary(log):
    found = {name: series(log, kind, key)[1] for name, (kind, key, *_) in SUMMARY.items()}
    return {
        name: SUMMARY[name][3].format(SUMMARY[name][2](values))
        for name, values in found.items()
        if len(values)
    }


def different(runs):
    """The settings in which the runs differ from one another, or one run from the defaults."""
    configs = [run.config for run in runs]
    against = configs if len(runs) > 1 else [*configs, asdict(Config())]
    names = [name for name in configs[0] if len({str(config.get(name)) for config in against}) > 1]
    return [{name: config.get(name, "") for name in names} for config in configs]


def samples(runs):
    """A table with a row for each step that has samples, the last first."""
    texts = [{step: line["texts"] for step, line in run.log.get("sample", {}).items()} for run in runs]
    steps = sorted({step for found in texts for step in found}, reverse=True)
    joined = [{step: "\n\n".join(map(str.rstrip, words)) for step, words in found.items()} for found in texts]
    columns = [{f"step {step:,}": found.get(step, "") for step in steps} for found in joined]
    return f'<div class="samples">{table(runs, columns)}</div>' if steps else "<p>none</p>"
