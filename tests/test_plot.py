"""plot.py: what stands where in its pictures, and that they are drawn."""

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, one_line, train_here
from test_logs import run_of, training, validation, write

import plot
from configurator import configure
from measure import logs
from system.errors import UserError


def drawn(folders, x="steps", y="loss", panels=True):
    return plot.draw(logs.load([str(folder) for folder in folders]), x, y, panels)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def labels(axes):
    return [text.get_text() for text in axes.texts]


def test_a_run_of_train_py_has_what_every_axis_needs(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "a", max_steps=3, eval_interval=1)
    for x in plot.AXES:
        found = titles(drawn([tmp_path / "a"], x))
        assert found[1:] == ["learning rate / its peak", "gradient norm", "tokens/s"]


def test_draws_the_small_logs_of_the_repository():
    """They are files, not folders, without the times of steps."""
    paths = sorted((ROOT / "results/modern").rglob("*.jsonl"))
    figure = drawn(paths, "tokens")
    told = [label.split("  ")[1] for axes in figure.axes for label in labels(axes)]
    assert sorted(told) == sorted(path.stem for path in paths) and len(told) > 1
    with pytest.raises(UserError, match="try --x=steps"):
        drawn([ROOT / "results/fp8/bf16.jsonl"], "seconds")


def test_a_step_that_is_nan_is_a_gap_of_every_line(tmp_path):
    lines = training(range(1, 41)) + [validation(step, 3.0) for step in (10, 20, 30, 40)]
    lines[19]["loss"] = None
    lines[41]["loss"] = None
    axes = drawn([write(tmp_path, lines)]).axes[0]
    for line in axes.lines:
        at, values = line.get_data()
        assert at[np.isnan(values)].tolist() == [20.0]


def test_a_run_that_ends_with_nan_says_so(tmp_path):
    lines = training(range(1, 21)) + [validation(10, 3.0)] + training([21], loss=None)
    assert labels(drawn([write(tmp_path / "a", lines)]).axes[0]) == ["NaN  a"]


def test_names_stand_right_of_the_panel_with_a_line_to_the_end_of_the_curve(tmp_path):
    """One without a validation says that its loss is that of training."""
    long = write(tmp_path / "long", [*training(range(1, 101)), validation(100, 2.5)])
    early = write(tmp_path / "early", training(range(1, 31), loss=4.0))
    whole, end, *_ = drawn([long, early]).axes
    assert labels(whole) == ["2.500  long", "4.000 in training  early"] and labels(end) == []
    assert [text.xy[0] for text in whole.texts] == [100, 30]
    assert end.get_xlim()[0] == pytest.approx(61, abs=3)


def test_a_run_that_diverges_leaves_the_panel(tmp_path):
    a, b = (run_of(tmp_path / name, loss, steps=20) for name, loss in (("a", 2.0), ("b", 2.1)))
    c = write(tmp_path / "c", training(range(1, 10)) + training(range(10, 21), loss=1e4))
    axes, end, *_ = drawn([a, b, c]).axes
    assert end.get_ylim()[1] < axes.get_ylim()[1] < 10
    assert [label[:5] for label in labels(axes)] == ["2.000", "2.100", "10000"]


def test_labels_stand_apart_in_their_order():
    assert plot.spread(np.array([0.5, 0.1, 0.52]), 0.1) == pytest.approx([0.5, 0.1, 0.6])
    assert plot.spread(np.full(3, 0.3), 0.2) == pytest.approx([0.3, 0.5, 0.7])


def test_steps_have_whole_ticks(tmp_path):
    axes = drawn([run_of(tmp_path, steps=10)]).axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_rates_are_shares_of_their_peaks(tmp_path):
    runs = [write(tmp_path / str(lr), training([1, 2, 3], lr=lr)) for lr in (6e-4, 0.06)]
    figure = drawn(runs)
    rate = figure.axes[titles(figure).index("learning rate / its peak")]
    assert [line.get_ydata()[-1] for line in rate.lines] == pytest.approx([1, 1])


def test_extras_and_evaluations_of_ones_own_have_a_panel_for_each_figure(tmp_path):
    lines = [
        line | {"extras": {"z": 1 / line["step"], "off": None}} for line in training([1, 2, 3])
    ]
    lines.append(validation(3, 2.0, extras={"z": 0.5}))
    for step in (0, 2, 4):
        own = {"accuracy": step / 9, "texts": ["a"], "seconds": 2.0}
        lines += [dict(kind="reverse", step=step, **own), dict(kind="skipped", step=step, in_all=1)]
    figure = drawn([write(tmp_path / "a", lines)])
    assert titles(figure)[1:3] == ["z", "reverse accuracy"] and len(titles(figure)) == 6
    (marks,) = figure.axes[2].lines
    assert marks.get_marker() == "o" and marks.get_xdata().tolist() == [0, 2, 4]
    assert marks.get_ydata() == pytest.approx([0, 2 / 9, 4 / 9])


def test_sides_have_a_colour_each(tmp_path):
    lines = [validation(step, 3.0) for step in (1, 2, 3)]
    folders = [write(tmp_path / name, lines) for name in "abc"]
    runs = logs.load(folders)
    plot.paint([runs[:1], runs[1:]], plot.LIGHT)
    looks = [(run.color, run.dash) for run in runs]
    blue, orange = plot.LIGHT[:2]
    assert looks == [(blue, "-"), (orange, "-"), (orange, plot.DASHES[1])]


def test_pictures_and_mistakes(tmp_path, monkeypatch, capsys):
    a, b = (run_of(tmp_path / name / "run", steps=30) for name in "ab")
    monkeypatch.chdir(ROOT)
    for words, file in [
        ([a, "--out", f"{tmp_path}/c.svg", "--x", "seconds"], "c.svg"),
        ([a, b, "--no_panels", "--dark", "--names=x,y", f"--out={tmp_path}/d.png"], "d.png"),
        ([a, b, "assets/build_nanogpt.jsonl"], "a/run/curves.png"),
    ]:
        plot.main(configure(plot.Config, words))
        assert capsys.readouterr().out == f"drawn: {tmp_path}/{file}\n"
        assert (tmp_path / file).exists()
    image = matplotlib.image.imread(f"{a}/curves.png")[..., :3]
    for color in plot.LIGHT[:3]:  # each run's own
        rgb = np.array(matplotlib.colors.to_rgb(color))
        assert (np.abs(image - rgb).max(-1) < 0.02).sum() > 50
    for words, said in [
        ([a, f"--out={tmp_path}/none/c.png"], "cannot write the picture"),
        (["--out=c.png"], "give the folder of a run"),
        (["x" * 300], "File name too long"),
        ([a, "--outt=c.png"], "did you mean out?"),
    ]:
        with pytest.raises(UserError) as error:
            plot.main(configure(plot.Config, words))
        assert said in str(error.value)
        one_line(error)
