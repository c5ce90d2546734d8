"""measure/seeds.py and plot.py --against: quantiles, intervals, groups of runs, refusals."""

import math

import numpy as np
import pytest
from conftest import ROOT, one_line, train_here
from test_plot import write

import plot
from configurator import configure
from measure import logs, norms, pictures, seeds
from system.errors import UserError


@pytest.mark.parametrize("freedom, quantile", [
    (1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1e5, 1.9600),
])  # fmt: skip
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert seeds.t_quantile(freedom) == pytest.approx(quantile, abs=6e-5)


def test_a_quantile_between_whole_degrees_encloses_95_percent_of_the_density():
    t = np.linspace(-1, 1, 400_001) * seeds.t_quantile(2.6)
    scale = math.gamma(1.8) / math.gamma(1.3) / math.sqrt(2.6 * math.pi)
    assert np.trapezoid(scale * (1 + t * t / 2.6) ** -1.8, t) == pytest.approx(0.95, abs=1e-6)


def test_welch_by_hand():
    """Three values of mean 3 and variance 1, and four of mean 7 and variance 4.

    So se^2 = 1/3 + 1, and there are (4/3)^2 / (1/18 + 1/3) degrees of freedom.
    """
    error, freedom = seeds.welch(
        np.array([2.0, 3.0, 4.0]), 7 + 2 * np.array([-1.5, -0.5, 0.5, 1.5]) / 5**0.5 * 3**0.5
    )
    assert (error, freedom) == pytest.approx((math.sqrt(4 / 3), (16 / 9) / (1 / 18 + 1 / 3)))
    # of pairs
    assert seeds.welch(np.array([1.0, 2.0, 4.0])) == pytest.approx((math.sqrt(7 / 9), 2))
    assert all(map(math.isnan, seeds.welch(np.array([1.0]), np.array([1.0, 2.0]))))
    assert seeds.welch(np.ones(2), np.ones(2)) == (0.0, 1.0)


@pytest.mark.parametrize("difference, error, verdict", [
    (-1.0, 0.2, "-1.0000  -1.8605 to -0.1395  lower"),
    (1.0, 0.2, "+1.0000  +0.1395 to +1.8605  higher"),
    (-1.0, 0.5, "-1.0000  -3.1513 to +1.1513  not established"),
    (-1.0, math.nan, "-1.0000  not established: one seed on a side"),
])  # fmt: skip
def test_a_verdict_needs_an_interval_on_one_side_of_zero(difference, error, verdict):
    assert seeds.interval_and_verdict(difference, error, 2) == verdict


def test_in_ninety_five_of_a_hundred_experiments_the_interval_holds_the_difference():
    draw, inside = np.random.default_rng(1), 0
    for _ in range(400):
        a, b = draw.normal(0, 1, 3), draw.normal(2, 3, 4)
        error, freedom = seeds.welch(a, b)
        inside += abs(a.mean() - b.mean() + 2) < seeds.t_quantile(freedom) * error
    assert 0.92 < inside / 400 < 0.98


def run_of(folder, loss, bpb=True, held_out="a; 100 tokens", done=True, **settings):
    """The log of a run of 10 steps of 0.5 s and 100 tokens, whose first step takes 60 s."""
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    lines = [dict(kind="start", step=0, rows=[["settings", words]])]
    for step in range(1, 11):
        dt_ms = 60_000.0 if step == 1 else 500.0
        lines.append(dict(kind="train", step=step, loss=9.0, dt_ms=dt_ms, tokens=100 * step))
    for step, value in ((0, 9.0), (5, 4.0), (10, loss)):
        own = dict(bpb=value / 2) if bpb else {}
        lines.append(dict(kind="val", step=step, loss=value, held_out=held_out, **own))
    return str(write(folder, lines + [dict(kind="done", step=10)] * done))


def printed(words, capsys, tmp_path):
    plot.main(configure(plot.Config, [*words, "--out", str(tmp_path / "c.png")]))
    out, err = capsys.readouterr()
    return out.splitlines()[:-1], err


