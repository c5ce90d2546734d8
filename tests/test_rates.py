"""measure/rates.py: what bench.py measures, as JSON, and the plan with these rates; the recipe that the plan writes."""

import json
import os
import re
import types

import pytest
from conftest import ROOT, flags, one_line, train_ranks
from test_bench import TINY, here

import train
from bench import StepConfig
from configurator import UserError, configure
from measure import rates, step, tables
from run.flops import PEAK_TFLOPS
from scale import plan
from settings import Config

PLAN = ["config/llama3_8b.py", "--world=8"]
MS = {
    "matmul": 410.0,
    "head + loss": 178.0,
    "attention": 155.0,
    "elementwise": 53.0,
    "optimizer": 2.0,
    "idle": 10.0,
}


def step_file(path, *words, **more):
    """A result as `bench.py step --out` writes it, of made-up times."""
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py"), *words])
    rates.write(path, "step", cfg, "NVIDIA H100", 1, "2.13", {"ms": MS} | more)
    return cfg


def test_data_sheets_are_those_of_the_mfu():
    for name, (bf16, fp8, *_) in rates.DATASHEETS.items():
        peaks = PEAK_TFLOPS[name.upper()]
        assert (bf16, fp8) == (peaks["bf16"] * 1e12, peaks.get("fp8") and peaks["fp8"] * 1e12)
    assert rates.of_name("h200") == plan.H200


def test_the_plan_says_whether_its_rates_were_measured(capsys):
    here("plan", *PLAN)
    assert "h200: measured" in capsys.readouterr().out
    slower = {}
    for name in ("h100", "a100"):
        here("plan", *PLAN, f"--rates={name}")
        said = capsys.readouterr().out
        assert f"{name}: from its data sheet, not measured" in said
        slower[name] = float(said.split("those given\n")[1].split()[0])
    assert 2 * slower["h100"] < slower["a100"] < 4 * slower["h100"]


@pytest.mark.parametrize(
    "words", [["--precision=bf16"], ["--precision=fp8", "--remat=selective", "--batch_size=32"]]
)
def test_the_plan_of_what_was_measured_takes_the_measured_time(tmp_path, words):
    cfg = step_file(tmp_path / "step.json", *words)
    found, lines = rates.of(f"h100,{tmp_path}/step.json")
    parts = plan.seconds(cfg, 1, found)
    assert parts["matmul"] == pytest.approx(0.588) and parts["attention"] == pytest.approx(0.155)
    assert parts["elementwise"] == pytest.approx(0.065)
    kept = "matmul" if cfg.precision == "fp8" else "matmul_fp8"
    assert getattr(found, kept) == getattr(rates.of_name("h100"), kept)
    assert lines[0].startswith("h100: from its data sheet") and "measured on 1 x NVIDIA H100" in lines[1]


def test_the_cpus_rate_is_the_one_of_a_measured_update(tmp_path):
    """With offload_states: the update's 28 bytes a parameter; host copies are among the GPU's times, see of_step."""
    words = ["--parallel=fsdp", "--offload_states=True", "--precision=bf16"]
    cfg = step_file(tmp_path / "step.json", *words, update_ms=20.0)
    found, lines = rates.of(f"h100,{tmp_path}/step.json")
    assert plan.update_bytes(cfg, 1) / (found.cpu / 2) == pytest.approx(0.020)
    assert found.memory == rates.of_name("h100").memory and "matmul attention cpu measured" in lines[1]
    step_file(tmp_path / "step.json", *words)
    with pytest.raises(UserError, match="step.json is damaged: figures: it has no update_ms"):
        rates.of(f"{tmp_path}/step.json")


def test_step_writes_what_it_printed(tmp_path, capsys):
    here("step", *TINY, "--steps=3", "--settle=0", f"--out={tmp_path}/step.json")
    result, said = json.loads((tmp_path / "step.json").read_text()), capsys.readouterr().out
    figures, settings = result["figures"], result["settings"]
    assert (
        f"{figures['step_ms']:.1f} ms, median of 3" in said
        and f"{figures['tokens_per_s']:,.0f} tokens/s" in said
    )
    assert f"{figures['update_ms']:.1f} ms, the optimizer's" in said and len(figures["steps_ms"]) == 3
    assert (result["bench"], result["device"], result["ranks"]) == ("step", "cpu", 1)
    assert settings["n_embd"] == 64 and settings["precision"] == "fp32"
    with pytest.raises(UserError, match="step.json: no GPU times by kind of kernel in it; measure on a GPU"):
        here("plan", *PLAN, f"--rates={tmp_path}/step.json")


