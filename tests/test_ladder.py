"""bench.py ladder: a row a rung, each the step that its settings give; one that fails or is missing stops no other."""

import dataclasses
import importlib
import json
import re
import subprocess

import pytest
import torch
from conftest import one_line
from test_bench import TINY, here

from bench import LadderConfig, StepConfig
from configurator import UserError, configure
from fast import chips
from measure import ladder, step
from measure.ladder import RUNGS
from scale import parallel
from settings import check

WORDS = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=16", "--vocab_size=257", "--rows=2"]
WORDS += ["--device=cpu", "--steps=2", "--settle=0"]
NAMES = [rung.name for rung in RUNGS]
ON_A_CPU = [
    "float32, plain attention",
    "torch.compile",
    "flash attention",
    "padded vocabulary",
    "fused AdamW",
]


def eager(words, _):
    """`bench.py WORDS` in this process, without the compiler, whose part takes half a minute on a CPU."""
    here(*words, "--compile=False")
    return subprocess.CompletedProcess(words, 0, "", "")


def faked(tokens_per_s):
    """A stand-in for ladder.start: writes the next of these figures; for words, fails with them on stderr instead."""
    left = iter(tokens_per_s)

    def start(words, _):
        figure = next(left)
        if isinstance(figure, str):
            return subprocess.CompletedProcess(words, 1, "", figure)
        path = words[-1].removeprefix("--out=")
        with open(path, "w") as file:
            json.dump({"figures": {"step_ms": 1e3 / figure, "tokens_per_s": figure, "mfu": None}}, file)
        return subprocess.CompletedProcess(words, 0, "", "")

    return start


def test_the_ladder_on_a_cpu(tmp_path, monkeypatch, capsys):
    """What a CPU lacks is left out with the reason; the figures printed are those of the file."""
    monkeypatch.setattr(ladder, "start", eager)
    here("ladder", *WORDS, f"--out={tmp_path}/ladder.json")
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "ladder.json").read_text())
    rows = result["figures"]["rungs"]
    assert result["bench"] == "ladder" and [row["rung"] for row in rows] == NAMES
    ran = [row for row in rows if "tokens_per_s" in row]
    assert [row["rung"] for row in ran] == ON_A_CPU, said
    assert all(row["left_out"] in said for row in rows if row not in ran) and "failed" not in said
    for before, row in zip([None, *ran], ran):
        assert row["factor"] == (before and row["tokens_per_s"] / before["tokens_per_s"])
        assert (
            row["tokens_per_s"] == pytest.approx(2 * 16 / row["step_ms"] * 1e3) and len(row["steps_ms"]) == 2
        )
        assert re.search(rf"{row['rung']} +{row['step_ms']:.1f} +{row['tokens_per_s']:,.0f} ", said), said


def test_a_rung_keeps_the_changes_below_it(tmp_path, monkeypatch):
    """Those that a CPU can make; the last rung has every one of them."""
    monkeypatch.setattr(ladder, "start", faked(range(10, 15)))
    here("ladder", *WORDS, f"--out={tmp_path}/ladder.json")
    rows = json.loads((tmp_path / "ladder.json").read_text())["figures"]["rungs"]
    expected = {}
    for rung, row in zip(RUNGS, rows):
        if rung.name in ON_A_CPU:
            expected |= rung.change
        assert expected.items() <= row["settings"].items(), rung.name
    assert expected == dict(
        ladder.PLAIN, compile=True, attention="flash", vocab_multiple=128, fused_adamw=True
    )


def test_a_rung_that_fails_stops_no_other(monkeypatch, capsys):
    words = "Traceback ...\nerror: out of memory: this takes about 99 GiB; try --batch_size=8\nnoise"
    monkeypatch.setattr(ladder, "start", faked([100, words, 300, "RuntimeError: no compiler", 450]))
    here("ladder", *WORDS)
    said = capsys.readouterr().out
    assert re.search(r"torch.compile +failed: out of memory; try fewer rows$", said, re.MULTILINE), said
    assert re.search(r"flash attention .* 300 +n/a +3.00x ", said), "over the last rung that ran"
    assert re.search(r"padded vocabulary +failed: RuntimeError: no compiler$", said, re.MULTILINE), said
    assert re.search(r"fused AdamW .* 450 +n/a +1.50x ", said) and "to fused AdamW: 4.5 times" in said, said


def test_no_rung_at_all_is_an_error(monkeypatch):
    monkeypatch.setattr(ladder, "start", faked(["error: no"] * len(RUNGS)))
    with pytest.raises(UserError, match="^no rung ran"):
        here("ladder", *WORDS)


def test_a_process_that_was_killed_says_its_code():
    assert (
        ladder.failure(subprocess.CompletedProcess([], -9, "", ""))
        == "killed by SIGKILL, out of the host's memory perhaps; try fewer rows"
    )


