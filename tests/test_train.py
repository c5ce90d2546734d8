"""train.py run whole: resumed against uninterrupted, ranks against one process, and each user error with its code."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, flags, losses, read_log, stdlib_bytes, train_here, train_ranks, write_shard
from safetensors.torch import load_file

import train
from configurator import UserError, configure
from fineweb import DataError


def weights(out_dir, step):
    return load_file(out_dir / f"step_{step:08d}" / "model.safetensors")


def test_trains_evaluates_samples_and_saves(data_dir, tmp_path, capsys):
    settings = dict(eval_interval=6, sample_interval=12, sample_tokens=8, sample_prompt="def", lr=5e-3, max_steps=40)
    log = train_here(data_dir, tmp_path / "run", **settings)
    loss, val = losses(log), losses(log, "val")
    assert sorted(loss) == list(range(1, 41)) and sorted(val) == [0, 6, 12, 18, 24, 30, 36, 40]
    assert abs(val[0] - 5.55) < 0.1  # ln 257: nothing is known before the first step
    assert val[40] < 3.6 and loss[40] < 3.7
    samples = [line for line in log if line["kind"] == "sample"]
    assert [s["step"] for s in samples] == [0, 12, 24, 36, 40] and all(t.startswith("def") for t in samples[0]["texts"])
    assert (tmp_path / "run" / "step_00000040").is_dir()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["n_embd"] == 64
    text = capsys.readouterr().out
    assert "parameters" in text and "step 40/40 | loss" in text and "--resume=auto" in text


def test_resumed_equals_uninterrupted_bitwise(data_dir, tmp_path):
    settings = dict(dropout=0.1, shuffle_seed=3, save_interval=5, keep_last=9, eval_interval=5)
    whole = train_here(data_dir, tmp_path / "a", **settings)
    shutil.copytree(tmp_path / "a" / "step_00000005", tmp_path / "b" / "step_00000005")
    again = train_here(data_dir, tmp_path / "b", resume="auto", **settings)
    assert sorted(losses(again)) == list(range(6, 13))
    assert all(losses(again)[s] == losses(whole)[s] for s in range(6, 13))
    assert all(losses(again, "val")[s] == losses(whole, "val")[s] for s in (10, 12))
    for name in ("model", "optimizer", "rng"):
        a, b = (load_file(tmp_path / run / "step_00000012" / f"{name}.safetensors") for run in "ab")
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_run(one, other, rel):
    """Asserts that two run folders have the same training and validation losses, and weights after step 12."""
    for kind in ("train", "val"):
        a, b = losses(read_log(one), kind), losses(read_log(other), kind)
        assert a.keys() == b.keys()
        for step in a:
            assert a[step] == pytest.approx(b[step], rel=rel), (kind, step)
    for name, tensor in weights(one, 12).items():
        torch.testing.assert_close(weights(other, 12)[name], tensor, rtol=0, atol=2e-5, msg=name)


def same_end(log, one, rel):
    """Asserts that a run resumed after step 6 has the losses of an uninterrupted one."""
    for step in range(7, 13):
        assert losses(log)[step] == pytest.approx(losses(one)[step], rel=rel)


@pytest.mark.slow
def test_two_ranks_equal_one_process_and_resume_across(data_dir, tmp_path):
    """The same global batch in float32: equal but for the order of sums. 2 -> 1 ranks go on with the same rows."""
    settings = dict(eval_interval=6, save_interval=6, keep_last=9)
    one = train_here(data_dir, tmp_path / "one", **settings)
    two = train_ranks(2, flags(data_dir, tmp_path / "two", **settings))
    assert two.returncode == 0, two.stderr
    same_run(tmp_path / "one", tmp_path / "two", rel=2e-6)

    shutil.copytree(tmp_path / "two" / "step_00000006", tmp_path / "across" / "step_00000006")
    across = train_here(data_dir, tmp_path / "across", resume="auto", **settings)
    same_end(across, one, rel=2e-6)


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (2, dict(parallel="fsdp")),
        (2, dict(parallel="zero2", mlp="swiglu", norm="rmsnorm", positions="rope", n_kv_head=2, bias=False)),
        (2, dict(parallel="fsdp", context_parallel=2, tie_embeddings=False, remat="block", compile=True)),
        (4, dict(parallel="hsdp", shard_size=2)),
        (2, dict(context_parallel=2, remat="attention", remat_tile=6, remat_offload=True)),
        (4, dict(context_parallel=2, parallel="fsdp", mlp="swiglu", positions="rope", n_kv_head=1, remat="selective")),
    ],
)
def test_any_mode_equals_one_process_and_resumes_across(data_dir, tmp_path, ranks, settings):
    """As for DDP; what sharded ranks saved goes on in one process, and the other way round, sampling included."""
    modes = ("parallel", "shard_size", "context_parallel", "remat", "remat_tile", "remat_offload", "compile")
    shape = {k: v for k, v in settings.items() if k not in modes}
    common = dict(eval_interval=6, save_interval=6, keep_last=9, batch_size=2, sample_interval=6, sample_tokens=4)
    one = train_here(data_dir, tmp_path / "one", **common, **shape)
    many = train_ranks(ranks, flags(data_dir, tmp_path / "many", **common, **settings))
    assert many.returncode == 0, many.stderr
    same_run(tmp_path / "one", tmp_path / "many", rel=4e-6)

    shutil.copytree(tmp_path / "many" / "step_00000006", tmp_path / "back" / "step_00000006")
    back = train_here(data_dir, tmp_path / "back", resume="auto", **common, **shape)
    same_end(back, one, rel=4e-6)
    if settings.get("compile"):
        return
    shutil.copytree(tmp_path / "one" / "step_00000006", tmp_path / "out" / "step_00000006")
    out = train_ranks(ranks, flags(data_dir, tmp_path / "out", resume="auto", **common, **settings))
    assert out.returncode == 0, out.stderr
    same_end(read_log(tmp_path / "out"), one, rel=4e-6)


def test_validation_is_the_same_for_any_batch_size(data_dir, tmp_path):
    # 1,056 tokens are 33 rows: no batch size below divides them
    runs = [
        train_here(data_dir, tmp_path / f"{b}", batch_size=b, eval_interval=6, eval_tokens=1056) for b in (2, 4, 16)
    ]
    for run in runs[1:]:
        assert losses(run, "val")[0] == pytest.approx(losses(runs[0], "val")[0], rel=1e-6)


def test_overfits_one_batch(data_dir, tmp_path):
    log = train_here(
        data_dir, tmp_path / "run", overfit=True, max_steps=150, lr=1e-2, batch_tokens=128, save_interval=0
    )
    assert losses(log)[150] < 0.1 and not list((tmp_path / "run").glob("step_*"))


def test_dry_run_writes_nothing(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", dry_run=True, eval_interval=6)
    train.main(configure(train.Config, [str(ROOT / words[0]), *words[1:]]))
    assert not (tmp_path / "run").exists()


def test_llama_trains_compiled_as_eager(data_dir, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    shape = dict(norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, n_kv_head=2, qk_norm=True, max_steps=4)
    eager = train_here(data_dir, tmp_path / "eager", **shape, save_interval=0, eval_interval=4)
    fused = train_here(data_dir, tmp_path / "fused", **shape, save_interval=0, eval_interval=4, compile=True)
    for kind in ("train", "val"):
        for step, loss in losses(eager, kind).items():
            assert losses(fused, kind)[step] == pytest.approx(loss, rel=1e-5)


def test_init_from_starts_at_those_weights(data_dir, tmp_path):
    first = train_here(data_dir, tmp_path / "a", eval_interval=12)
    second = train_here(data_dir, tmp_path / "b", eval_interval=12, init_from=tmp_path / "a", max_steps=1)
    assert losses(second, "val")[0] == losses(first, "val")[12]
    padded = dict(vocab_multiple=64, max_steps=1, eval_interval=12)
    third = train_here(data_dir, tmp_path / "p", init_from=tmp_path / "a", **padded)
    assert losses(third, "val")[0] == pytest.approx(losses(first, "val")[12], rel=1e-6)
    with pytest.raises(UserError, match="n_embd: checkpoint 64, now 32"):
        train_here(data_dir, tmp_path / "c", init_from=tmp_path / "a", n_embd=32)


def test_used_folder_is_refused_and_kept(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with pytest.raises(UserError, match="holds an earlier run; try --resume=auto, --overwrite"):
        train_here(data_dir, tmp_path / "run")
    assert len(read_log(tmp_path / "run")) == 4
    log = train_here(data_dir, tmp_path / "run", overwrite=True, max_steps=2)
    assert sorted(losses(log)) == [1, 2]


def test_resume_refuses_another_model_and_other_data(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # torn, as by a kill: a resumed run's log is readable all the same
    with pytest.raises(train.checkpoint.CheckpointError, match="n_layer: checkpoint 2, now 3; .*n_embd: checkpoint 64"):
        train_here(data_dir, tmp_path / "run", resume="auto", n_layer=3, n_embd=32)
    other = tmp_path / "data"
    shutil.copytree(data_dir, other)
    write_shard(other / "py_train_000003.bin", stdlib_bytes(2_000))
    with pytest.raises(DataError):
        train_here(other, tmp_path / "run", resume="auto", max_steps=6)
    log = train_here(other, tmp_path / "run", resume="auto", max_steps=6, allow_data_change=True)
    assert sorted(losses(log)) == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_is_not_finite_stops_the_run(data_dir, tmp_path):
    with pytest.raises(train.NotFinite, match="the loss is nan.*since step 4"):
        train_here(data_dir, tmp_path / "run", max_steps=4)
        folder = tmp_path / "run" / "step_00000004"
        tensors, state = train.checkpoint.load(folder)
        tensors["model"]["blocks.0.mlp.up.weight"][0, 0] = float("nan")
        train.checkpoint.save(tmp_path / "run", 4, tensors, state)
        train_here(data_dir, tmp_path / "run", resume="auto", max_steps=8)


def test_hellaswag_in_the_loop_and_without_its_file(data_dir, tmp_path, capsys):
    path = tmp_path / "hellaswag.jsonl"
    example = {"ctx": "A man", "endings": [" runs", " eats", " sits", " falls"], "label": 2}
    path.write_text((json.dumps(example) + "\n") * 3)
    log = train_here(data_dir, tmp_path / "a", max_steps=2, hellaswag_interval=2, hellaswag_file=path)
    assert [line["n"] for line in log if line["kind"] == "hellaswag"] == [3, 3]
    log = train_here(data_dir, tmp_path / "b", max_steps=2, hellaswag_interval=2, hellaswag_file=tmp_path / "none")
    assert sorted(losses(log)) == [1, 2] and "no HellaSwag in this run" in capsys.readouterr().out


def test_wandb_absent_costs_a_warning(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = train_here(data_dir, tmp_path / "run", wandb=True, max_steps=2)
    assert sorted(losses(log)) == [1, 2] and capsys.readouterr().out.count("wandb is off") == 1


def test_wandb_offline_resumes_the_same_run(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_here(data_dir, tmp_path / "run", wandb=True, max_steps=4)
    train_here(data_dir, tmp_path / "run", wandb=True, max_steps=6, resume="auto")
    ids = [json.loads((tmp_path / "run" / f"step_{s:08d}" / "state.json").read_text())["wandb_id"] for s in (4, 6)]
    assert ids[0] is not None and ids[0] == ids[1]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(batch_tokens=1000), r"batch_tokens=1000 is not divisible .* 4\*32\*1 = 128; nearest: 896 or 1024"),
        (dict(n_head=5, lr=-1), "n_embd=64 must be divisible by n_head=5; lr=-1.0 must be at least 0"),
        (dict(beta2=1, clip=0), "beta2=1.0 must be below 1; clip=0.0 must be over 0"),
        (dict(precision="tf32"), "precision=tf32 needs a CUDA device"),
        (dict(device="gpu"), "device=gpu: expected auto, cpu, cuda"),
        (dict(resume="out/none/step_00000001"), "is damaged|no whole checkpoint"),
        (dict(batch_tokens=262_144), "262,?144"),
        (dict(data_dir="no/such"), "no/such"),
    ],
)
def test_user_errors(data_dir, tmp_path, settings, message):
    with pytest.raises(UserError, match=message) as error:
        train_here(settings.pop("data_dir", data_dir), tmp_path / "run", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_token_out_of_range_is_named(data_dir, tmp_path):
    with pytest.raises(DataError, match=r"py_train_000001.bin: token \d+ is \d+, not below vocab_size=100"):
        train_here(data_dir, tmp_path / "run", vocab_size=100)


@pytest.mark.slow
def test_errors_are_one_line_and_end_every_rank(data_dir, tmp_path):
    result = train_ranks(0, ["config/test.py", "--lerning_rate=1"])
    assert result.returncode == 2 and result.stdout == ""
    assert (
        result.stderr.strip() == "error: command line: unknown setting --lerning_rate; did you mean learning_rate?"
        or (
            result.stderr.startswith("error: command line: unknown setting --lerning_rate; did you mean lr?")
            and result.stderr.count("\n") == 1
        )
    )
    began = time.time()
    result = train_ranks(2, flags(tmp_path, tmp_path / "run"))  # a folder without shards
    assert result.returncode != 0 and time.time() - began < 60
    assert result.stderr.count("error: ") == 1 and str(tmp_path) in result.stderr


@pytest.mark.slow
def test_sigterm_saves_and_the_resumed_run_is_the_same(data_dir, tmp_path):
    settings = dict(max_steps=400, save_interval=1000, shuffle_seed=1)
    command = [sys.executable, "train.py", *flags(data_dir, tmp_path / "cut", **settings)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    for line in process.stdout:
        if line.startswith("step  10/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    stopped = max(losses(read_log(tmp_path / "cut")))
    assert 10 <= stopped < 400
    for name, resume in (("cut", "auto"), ("whole", "none")):
        words = flags(data_dir, tmp_path / name, resume=resume, **settings)
        assert train_ranks(0, words).returncode == 0
    a, b = losses(read_log(tmp_path / "cut")), losses(read_log(tmp_path / "whole"))
    assert a == b
