"""run/fit.py: a law's numbers come back from runs that follow it; what is no end of a run is left out."""

import dataclasses
import json

import numpy as np
import pytest

import plot
from configurator import UserError
from run import fit

LAW = fit.Law(E=1.7, A=400.0, alpha=0.34, B=410.0, beta=0.28)
SIZES, TOKENS = (3e7, 6e7, 1.2e8, 3.5e8), (4e7, 1e8, 3e8)


def ends(recipe="muon", m=1.0, noise=0.0):
    rng = np.random.default_rng(0)
    return [
        fit.End(f"{N} {D}", recipe, N, D, LAW.loss(N, D, m) + noise * rng.standard_normal())
        for N in SIZES
        for D in TOKENS
    ]


def write(path, N, D, loss, optimizer="muon", lr=(1.0, 0.0), last=1000):
    start = dict(
        kind="start", step=0, flops_per_token=6 * N, rows=[["settings", f"lr=1 optimizer={optimizer}"]]
    )
    train = [dict(kind="train", step=s, tokens=D * s / 1000, loss=5.0, lr=r) for s, r in zip((1, 1000), lr)]
    val = [dict(kind="val", step=0, loss=10.0), dict(kind="val", step=last, loss=loss)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [start, *train, *val]))
    return str(path)


def test_the_numbers_of_a_law_come_back():
    found = fit.law_of(ends())
    assert (found.alpha, found.beta) == pytest.approx((LAW.alpha, LAW.beta)) and found.E == pytest.approx(
        LAW.E
    )
    assert (found.A, found.B) == pytest.approx((LAW.A, LAW.B))


def test_noise_of_a_hundredth_leaves_the_losses_in_place():
    found = fit.law_of(ends(noise=0.01))
    assert all(abs(found.loss(N, D) - LAW.loss(N, D)) < 0.03 for N in SIZES for D in TOKENS)


def test_the_best_size_has_no_better_neighbour():
    for compute, m in [(1e17, 1.0), (1e19, 3.0)]:
        N, D = LAW.best(compute, m)
        assert 6 * N * D == pytest.approx(compute)
        assert all(LAW.loss(N, D, m) < LAW.loss(N * k, D / k, m) for k in (0.9, 1.1))


def test_a_recipe_that_needs_three_times_the_tokens():
    assert fit.tokens_factor(LAW, ends(m=3.0)[:4]) == pytest.approx(3.0, rel=0.005)


def test_an_exponent_at_the_edge_of_those_tried_is_said():
    steep = fit.Law(E=1.7, A=400.0, alpha=0.34, B=4e9, beta=1.2)
    found = [dataclasses.replace(end, loss=steep.loss(end.N, end.D)) for end in ends()]
    assert fit.fit(found)[2][1].startswith("warning: an exponent is the lowest or highest")
    assert not any(line.startswith("warning") for line in fit.fit(ends())[2])


def test_logs_to_lines_and_a_picture(tmp_path, capsys):
    logs = [write(tmp_path / f"m{i}.jsonl", end.N, end.D, end.loss) for i, end in enumerate(ends())]
    logs += [
        write(tmp_path / f"a{i}.jsonl", e.N, e.D, e.loss, "adamw") for i, e in enumerate(ends(m=2.0)[:3])
    ]
    logs += [
        write(tmp_path / "worse.jsonl", SIZES[0], TOKENS[0], 9.0)
    ]  # of a size and tokens that m0 has too
    logs += [
        write(tmp_path / "cut.jsonl", 1e8, 1e8, 4.0, lr=(1.0, 0.9)),
        write(tmp_path / "no.jsonl", 1e8, 1e8, 4.0, last=800),
    ]
    plot.main(plot.Config(fit=True, out=str(tmp_path / "fit.png")), logs)
    said = capsys.readouterr().out
    assert (
        "left out: cut: it ends at step 1000 before its rate has fallen" in said and "left out: no:" in said
    )
    assert "loss = 1.700 + 400 / N^0.34 + 410 / D^0.28" in said
    assert "muon: 12 runs, 1.00 times the tokens, at most 0.000 nats off" in said
    assert "adamw: 3 runs, 2.00 times the tokens, at most 0.00" in said
    assert (tmp_path / "fit.png").stat().st_size > 10_000


def test_a_validation_a_few_steps_before_the_last_one_counts(tmp_path):
    logs = [write(tmp_path / f"{last}.jsonl", 1e8, 1e8, 4.0, last=last) for last in (999, 980)]
    found, left_out = fit.ends_of(plot.load(logs))
    assert [end.name for end in found] == ["999"] and len(left_out) == 1


@pytest.mark.parametrize(
    "n, got", [(6, "6 runs, of 2 and 3"), (5, "5 runs, of 2 and 3"), (0, "0 runs, of 0 and 0")]
)
def test_too_few_runs_are_one_line_after_those_left_out(tmp_path, capsys, n, got):
    logs = [write(tmp_path / f"{i}.jsonl", end.N, end.D, end.loss) for i, end in enumerate(ends()[:n])]
    logs += [write(tmp_path / "cut.jsonl", 1e8, 1e8, 4.0, lr=(1.0, 0.9))]
    with pytest.raises(
        UserError, match=f"needs 6 runs of one recipe, of 3 sizes and 3 numbers of tokens; got {got}$"
    ):
        plot.main(plot.Config(fit=True, out=str(tmp_path / "fit.png")), logs)
    assert capsys.readouterr().out.startswith("left out: cut:")
