"""plot.py: what stands where in its pictures, and that they are drawn."""

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, one_line
from test_logs import run_of, training, validation, write

import plot
from configurator import configure
from measure import logs
from system.errors import UserError


def drawn(folders, x="steps", y="loss", panels=True):
    return plot.draw(logs.load([str(folder) for folder in folders]), x, y, panels)


def test_a_step_that_is_nan_is_a_gap_of_every_line(tmp_path):
    lines = training(range(1, 41)) + [validation(step, 3.0) for step in (10, 20, 30, 40)]
    lines[19]["loss"] = None
    lines[41]["loss"] = None
    axes = drawn([write(tmp_path, lines)]).axes[0]
    for line in axes.lines:
        at, values = line.get_data()
        assert at[np.isnan(values)].tolist() == [20.0]


def test_pictures_and_mistakes(tmp_path, monkeypatch, capsys):
    a, b = (run_of(tmp_path / name / "run", steps=30) for name in "ab")
    monkeypatch.chdir(ROOT)
    for words, file in [
        ([a, "--out", f"{tmp_path}/c.svg", "--x", "seconds"], "c.svg"),
        ([a, b, "--no_panels", "--dark", "--names=x,y", f"--out={tmp_path}/d.png"], "d.png"),
        ([a, b, "assets/build_nanogpt.jsonl"], "a/run/curves.png"),
    ]:
        plot.main(configure(plot.Config, words))
        assert (tmp_path / file).exists()
    image = matplotlib.image.imread(f"{a}/curves.png")[..., :3]
    for color in plot.LIGHT[:3]:  # each run's own
        rgb = np.array(matplotlib.colors.to_rgb(color))
        assert (np.abs(image - rgb).max(-1) < 0.02).sum() > 50
    with pytest.raises(UserError, match="folder") as error:
        plot.main(configure(plot.Config, ["--out=c.png"]))
    one_line(error)


def test_the_end_is_larger_where_all_runs_reach_it(tmp_path):
    a, b, short = (run_of(tmp_path / name, steps=n) for name, n in (("a", 30), ("b", 28), ("s", 9)))
    titles = [axes.get_title(loc="left") for axes in drawn([a, b]).axes]
    assert "the end" in titles
    titles = [axes.get_title(loc="left") for axes in drawn([a, b, short]).axes]
    assert "the end" not in titles
