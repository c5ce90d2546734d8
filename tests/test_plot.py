"""plot.py: how a log is read, where its points lie, and that pictures are drawn."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, one_line, train_here

import plot
from configurator import configure
from measure import logs, pictures
from system.errors import UserError


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def training(steps, **changes):
    base = dict(kind="train", lr=1e-3, norm=1.0, dt_ms=10.0, tok_per_s=1e5, mfu=None, tokens=10)
    return [base | dict(step=s, loss=10 / s**0.3) | changes for s in steps]


def test_the_later_of_two_lines_counts_and_a_torn_one_is_left_out(tmp_path):
    run = write(
        tmp_path, training([1, 2, 3]) + training([2, 3, 4], loss=5.0), '{"kind": "train", "st'
    )
    steps, loss = logs.Run(run).series("train", "loss")
    assert steps.tolist() == [1, 2, 3, 4] and loss.tolist() == [10.0, 5.0, 5.0, 5.0]


def test_a_run_resumed_from_an_older_checkpoint_has_no_end_of_before(tmp_path):
    starts = [
        dict(kind="start", step=step, rows=[["settings", f"lr={step}"]]) for step in (0, 8, 4)
    ]
    first = [starts[0], *training(range(1, 11), loss=9.0), {"kind": "done", "step": 10}]
    second = [starts[1], *training([9, 10]), starts[2], *training([5, 6], loss=2.0)]
    run = logs.Run(write(tmp_path, first + second))
    steps, loss = run.series("train", "loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6] and loss.tolist() == [9.0] * 4 + [2.0] * 2
    assert run.last("done") == 0 and run.settings == {"lr": "4"}


def test_smoothing_is_a_centred_mean():
    values = np.zeros(61)  # 61 / 20: a window of 3
    values[30] = 3.0
    assert logs.smooth(values)[28:33].tolist() == pytest.approx([0, 1, 1, 1, 0])
    assert logs.smooth([3.0] * 500) == pytest.approx([3.0] * 500)


def test_draws_the_small_logs_of_the_repository():
    """They are files, not folders, without the times of steps."""
    paths = [str(path) for path in sorted((ROOT / "results/modern").glob("*.jsonl"))]
    assert len(paths) > 1
    runs = logs.load(paths)
    assert [run.name for run in runs] == [Path(log).stem for log in paths]
    axes = plot.draw(runs, "tokens", "loss").axes
    assert {run.name for run in runs} <= {line.get_label() for line in axes[0].lines}
    assert [axes[1].get_title(loc="left"), len(axes[1].texts)] == ["the end", len(runs)]
    with pytest.raises(UserError, match="try --x=steps"):
        plot.draw(runs, "seconds", "loss")
    timed = next(run for run in runs if ("start", "step_ms") in run.figures)
    step_ms = timed.series("start", "step_ms")[1][-1]
    assert timed.place(np.array([0, 100]), "seconds") == pytest.approx([0, step_ms / 10])


VALIDATED = [{"kind": "val", "step": 2, "loss": 2.0, "bpb": 1.0}]


@pytest.mark.fault(81)
@pytest.mark.parametrize("lines, message", [
    (None, "No such file"),
    ([], "nothing to draw"),
    (training([1, 2], loss=float("nan")), "no finite training or validation"),
    (["text", *training([1])], r"log.jsonl:1: not a line of a log: it is 'text'"),
    ([{"kind": ["train"], "step": 1}, *training([1])], "log.jsonl:1: .*kind is"),
    ([*training([1]), {"kind": "train", "step": 10**400}, {}], "log.jsonl:2: .*step is 1000"),
    (training([1, 2]) + training([3, 4], loss=10**400), "run: not a log: in train 3 loss is 1000"),
    (training([1, 2], norm=[1.0]) + VALIDATED, "run: not a log: in train 1 norm is"),
    ([{"kind": "start", "step": 0, "step_ms": "1"}, *training([1]), *VALIDATED],
     "in start 0 step_ms is '1'"),
    (training([1, 2], dt_ms=None) + VALIDATED, "run: its log does not hold what x=seconds needs"),
    (training([1, 2]), "run: no bits per byte in its log"),
    (training([1, 2]) + [VALIDATED[0] | {"loss": 0.0}], "run: no bits per byte in its log"),
    (training([1, 2], dt_ms=1e300) + VALIDATED, r"in train 1 dt_ms is 1e\+300"),
])  # fmt: skip
def test_logs_that_cannot_be_drawn(tmp_path, lines, message):
    if lines is not None:
        write(tmp_path / "run", lines)
    with pytest.raises(UserError, match=message) as error:
        plot.draw(logs.load([tmp_path / "run"]), "seconds", "bpb")
    one_line(error)


def run_of(folder, lift=0.0, **settings):
    """A run as the logger records it: 20 steps of 100 tokens in 0.5 s, validated at 0, 10, 20."""
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    lines = [dict(kind="start", step=0, rows=[["device", "cpu"], ["settings", words]])]
    for step in range(21):
        if step:
            lines += training([step], loss=9 / step**0.3, dt_ms=500.0, tokens=100 * step)
        if step % 10 == 0:
            loss = 10 / (step + 1) ** 0.3 + lift
            lines.append(
                dict(kind="val", step=step, loss=loss, bpb=0.4 * loss, stderr=0.04, bpb_stderr=0.02)
            )
    return write(folder, lines)


def test_a_run_of_train_py_has_what_every_axis_needs(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "a", max_steps=3, eval_interval=1)
    for x in plot.AXES:
        figure = plot.draw(logs.load([tmp_path / "a"]), x, "loss")
        titles = {axes.get_title(loc="left") for axes in figure.axes}
        assert {"learning rate", "gradient norm", "tokens/s"} < titles


@pytest.mark.parametrize("x, end", [("steps", 20), ("tokens", 2000), ("seconds", 10)])
@pytest.mark.parametrize("y, top", [("loss", 10), ("bpb", 4)])
def test_validation_begins_after_the_start_and_the_axis_holds_its_end(tmp_path, x, end, y, top):
    axes = plot.draw(logs.load([run_of(tmp_path / "a")]), x, y).axes[0]
    found = {line.get_label(): line.get_data() for line in axes.lines}
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    at, loss = found["a"]
    assert at == pytest.approx([end / 2, end])  # that at step 0 is far above
    assert loss == pytest.approx([top / 11**0.3, top / 21**0.3])
    assert left < 0 and end < right and low < loss[-1] and loss[0] < high < 0.9 * top
    steps, training = found["_a, training"]
    assert steps == pytest.approx(np.arange(1, 21) * end / 20)
    assert training[0] == pytest.approx(0.9 * top)
    error = 0.04 if y == "loss" else 0.02
    assert [text.get_text() for text in axes.texts] == [f"{loss[-1]:.3f} ±{error:.3f}  a"]


def test_names_are_those_given_or_what_the_settings_differ_in_or_the_folders(tmp_path):
    names = lambda folders, given=None: [run.name for run in logs.load(folders, given)]
    a = run_of(tmp_path / "a", out_dir="a", lr=0.1, mlp="relu2")
    b = run_of(tmp_path / "b", out_dir="b", lr=0.2)
    c = run_of(tmp_path / "c", lr=0.1)
    d = run_of(tmp_path / "d", lr=0.1, max_steps=9, n_layer=2, n_head=3)
    assert names([a, b]) == ["lr=0.1, mlp=relu2", "lr=0.2, mlp=gelu"]  # gelu is the default
    assert names([b, c]) == ["lr=0.2", "lr=0.1"]
    assert names([c, d]) == ["c", "d"]  # too many differ
    assert names([a, a]) == [str(a), str(a)]
    assert names([a, b], "as it was, with a gate") == ["as it was", "with a gate"]
    with pytest.raises(UserError, match="names=x has 1 names, but there are 2 runs"):
        names([a, b], "x")


def test_the_end_of_several_runs_is_larger_and_a_run_that_diverges_leaves_it(tmp_path):
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", lift=0.05)
    c = write(tmp_path / "c", training(range(1, 10)) + training(range(10, 21), loss=1e4))
    axes, end, *_ = plot.draw(logs.load([a, b, c]), "steps", "loss").axes
    assert end.get_xlim()[0] == 12 and end.get_ylim()[1] < axes.get_ylim()[1] < 10
    assert [text.get_text()[:5] for text in end.texts] == ["4.012", "4.062", "10000"]
    widths = {line.get_linewidth() for line in axes.lines if not line.get_label().startswith("_")}
    assert len(widths) == 1
    with pictures.theme(dark=True):
        alone = plot.draw(logs.load([a, b]), "steps", "loss", panels=False)
    assert len(alone.axes) == 1 and alone.get_facecolor() == matplotlib.colors.to_rgba("#0d1117")


def test_a_label_far_from_the_end_of_its_run_has_no_line_to_it(tmp_path):
    long = write(tmp_path / "long", training(range(1, 101)))
    late = write(tmp_path / "late", training(range(1, 61), loss=3.0))
    early = write(tmp_path / "early", training(range(1, 31), loss=4.0))
    figure = plot.draw(logs.load([long, late, early]), "steps", "loss", panels=False)
    led = [text.arrow_patch is not None for text in figure.axes[0].texts]
    assert led == [True, True, False]


def test_labels_stand_apart_near_their_places():
    assert plot.spread(np.array([0.5, 0.1, 0.52]), 0.1) == pytest.approx([0.46, 0.1, 0.56])
    found = plot.spread(np.full(4, 0.3), 0.2)
    assert np.sort(found) == pytest.approx([0.0, 0.2, 0.4, 0.6])


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_rates_that_differ_are_drawn_as_shares_of_their_peaks(tmp_path):
    runs = [
        write(tmp_path / name, training([1, 2, 3], lr=lr))
        for name, lr in (("adamw", 6e-4), ("muon", 0.06))
    ]
    rate = plot.draw(logs.load(list(map(str, runs))), "steps", "loss").axes[2]
    assert rate.get_title(loc="left") == "learning rate / its peak"
    assert [line.get_ydata()[-1] for line in rate.lines] == pytest.approx([1, 1])
    assert "learning rate" in titles(plot.draw(logs.load(runs[:1]), "steps", "loss"))


def test_extras_have_a_panel_each_six_at_most(tmp_path, capsys):
    lines = [
        row | {"extras": {"balance": 1 / row["step"], "z": None}} for row in training([1, 2, 3])
    ]
    lines.append({"kind": "val", "step": 3, "loss": 2.0, "extras": {"balance": 0.5, "depth": 3}})
    figure = plot.draw(logs.load([write(tmp_path / "a", lines)]), "steps", "loss")
    balance = figure.axes[titles(figure).index("balance")]
    mean, _, marks = [line.get_data() for line in balance.lines]  # the second is the noise
    assert mean[0].tolist() == [1, 2, 3] and mean[1] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [values.tolist() for values in marks] == [[3], [0.5]]
    assert "depth" in titles(figure) and "z" not in titles(figure) and not capsys.readouterr().err
    many = [row | {"extras": {f"x{i}": i for i in range(8)}} for row in training([1, 2])]
    figure = plot.draw(logs.load([write(tmp_path / "b", many)]), "steps", "loss")
    assert sum(title.startswith("x") for title in titles(figure)) == 6
    assert capsys.readouterr().err == "warning: of extras 6 are drawn; left out: x6, x7\n"


def test_an_evaluation_of_ones_own_has_a_panel_for_each_figure(tmp_path):
    own = [
        {"kind": "reverse", "step": s, "accuracy": s / 9, "texts": ["a"], "seconds": 2.0}
        for s in (0, 2, 4)
    ]
    others = [
        {"kind": "skipped", "step": 2, "in_a_row": 1},
        {"kind": "reverse", "step": 5, "accuracy": None},
    ]
    figure = plot.draw(
        logs.load([write(tmp_path / "a", training(range(1, 5)) + own + others)]), "steps", "loss"
    )
    assert [title for title in titles(figure) if "reverse" in title or "skip" in title] == [
        "reverse accuracy"
    ]
    (marks,) = figure.axes[titles(figure).index("reverse accuracy")].lines
    assert marks.get_marker() == "o" and marks.get_xdata().tolist() == [0, 2, 4]
    assert marks.get_ydata() == pytest.approx([0, 2 / 9, 4 / 9])


def test_pictures_and_mistakes(tmp_path, monkeypatch, capsys):
    """Two runs of one name, one of them diverged, beside another program's losses; and mistakes."""
    score = [{"kind": "hellaswag", "step": s, "acc": 0.26, "acc_norm": 0.27} for s in (10, 20, 30)]
    write(tmp_path / "a/run", training(range(1, 31)) + score)
    write(
        tmp_path / "b/run",
        training(range(1, 30)) + training([30], loss=float("nan"), norm=float("inf")),
    )
    a, b, other = f"{tmp_path}/a/run", f"{tmp_path}/b/run", "assets/build_nanogpt.jsonl"
    odd = str(write(tmp_path / "\udce9 $x", training([1, 2])))
    monkeypatch.chdir(ROOT)
    assert [run.name for run in logs.load([a, b, other])] == [a, b, "build_nanogpt"]
    for words, drawn in [
        ([a, "--out", f"{tmp_path}/c.svg", "--x", "seconds"], "c.svg"),
        ([odd, f"--out={tmp_path}/odd.png"], "odd.png"),
        ([a, b, "--no_panels", "--dark", "--names=x,y", f"--out={tmp_path}/d.png"], "d.png"),
        ([a, b, other], "a/run/curves.png"),
    ]:
        plot.main(configure(plot.Config, words))
        assert (
            capsys.readouterr().out == f"drawn: {tmp_path}/{drawn}\n"
            and (tmp_path / drawn).exists()
        )
    image = matplotlib.image.imread(f"{a}/curves.png")[..., :3]
    for color in pictures.LIGHT["axes.prop_cycle"].by_key()["color"][:3]:  # each run's own
        rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image - rgb).max(-1) < 0.02).sum() > 50
    for words, said in [
        ([a, f"--out={tmp_path}/none/c.png"], "cannot write the picture"),
        (["--out=c.png"], "give the folder of a run"),
        (["x" * 300], "File name too long; expected a run's log"),
        ([a, "--outt=c.png"], "did you mean out?"),
    ]:
        with pytest.raises(UserError, match=re.escape(said)) as error:
            plot.main(configure(plot.Config, words))
        one_line(error)


def test_as_a_script(tmp_path):
    words = [sys.executable, "plot.py", str(run_of(tmp_path / "a")), "--names=a,b"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: names=a,b has 2 names, but there are 1 runs\n",
    )


def test_every_run_is_in_the_legend_whatever_its_name(tmp_path, capsys):
    """matplotlib omits names that begin with _; its font lacks other scripts, told once."""
    runs = [
        run_of(tmp_path / "_baseline"),
        write(tmp_path / "_\u57fa\u7ebf \u6771\u4eac", training([1, 2, 3])),
    ]
    figure = plot.draw(logs.load(list(map(str, runs))), "steps", "loss")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert [text.split("  ")[1] for text in texts] == ["_baseline", "_\u57fa\u7ebf \u6771\u4eac"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cfg = plot.Config(out=str(tmp_path / "c.png"))
        cfg.words = list(map(str, runs))
        plot.main(cfg)
    out, err = capsys.readouterr()
    assert (
        out == f"drawn: {tmp_path}/c.png\n" and err.count("warning: the font lacks characters") == 1
    )