def test_groups_their_means_and_their_differences(tmp_path, capsys):
    folders = []
    for lr, seed, loss in ((1, 1, 2.0), (1, 2, 2.2), (1, 3, 2.1), (2, 1, 3.0)):
        name = f"{lr}_{seed}"
        folders.append(
            run_of(tmp_path / name, loss, out_dir=name, lr=lr, seed=seed, shuffle_seed=seed)
        )
    base = [
        run_of(tmp_path / f"base_{s}", 2.4 + s / 10, out_dir=f"b{s}", lr=3, seed=s, shuffle_seed=s)
        for s in (3, 2, 1)
    ]
    lines, err = printed([*folders, "--against", *base], capsys, tmp_path)
    assert err == ""
    assert lines == [
        "runs  seeds  loss             bits a byte        seconds         tokens",
        "lr=1      3  2.1000 ±0.1000   1.0500 ±0.0500           5          1,000",
        "lr=2      1  3.0000           1.5000                   5          1,000",
        "lr=3      3  2.6000 ±0.1000   1.3000 ±0.0500           5          1,000",
        "",
        "lr=1 less lr=3, with 95% intervals",
        "loss         Welch           -0.5000  -0.7267 to -0.2733  lower",
        "loss         paired by seed  -0.5000  -0.7484 to -0.2516  lower",
        "bits a byte  Welch           -0.2500  -0.3633 to -0.1367  lower",
        "bits a byte  paired by seed  -0.2500  -0.3742 to -0.1258  lower",
        "",
        "lr=2 less lr=3, with 95% intervals",
        "loss         Welch           +0.4000  not established: one seed on a side",
        "bits a byte  Welch           +0.2000  not established: one seed on a side",
    ]  # fmt: skip


def test_an_edit_is_no_setting_and_pairs_need_seeds_and_rows(tmp_path, capsys):
    """Sides of equal settings are named by folder; logs of other seeds or rows make no pairs."""
    gate = [
        run_of(tmp_path / f"gate_{s}", 2 + s / 10, False, out_dir=f"g{s}", seed=s) for s in (1, 2)
    ]
    base = [
        run_of(tmp_path / f"base_{s}", 2 + s / 10, False, out_dir=f"b{s}", seed=s) for s in (1, 3)
    ]
    lines, err = printed([*gate, "--against", *base], capsys, tmp_path)
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["gate", "2"],
        ["base", "2"],
    ] and "n/a" in lines[1]
    assert lines[3:] == [
        "",
        "gate less base, with 95% intervals",
        "loss         Welch           -0.0500  -0.7419 to +0.6419  not established",
    ]
    other = run_of(
        tmp_path / "base_2", 2.0, held_out="b; 100 tokens", done=False, out_dir="b2", seed=2
    )
    lines, err = printed([*gate, "--against", base[0], other], capsys, tmp_path)
    assert not any("paired" in line for line in lines)
    assert (
        "base_2 has not come to its end" in err
        and "not all runs were validated on the same rows" in err
    )


def test_sides_of_the_same_names_have_those_of_their_folders(tmp_path, capsys):
    sides = {}
    for side in ("edited", "base"):
        sides[side] = [run_of(tmp_path / side / f"s{seed}", 2.0, seed=seed) for seed in (1, 2)]
    lines, _ = printed([*sides["edited"], "--against", *sides["base"]], capsys, tmp_path)
    expected = f"{tmp_path / 'edited/s'} less {tmp_path / 'base/s'}, with 95% intervals"
    assert lines[4] == expected


def test_runs_of_a_group_have_one_colour(tmp_path, capsys):
    folders = [
        run_of(tmp_path / f"{side}{seed}", 2.0, out_dir=f"{side}{seed}", seed=seed)
        for side in "ab"
        for seed in (1, 2)
    ]
    runs = logs.load(folders)
    plot.paint(seeds.compare(runs[:2], runs[2:]))
    blue, orange = pictures.colors()[:2]
    assert [(run.color, run.dash) for run in runs] == [
        (color, dash) for color in (blue, orange) for dash in plot.DASHES[:2]
    ]


