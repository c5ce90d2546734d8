"""plot.py: what stands where in its pictures, and that they are drawn."""

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, one_line
from test_logs import run_of

import plot
from configurator import configure
from system.errors import UserError


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
