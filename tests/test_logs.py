"""measure/logs.py and plot.py: how a log is read, where its points lie, --against, pictures."""

import json
import math

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT
from test_fineweb import refused

import plot
from configurator import configure
from measure import logs
from system.errors import UserError


def write(folder, lines, tail=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def training(steps, **changes):
    """Lines of the logger: NaN is null there."""
    base = dict(kind="train", lr=1e-3, norm=1.0, dt_ms=500.0, tok_per_s=1e5, mfu=None)
    return [base | dict(step=s, loss=10 / s**0.3, tokens=100 * s) | changes for s in steps]


def validation(step, loss, **changes):
    return dict(kind="val", step=step, loss=loss, bpb=None if loss is None else loss / 2) | changes


def run_of(folder, loss=2.0, steps=10, held_out="a; 100 tokens", **settings):
    """A run of steps of 0.5 s and 100 tokens, whose first one takes 60 s."""
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    lines = [dict(kind="start", step=0, rows=[["device", "cpu"], ["settings", words]])]
    lines += training([1], dt_ms=60_000.0) + training(range(2, steps + 1))
    for step, value in ((0, 9.0), (steps // 2, 4.0), (steps, loss)):
        lines.append(validation(step, value, held_out=held_out))
    return str(write(folder, lines))


def test_the_later_of_two_lines_counts_and_a_torn_one_is_left_out(tmp_path):
    lines = training([1, 2, 3]) + training([2, 3, 4], loss=5.0)
    steps, loss = logs.Run(write(tmp_path, lines, '{"kind": "train", "st')).series("train", "loss")
    assert steps.tolist() == [1, 2, 3, 4] and loss.tolist() == [10.0, 5.0, 5.0, 5.0]


def test_steps_that_are_nan_stay_and_are_in_no_mean(tmp_path):
    """61 steps: a window of 3."""
    values = np.zeros(61)
    values[[30, 40]] = 3.0, np.nan
    found = logs.smooth(values)
    assert found[28:33] == pytest.approx([0, 1, 1, 1, 0])
    assert np.isnan(found).nonzero()[0].tolist() == [40] and found[39] == found[41] == 0
    lines = training([1, 2]) + training([3], loss=None) + training([4])
    run = logs.Run(write(tmp_path / "gap", lines))
    assert np.isnan(run.series("train", "loss")[1]).tolist() == [False, False, True, False]
    assert not run.diverged
    ended = logs.Run(write(tmp_path / "end", lines + training([5], loss=None)))
    assert ended.diverged and ended.end("loss").step == 4


@pytest.mark.parametrize("lines, message", [
    (None, "No such file"),
    ([{"text": "a document"}, *training([1])], "not the log of a run"),
    (training([1, 2]), "its log has no bpb"),
])  # fmt: skip
def test_what_is_no_log_is_named(tmp_path, lines, message):
    if lines is not None:
        write(tmp_path / "run", lines)
    with pytest.raises(UserError, match=message):
        logs.load([tmp_path / "run"])[0].end("bpb")


# -- --against


def test_welch_by_hand():
    """Three values of mean 3 and variance 1, and four of mean 7 and variance 4.

    So se^2 = 1/3 + 1, and there are (4/3)^2 / (1/18 + 1/3) degrees of freedom.
    """
    four = 7 + 2 * np.array([-1.5, -0.5, 0.5, 1.5]) / 5**0.5 * 3**0.5
    found = logs.welch(np.array([2.0, 3.0, 4.0]), four)
    assert found == pytest.approx((math.sqrt(4 / 3), (16 / 9) / (1 / 18 + 1 / 3)))
    # of pairs
    assert logs.welch(np.array([1.0, 2.0, 4.0])) == pytest.approx((math.sqrt(7 / 9), 2))
    assert all(map(math.isnan, logs.welch(np.array([1.0]), np.array([1.0, 2.0]))))
    assert logs.welch(np.ones(2), np.ones(2)) == (0.0, 1.0)


def printed(words, capsys):
    cfg = configure(plot.Config, words)
    runs = logs.load([*cfg.words, *cfg.against])
    logs.compare(runs[: len(cfg.words)], runs[len(cfg.words) :], cfg.y)
    out, err = capsys.readouterr()
    return out.splitlines(), err


def sides(tmp_path, losses, **changes):
    """[folders of one side, of the other]; losses: {name: {seed: the last loss}}."""
    run = lambda name, seed, loss: run_of(
        tmp_path / f"{name}_{seed}", loss, seed=seed, shuffle_seed=seed, **changes
    )
    return [[run(name, *one) for one in by_seed.items()] for name, by_seed in losses.items()]


def test_sides_their_means_and_their_difference(tmp_path, capsys):
    losses = {"fp8": {1: 2.0, 2: 2.2, 3: 2.1}, "base": {3: 2.7, 2: 2.6, 1: 2.5}}
    ours, base = sides(tmp_path, losses)
    lines, err = printed([*ours, "--against", *base], capsys)
    assert err == ""
    assert lines == [
        "runs  seeds  loss               seconds         tokens",
        "fp8       3  2.1000 ±0.1000           5          1,000",
        "base      3  2.6000 ±0.1000           5          1,000",
        "",
        "fp8 less base, with 95% intervals",
        "loss          Welch           -0.5000  -0.7267 to -0.2733  lower",
        "loss          paired by seed  -0.5000  -0.7484 to -0.2516  lower",
    ]
    lines, _ = printed([ours[0], "--against", *base, "--y=bpb"], capsys)
    assert lines[-1] == "bpb           Welch           -0.3000  not established: one seed on a side"


def test_pairs_need_the_same_seeds_and_rows(tmp_path, capsys):
    ours, base = sides(tmp_path, {"gate": {1: 2.1, 2: 2.2}, "base": {1: 2.1, 3: 2.3}})
    lines, err = printed([*ours, "--against", *base], capsys)
    assert err == "" and lines[5:] == [
        "loss          Welch           -0.0500  -0.7431 to +0.6431  not established"
    ]
    other = run_of(tmp_path / "rows_2", held_out="b; 100 tokens", seed=2, shuffle_seed=2)
    lines, err = printed([*ours, "--against", base[0], other], capsys)
    assert not any("paired" in line for line in lines) and "not all runs were validated on" in err


def test_other_numbers_of_tokens_are_said_and_made_equal(tmp_path, capsys):
    """Losses are equal at equal steps; the side that went on for longer ends lower."""
    (ours,) = sides(tmp_path, {"long": {1: 2.0, 2: 2.1}}, steps=20)
    (base,) = sides(tmp_path, {"base": {1: 2.5, 2: 2.6}})
    lines, _ = printed([*ours, "--against", *base], capsys)
    assert lines[-3] == "tokens differ, 1,000 to 2,000; training's loss before 1,000:"
    assert lines[-1].startswith("equal tokens  paired by seed  +0.0000")


@pytest.mark.parametrize("words, message", [
    (["a", "--against", "b", "again"], "b, again: two have the same seed"),
    (["a", "--against", "none"], "none does not end with a finite validation loss"),
    (["a", "--against", "nan"], "nan does not end with a finite validation loss"),
])  # fmt: skip
def test_what_is_no_comparison(tmp_path, words, message):
    for name, seed in (("a", 1), ("b", 2), ("again", 2)):
        run_of(tmp_path / name, out_dir=name, seed=seed)
    write(tmp_path / "none", training([1]))
    write(tmp_path / "nan", [*training([1]), validation(1, 2.0), *training([2], loss=None)])
    given = [word if word.startswith("--") else str(tmp_path / word) for word in words]
    refused(UserError, message, plot.main, configure(plot.Config, given))


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
    refused(UserError, "folder", plot.main, configure(plot.Config, ["--out=c.png"]))