def test_small_logs_of_the_repository(capsys, tmp_path):
    logs = [
        str(ROOT / f"results/modern/8x512{end}.jsonl") for end in ("_seed_2", "_seed_3", "_gelu")
    ]
    lines, _ = printed([logs[2], "--against", *logs[:2]], capsys, tmp_path)
    assert [line.split()[:2] for line in lines[1:3]] == [["mlp=gelu", "1"], ["mlp=relu2", "2"]]
    assert lines[-2].endswith("not established: one seed on a side")


@pytest.mark.parametrize("words, message", [
    (["a", "--against", "a"], "a is given twice"),
    (["a", "--against", "b", "again"], "b, .*again: two have the same seed, which counts once"),
    (["a", "--against", "none"], "none: no validation loss in its log, which a table needs"),
    (["a", "--against"], "--against needs a value"),
])  # fmt: skip
def test_what_is_no_comparison(tmp_path, words, message):
    for name, seed in (("a", 1), ("b", 2), ("again", 2)):
        run_of(tmp_path / name, 2.0, out_dir=name, seed=seed)
    write(tmp_path / "none", [dict(kind="train", step=1, loss=2.0)])
    with pytest.raises(UserError, match=message) as error:
        plot.main(
            configure(plot.Config, [w if w[:2] == "--" else str(tmp_path / w) for w in words])
        )
    one_line(error)


def test_real_runs_are_paired_and_their_norms_are_drawn(data_dir, tmp_path, capsys):
    settings = dict(max_steps=4, eval_interval=4, save_interval=0, norms_interval=2)
    sides = {"gelu": [], "relu2": []}
    for mlp, folders in sides.items():
        for seed in (1, 2):
            folders.append(str(tmp_path / f"{mlp}{seed}"))
            train_here(data_dir, folders[-1], seed=seed, mlp=mlp, **settings)
    capsys.readouterr()
    lines, err = printed([*sides["gelu"], "--against", *sides["relu2"]], capsys, tmp_path)
    assert err == "" and lines[4] == "mlp=gelu less mlp=relu2, with 95% intervals"
    # the data has no bytes of tokens
    assert [line.split()[1] for line in lines[5:]] == ["Welch", "paired"]
    lines, err = printed([sides["gelu"][0], "--norms"], capsys, tmp_path)
    assert [line.split(":")[0] for line in lines] == ["weight", "gradient", "update"] and err == ""


def test_norms_are_drawn_over_their_median_and_the_largest_is_named(tmp_path, capsys):
    names = ["wte", *(f"blocks.{i}.{kind}" for i in range(3) for kind in ("attn.q", "mlp.up"))]
    lines = [dict(kind="train", step=step, loss=3.0, norm=1.0, lr=0.1) for step in range(1, 51)]
    for step in range(10, 60, 10):
        values = {name: 0.1 * (i + 1) for i, name in enumerate(names)}
        spike = values | {
            "blocks.2.attn.q": 3.0 if step == 40 else 0.6,
            "wte": None if step == 50 else 0.0,
        }
        lines.append(dict(kind="norms", step=step, weight=values, gradient=spike, update=values))
    run = write(tmp_path / "a", lines)
    figure = norms.draw(logs.load([run]))
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "gradient: at most 5.0 times its median, in blocks.2.attn.q at step 40"
    [mesh] = figure.axes[4].collections
    drawn = mesh.get_array().reshape(7, 5)  # wte, then q of each block, then up
    assert drawn[0].mask.all() and drawn[3].tolist() == pytest.approx([1, 1, 1, 5, 1])
    assert [label.get_text() for label in figure.axes[3].get_yticklabels()] == [
        "wte",
        "attn.q",
        "mlp.up",
    ]
    for runs in ([run, run], [write(tmp_path / "b", lines[:50])]):
        with pytest.raises(
            UserError, match="draws one run that was trained with --norms_interval=N"
        ):
            norms.draw(logs.load(runs))
