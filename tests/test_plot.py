"""plot.py: how a log is read, where its points lie, and that pictures are drawn."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, one_line, train_here

import plot
from configurator import UserError


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def training(steps, **changes):
    base = dict(kind="train", lr=1e-3, norm=1.0, dt_ms=10.0, tok_per_s=1e5, mfu=None, tokens=10)
    return [base | dict(step=s, loss=10 / s**0.3) | changes for s in steps]


def test_the_later_of_two_lines_counts_and_a_torn_one_is_left_out(tmp_path):
    run = write(tmp_path, training([1, 2, 3]) + training([2, 3, 4], loss=5.0), '{"kind": "train", "st')
    steps, loss = plot.series(plot.read(run), "train", "loss")
    assert steps.tolist() == [1, 2, 3, 4] and loss.tolist() == [10.0, 5.0, 5.0, 5.0]


def test_smoothing_is_a_centred_mean():
    values = np.zeros(121)  # 121 / 40: a window of 3
    values[60] = 3.0
    assert plot.smooth(values)[58:63].tolist() == pytest.approx([0, 1, 1, 1, 0])
    assert plot.smooth([3.0] * 500) == pytest.approx([3.0] * 500)


def test_draws_the_small_logs_of_the_repository():
    """They are files, not folders, without the times of steps."""
    logs = [str(path) for path in sorted((ROOT / "results/modern").glob("*.jsonl"))]
    assert len(logs) > 1
    runs = plot.load(logs)
    assert [run.name for run in runs] == [Path(log).stem for log in logs]
    labels = [line.get_label() for line in plot.draw(runs, "tokens", "loss").axes[0].lines]
    assert {run.name for run in runs} <= {label.partition(":")[0] for label in labels}
    with pytest.raises(UserError, match="try --x=steps"):
        plot.draw(runs, "seconds", "loss")
    timed = next(run for run in runs if "step_ms" in run.start)
    assert timed.place(np.array([0, 100]), "seconds") == pytest.approx([0, timed.start["step_ms"] / 10])


VALIDATED = [{"kind": "val", "step": 2, "loss": 2.0, "bpb": 1.0}]


@pytest.mark.fault(81)
@pytest.mark.parametrize("lines, message", [
    (None, "No such file"),
    ([], "nothing to draw"),
    (training([1, 2], loss=float("nan")), "no finite training or validation"),
    (["text", *training([1])], r"log.jsonl:1: not a line of a log: it is 'text'"),
    ([{"kind": ["train"], "step": 1}, *training([1])], "log.jsonl:1: .*kind is"),
    ([*training([1]), {"kind": "train", "step": 10**400}, {}], "log.jsonl:2: .*step is 1000"),
    (training([1, 2]) + training([3, 4], loss=10**400), "log.jsonl:3: .*loss is 1000"),
    (training([1, 2], norm=[1.0]) + training([3]), "log.jsonl:1: .*norm is"),
    ([{"kind": "start", "step": 0, "step_ms": "1"}, *training([1])], "log.jsonl:1: .*step_ms is '1'"),
    (training([1, 2], dt_ms=None) + VALIDATED, "run: its log does not hold what x=seconds needs"),
    (training([1, 2]), "run: no bits per byte in its log"),
    (training([1, 2]) + [VALIDATED[0] | {"loss": 0.0}], "run: no bits per byte in its log"),
    (training([1, 2], tok_per_s=1e200) + training([3]), r"log.jsonl:1: .*tok_per_s is 1e\+200"),
])  # fmt: skip
def test_logs_that_cannot_be_drawn(tmp_path, lines, message):
    if lines is not None:
        write(tmp_path / "run", lines)
    with pytest.raises(UserError, match=message) as error:
        plot.draw(plot.load([tmp_path / "run"]), "seconds", "bpb")
    one_line(error)


def run_of(folder):
    """A run as the logger records it: 20 steps of 100 tokens in 0.5 s each, validated at 0, 10 and 20."""
    lines = [dict(kind="start", step=0)]
    for step in range(21):
        if step:
            lines += training([step], loss=9 / step**0.3, dt_ms=500.0, tokens=100 * step)
        if step % 10 == 0:
            lines.append(dict(kind="val", step=step, loss=10 / (step + 1) ** 0.3, bpb=4 / (step + 1) ** 0.3))
    return write(folder, lines)


def test_a_run_of_train_py_has_what_every_axis_needs(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "a", max_steps=3, eval_interval=1)
    for x in plot.AXES:
        figure = plot.draw(plot.load([tmp_path / "a"]), x, "loss")
        titles = {axes.get_title(loc="left") for axes in figure.axes}
        assert {"learning rate", "gradient norm", "tokens/s"} < titles


@pytest.mark.parametrize("x, end", [("steps", 20), ("tokens", 2000), ("seconds", 10)])
@pytest.mark.parametrize("y, top", [("loss", 10), ("bpb", 4)])
def test_validation_starts_at_step_0_within_the_panel_on_every_axis(tmp_path, x, end, y, top):
    axes = plot.draw(plot.load([run_of(tmp_path / "a")]), x, y).axes[0]
    found = {line.get_label(): line.get_data() for line in axes.lines}
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    at, loss = found[f"a: {top / 21**0.3:.3f}"]
    assert at == pytest.approx([0, end / 2, end])
    assert loss == pytest.approx([top, top / 11**0.3, top / 21**0.3])
    assert left < 0 and end < right and low < loss[-1] and top < high
    steps, training = found["_a, training"]
    assert steps == pytest.approx(np.arange(1, 21) * end / 20)
    assert training[0] == pytest.approx(0.9 * top)


def test_as_a_script(tmp_path):
    """Two runs of the same name, one of which diverged, beside another program's losses; and mistakes."""
    score = [{"kind": "hellaswag", "step": s, "acc": 0.26, "acc_norm": 0.27} for s in (10, 20, 30)]
    write(tmp_path / "a/run", training(range(1, 31)) + score)
    write(tmp_path / "b/run", training(range(1, 30)) + training([30], loss=float("nan"), norm=float("inf")))
    a, b, other = f"{tmp_path}/a/run", f"{tmp_path}/b/run", "assets/build_nanogpt.jsonl"
    odd = str(write(tmp_path / "\udce9 $x", training([1, 2])))
    assert [run.name for run in plot.load([a, b, ROOT / other])] == [a, b, "build_nanogpt"]
    for words, code, said in [
        ([a, b, other], 0, f"drawn: {a}/curves.png"),
        ([a, "--out", f"{tmp_path}/c.svg", "--x", "seconds"], 0, f"drawn: {tmp_path}/c.svg"),
        ([odd, f"--out={tmp_path}/odd.png"], 0, "drawn: "),
        ([a, f"--out={tmp_path}/none/c.png"], 2, "cannot write the picture"),
        (["--out=c.png"], 2, "error: give the folder of a run"),
        (["x" * 300], 2, "File name too long; expected a run's log"),
        ([a, "--outt=c.png"], 2, "did you mean out?"),
    ]:
        done = subprocess.run([sys.executable, "plot.py", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    image = matplotlib.image.imread(f"{a}/curves.png")[..., :3]
    for color in plot.COLORS[:3]:  # each run's own
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image - rgb).max(-1) < 0.02).sum() > 50


def test_every_run_is_in_the_legend_whatever_its_name(tmp_path, capsys):
    """matplotlib leaves out names that begin with _; its font lacks other scripts, which is told once."""
    runs = [
        run_of(tmp_path / "_baseline"),
        write(tmp_path / "_\u57fa\u7ebf \u6771\u4eac", training([1, 2, 3])),
    ]
    figure = plot.draw(plot.load(runs), "steps", "loss")
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == [f"_baseline: {10 / 21**0.3:.3f}", "_\u57fa\u7ebf \u6771\u4eac"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = plot.Config(out=str(tmp_path / "c.png"))
        cfg.words = list(map(str, runs))
        plot.main(cfg)
    out, err = capsys.readouterr()
    assert out == f"drawn: {tmp_path}/c.png\n" and err.count("warning: the font lacks characters") == 1