def test_the_error_of_a_process_is_found_above_advice():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\ntorch._dynamo.exc.Unsupported: no such call\n'
    done = subprocess.CompletedProcess([], 1, "", trace + "\nSet TORCHDYNAMO_VERBOSE=1 for more\n")
    assert ladder.failure(done) == "torch._dynamo.exc.Unsupported: no such call"


@pytest.mark.parametrize(
    "chip, missing",
    [
        ("a100", ["cuDNN attention", "fp8"]),
        ("4090", ["cuDNN attention"]),
        ("h100", []),
        ("h200", []),
        ("b200", []),
        ("mi300x", ["cuDNN attention", "fused operations", "fp8"]),
        (
            chips.Chip("nvidia", (7, 0)),
            [n for n in NAMES if n not in (*ON_A_CPU, "CUDA graph") or n == "flash attention"],
        ),
        (chips.Chip("mps"), [n for n in NAMES if n not in ON_A_CPU or n == "fused AdamW"]),
    ],
    ids=str,
)
def test_what_a_chip_leaves_out(chip, missing, monkeypatch):
    monkeypatch.setattr(ladder.kernels, "MISSING", None)
    chip = chips.NAMED.get(chip, chip)
    assert [rung.name for rung in RUNGS if rung.lacks(chip)] == missing


def test_the_rungs_are_settings_of_gpt2_124m():
    """The first is plain in all that a later one changes; the last is what train.py runs, but for graph and fp8."""
    settings = {}
    for rung in RUNGS:
        assert not rung.change.items() <= settings.items(), f"{rung.name} changes nothing"
        settings |= rung.change
        cfg = configure(StepConfig, ladder.as_words(settings).split())
        check(cfg, 1)
        assert {name: getattr(cfg, name) for name in settings} == settings
    default = StepConfig()
    assert cfg.padded_vocab == 50_304 and all(
        settings[name] == getattr(default, name) for name in ("compile", "vocab_multiple", "fused_adamw")
    )


def test_unfused_adamw_is_the_same_update():
    """Three steps of both in float32; Adam divides by roots, which enlarges rounding."""
    cfg, moved = dataclasses.replace(configure(StepConfig, TINY), precision="fp32"), []
    world = parallel.start("cpu")
    for fused in (True, False):
        own, _, job = step.build(cfg, world)
        job.optimizer = job.optimizer if fused else step.unfused_adamw(job.raw, own)
        next_batch = step.synthetic(own, world)
        for _ in range(3):
            job.step(next_batch, 1e-3)
        moved.append(torch.cat([p.detach().flatten() for p in job.raw.parameters()]))
    start = torch.cat([p.detach().flatten() for p in step.build(cfg, world)[2].raw.parameters()])
    assert (moved[0] - moved[1]).norm() < 1e-3 * (moved[0] - start).norm()


def test_unfused_adamw_runs_pytorchs_foreach_form(monkeypatch):
    adam = importlib.import_module("torch.optim.adam")  # the package's attribute of that name is removed
    calls, form = [], adam._multi_tensor_adam
    monkeypatch.setattr(adam, "_multi_tensor_adam", lambda *a, **o: calls.append(1) or form(*a, **o))
    for words, expected in ((["--fused_adamw=False"], True), ([], False)):
        calls.clear()
        here("step", *TINY, "--steps=1", "--settle=0", "--breakdown=False", *words)
        assert bool(calls) is expected


@pytest.mark.parametrize(
    "words, message",
    [
        (["ladder", "--rows=0"], "rows=0 must be at least 1"),
        (["ladder", "--steps=0"], "steps=0 must be at least 1"),
        (["ladder", "--n_head=7"], "n_embd=768 must be divisible by n_head=7"),
        (["ladder", "--out=missing/ladder.json"], "out=missing/ladder.json: there is no folder"),
        (
            ["step", *TINY, "--fused_adamw=False", "--optimizer=muon"],
            "fused_adamw=False is for optimizer=adamw and max",
        ),
    ],
)
def test_mistakes_are_one_line_before_any_rung(words, message):
    with pytest.raises(UserError, match=message) as error:
        here(*words)
    one_line(error)


def test_the_ladder_refuses_several_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="start it without torchrun"):
        here("ladder", *WORDS)


@pytest.mark.slow
def test_a_rung_in_a_process_of_its_own():
    common = ladder.common_settings(configure(LadderConfig, WORDS))
    assert ladder.timed(common | ladder.PLAIN)["tokens_per_s"] > 0
    assert ladder.timed(common | ladder.PLAIN | {"precision": "tf32"})["failed"].startswith(
        "precision=tf32 needs"
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.repeated  # ten processes, of which seven compile
def test_the_ladder_on_a_gpu(tmp_path, capsys):
    """Every rung that this GPU has runs, and none is left out without a reason."""
    words = ["--n_layer=2", "--n_embd=256", "--n_head=4", "--block_size=256", "--steps=2", "--settle=1"]
    here("ladder", *words, f"--out={tmp_path}/ladder.json")
    rows = json.loads((tmp_path / "ladder.json").read_text())["figures"]["rungs"]
    assert not [row for row in rows if "failed" in row], capsys.readouterr().out