def test_the_kinds_of_kernels_that_are_printed_are_written(monkeypatch):
    """Without a GPU: two steps of made-up kernels."""
    events = [
        ("nvjet", 0, 4),
        ("flash", 4, 6),
        ("cross_entropy", 6, 8),
        ("copy", 8, 9),
        ("multi_tensor_apply", 9, 10),
    ]
    floor = {"matmul": 1.0, "attention": 0.5, "head + loss": 0.5}
    monkeypatch.setattr(step, "kernel_events", lambda *_: [*events, ("nvjet", 12, 20)])
    monkeypatch.setattr(step, "head_events", lambda *_: [])
    monkeypatch.setattr(step, "floor_times", lambda *_: (floor, 2.5, "n/a"))
    job, world, said = (
        types.SimpleNamespace(accumulation=2),
        types.SimpleNamespace(main=True, device=None),
        [],
    )
    figures = step.breakdown(job, None, StepConfig(), world, said.append)
    ms = {
        "matmul": 6,
        "attention": 1,
        "head + loss": 1,
        "elementwise": 0.5,
        "optimizer": 0.5,
        "communication": 0,
    }
    assert figures["ms"] == ms | {"idle": 1} and figures["floor_ms"]["matmul"] == 2 and json.dumps(figures)
    assert re.search(r"matmul without the head +6.0 +2.0\n.*attention +1.0 +1.0\n", "\n".join(said))


def test_collectives_are_written_and_planned_with(tmp_path):
    done = train_ranks(
        2, ["comm", "--device=cpu", "--max_mib=4", "--rounds=1", f"--out={tmp_path}/c.json"], "bench.py"
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "c.json").read_text())["figures"]["bus_gb_per_s"]
    assert [row["mib"] for row in rows] == [1, 4] and f"{rows[1]['all_reduce']:.1f} (" in done.stdout
    found, lines = rates.of(f"{tmp_path}/c.json")
    ring = [rows[1][name] for name in ("all_reduce", "all_gather", "reduce_scatter") if name in rows[1]]
    assert found.link == pytest.approx(1e9 * sum(ring) / len(ring)) and found.matmul == plan.H200.matmul
    assert lines[0].startswith("h200") and "link" in lines[1] and "measured on 2 x cpu" in lines[1]


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "f.json is damaged: it is not valid JSON"),
        ({"bench": "ops"}, 'f.json is damaged: bench is "ops", expected "step" or "comm"'),
        ({"figures": {}}, "no GPU times by kind of kernel in it"),
        ({"figures": {"ms": MS | {"attention": 0}}}, "figures.ms: attention is 0, expected a number over 0"),
        ({"figures": {"ms": {"matmul": 1.0}}}, "figures.ms: it has no head . loss"),
        ({"settings": {"n_layer": "x"}}, "f.json is damaged: settings: n_layer=x is not an int"),
        ({"settings": {"n_head": 0}}, "f.json is damaged: settings: "),
        ({"ranks": 0}, "f.json is damaged: ranks is 0, expected a whole number over 0"),
        ({"bench": "comm"}, "f.json is damaged: figures: it has no bus_gb_per_s"),
        ({"bench": "comm", "figures": {"bus_gb_per_s": []}}, "f.json is damaged: no collective was measured"),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, change, message):
    step_file(tmp_path / "f.json")
    text = (tmp_path / "f.json").read_text()
    (tmp_path / "f.json").write_text(text[:50] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(UserError, match=message) as error:
        here("plan", *PLAN, f"--rates={tmp_path}/f.json")
    assert "f.json" in one_line(error)


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", *PLAN, "--rates=h300"], "rates=h300: expected one of a100, h100, h200, or a file"),
        (["plan", *PLAN, "--rates=a100", "--precision=fp8"], "rates=a100 is of a GPU without fp8"),
        (["plan", *PLAN, "--write=config/test.py"], "write=config/test.py: there is such a file already"),
        (["plan", *PLAN, "--write=mine.txt"], "write=mine.txt: a config file's name ends in .py"),
        (["plan", *PLAN, "--write=no/such/mine.py"], "write=no/such/mine.py: there is no folder .*no/such"),
        (["step", *TINY, "--out=no/such/step.json"], "out=no/such/step.json: there is no folder"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message) as error:
        here(*words)
    one_line(error)


@pytest.mark.parametrize(
    "world, words", [(1, "python"), (6, "--nproc_per_node=6"), (12, "--nnodes=2 .*=6 train")]
)
def test_the_command_of_a_recipe_uses_every_gpu(world, words):
    assert re.search(words, tables.command("mine.py", world))
    assert "torchrun" in tables.command("mine.py", world, group=True)


def test_the_recipe_that_the_plan_writes_is_the_one_that_it_found(data_dir, tmp_path, capsys):
    path = tmp_path / "mine.py"
    words = [*PLAN, "--gpu_gib=40", "--precision=bf16"]
    here("plan", *words, f"--write={path}")
    said = capsys.readouterr().out
    flags_of_first = said.split("those given\n")[1].splitlines()[0].split()[3:]
    assert flags_of_first and configure(Config, [str(path)]) == configure(
        Config, [words[0], *flags_of_first, words[-1]]
    )
    first = path.read_text().splitlines()[0]
    assert first == f"# torchrun --standalone --nproc_per_node=8 train.py {path}" and first[2:] in said
    os.remove(path)
    here(
        "plan",
        *[str(ROOT / w) if w == "config/test.py" else w for w in flags(data_dir, tmp_path / "run")],
        f"--write={path}",
    )
    assert path.read_text().startswith(f"# python train.py {path}\n")
    train.main(configure(Config, [str(path), "--dry_run"]))
    assert "step 2/2 |" in capsys.readouterr().out
