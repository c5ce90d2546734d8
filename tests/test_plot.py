"""plot.py: how a log is read, and that a picture is drawn."""

import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT

import plot
from configurator import UserError


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def training(steps, **changes):
    base = {"kind": "train", "lr": 1e-3, "norm": 1.0, "dt_ms": 10.0, "tok_per_s": 1e5, "mfu": None, "tokens": 10}
    return [{**base, "step": s, "loss": 10 / s**0.3, **changes} for s in steps]


def test_the_later_of_two_lines_counts_and_a_torn_one_is_left_out(tmp_path):
    run = write(tmp_path, training([1, 2, 3]) + training([2, 3, 4], loss=5.0), '{"kind": "train", "st')
    steps, loss = plot.series(plot.read(run), "train", "loss")
    assert steps.tolist() == [1, 2, 3, 4] and loss.tolist() == [10.0, 5.0, 5.0, 5.0]


def test_smoothing_is_a_centred_mean():
    assert plot.smooth([1.0, 2.0, 6.0, 0.0], 3) == pytest.approx([1.5, 3.0, 8 / 3, 3.0])
    assert plot.smooth([3.0] * 500) == pytest.approx([3.0] * 500)


@pytest.mark.parametrize("with_hellaswag", [True, False])
def test_draws_several_runs(tmp_path, with_hellaswag):
    val = [{"kind": "val", "step": s, "loss": 10 / s**0.3, "bpb": None} for s in (10, 20)]
    score = [{"kind": "hellaswag", "step": 20, "acc": 0.26, "acc_norm": 0.27}] * with_hellaswag
    runs = [write(tmp_path / name, training(range(1, 31)) + val + score) for name in "ab"]
    plot.draw(runs, tmp_path / "c.png", {"name": "other", "points": {"10": 5.0, "20": 4.0}})
    image = matplotlib.image.imread(tmp_path / "c.png")
    assert 900 <= image.shape[1] <= 1200
    for color in ("#2563eb", "#dc2626"):  # each run's own
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image[..., :3] - rgb).max(-1) < 0.02).sum() > 50


def test_missing_empty_and_foreign_logs(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        plot.read(tmp_path / "none")
    with pytest.raises(UserError, match="nothing to draw"):
        plot.read(write(tmp_path / "empty", []))
    with pytest.raises(UserError, match="log.jsonl:1: not a line"):
        plot.read(write(tmp_path / "foreign", ["text", *training([1])]))


def test_a_diverged_run_is_drawn_up_to_its_last_finite_loss(tmp_path):
    nan = float("nan")
    run = write(tmp_path, training(range(1, 30)) + training([30], loss=nan, norm=float("inf")))
    steps, loss = plot.series(plot.read(run), "train", "loss")
    assert steps[-1] == 29 and np.isfinite(plot.smooth(loss)).all()
    plot.draw([run], tmp_path / "c.png")
    with pytest.raises(UserError, match="no finite training or validation loss"):
        plot.read(write(tmp_path / "all", training([1, 2], loss=nan)))


def test_runs_of_the_same_name_stay_apart(tmp_path):
    assert plot.labels(["out/a/", "out/b"]) == ["a", "b"]
    assert plot.labels(["x/run", "y/run", "z"]) == ["x/run", "y/run", "z"]


@pytest.mark.parametrize("text", [None, "[1]", "{", '{"name": "a", "points": {}}', '{"name": "a", "points": {"x": 1}}'])
def test_a_bad_reference_is_one_line(tmp_path, text):
    write(tmp_path, training([1, 2]))
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match="r.json: (No such file|expected)"):
        plot.main(plot.Config(reference=str(tmp_path / "r.json")), [str(tmp_path)])


def test_a_picture_that_cannot_be_written(tmp_path):
    run = write(tmp_path, training([1, 2]))
    with pytest.raises(UserError, match="cannot write the picture"):
        plot.draw([run], tmp_path / "none" / "c.png")


def test_command_line(tmp_path, capsys):
    write(tmp_path / "run", training([1, 2, 3]))
    plot.main(plot.Config(), [str(tmp_path / "run")])
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000 and "curves.png" in capsys.readouterr().out


def test_as_a_script(tmp_path):
    write(tmp_path / "run", training([1, 2, 3]))
    for words, code, said in [
        ([f"{tmp_path}/run", f"--out={tmp_path}/c.png"], 0, f"drawn: {tmp_path}/c.png"),
        (["--out=c.png"], 2, "error: give the folder of a run"),
        ([f"{tmp_path}/run", "--refrence=r.json"], 2, "did you mean reference?"),
    ]:
        done = subprocess.run([sys.executable, "plot.py", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "c.png").exists()
