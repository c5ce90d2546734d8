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

import convert
import train
from configurator import UserError, configure
from loader import DataError
from model import build


def weights(out_dir, step):
    return train.checkpoint.load(out_dir / f"step_{step:08d}")[0]["model"]


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
        (2, dict(parallel="fsdp", unit_mib=None)),
        (
            2,
            dict(
                parallel="zero2", unit_mib=None, mlp="swiglu", norm="rmsnorm", positions="rope", n_kv_head=2, bias=False
            ),
        ),
        (2, dict(parallel="fsdp", context_parallel=2, tie_embeddings=False, remat="block", compile=True)),
        (4, dict(parallel="hsdp", shard_size=2, unit_mib=1, n_layer=12)),  # units of ten and two
        (2, dict(context_parallel=2, remat="attention", remat_tile=6, remat_offload=True)),
        (2, dict(parallel="fsdp", unit_mib=None, offload_states=True)),
        (4, dict(context_parallel=2, parallel="fsdp", mlp="swiglu", positions="rope", n_kv_head=1, remat="selective")),
    ],
)
def test_any_mode_equals_one_process_and_resumes_across(data_dir, tmp_path, ranks, settings):
    """As for DDP; what sharded ranks saved goes on in one process, and the other way round, sampling included."""
    modes = ("parallel", "shard_size", "context_parallel", "remat", "remat_tile", "remat_offload")
    modes += ("compile", "offload_states", "unit_mib")
    shape = {k: v for k, v in settings.items() if k not in modes}
    rows = 1 if settings.get("compile") else 2
    common = dict(eval_interval=6, save_interval=6, keep_last=9, batch_size=rows, sample_interval=6, sample_tokens=4)
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


SHARDED = dict(eval_interval=6, save_interval=4, keep_last=9, batch_size=2)  # and dropout off: ranks draw their own


@pytest.fixture(scope="module")
def sharded(data_dir, tmp_path_factory):
    """The folder of 12 steps on two FSDP ranks, saved by each rank after steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    result = train_ranks(2, flags(data_dir, folder, parallel="fsdp", **SHARDED))
    assert result.returncode == 0, result.stderr
    return folder


def copied(run, step, to):
    shutil.copytree(run / f"step_{step:08d}", to / f"step_{step:08d}")
    return to


def same_checkpoint(one, other, step):
    """Asserts that two runs saved the same numbers after a step, in whatever files."""
    (a, x), (b, y) = (train.checkpoint.load(train.checkpoint.find(run / f"step_{step:08d}")) for run in (one, other))
    assert a.keys() == b.keys() and x["loader"] == y["loader"]
    for group in a:
        assert a[group].keys() == b[group].keys() and all(torch.equal(a[group][k], b[group][k]) for k in a[group])


def driver(tmp_path, patch):
    """train.py as a script with `patch` carried out first; an error's text goes to error_<rank>, too."""
    path = tmp_path / "driver.py"
    path.write_text(f"""
import errno, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import checkpoint, configurator, train
rank = int(os.environ["RANK"])
{patch}
def main(cfg):
    try:
        train.main(cfg)
    except configurator.UserError as error:
        open({str(tmp_path)!r} + f"/error_{{rank}}", "w").write(str(error))
        raise
configurator.run(main, train.Config)
""")
    return path


# fails where a rank reads more than its part of a tensor; of a file's 257 rows the first of two ranks needs 192, since
# the model's are padded to 384
NO_MORE_THAN_ITS_PART = """
read = checkpoint.Stored.__getitem__
def checked(stored, rows):
    ranks = int(os.environ["WORLD_SIZE"])
    if len(stored.shape) and "float" in str(stored.dtype):
        assert rows is not ... and rows.stop - rows.start <= -(-stored.shape[0] // ranks) * 1.5, (stored.shape, rows)
    return read(stored, rows)
checkpoint.Stored.__getitem__ = checked
"""


@pytest.mark.slow
def test_sharded_and_in_the_background_as_one_process(data_dir, tmp_path, sharded):
    one = tmp_path / "one"
    train_here(data_dir, one, **SHARDED, async_save=True)
    same_run(one, sharded, rel=4e-6)
    files = {f"{kind}.rank0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in (0, 1)}
    assert {p.name for p in (sharded / "step_00000008").glob("*.safetensors")} == files | {"rng.safetensors"}
    result = train_ranks(2, flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=True, **SHARDED))
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("saved")] == [
        f"saved {tmp_path / 'run'}/step_{step:08d}" for step in (4, 8, 12)
    ]
    for step in (4, 8, 12):
        same_checkpoint(sharded, tmp_path / "run", step)


@pytest.mark.slow
def test_resharded_from_two_ranks_to_one_to_four(data_dir, tmp_path, sharded):
    """Losses go on as uninterrupted; no rank reads more than it holds, though the tensors were cut otherwise."""
    expected, settings = read_log(sharded), dict(SHARDED, resume="auto")
    here = train_here(data_dir, copied(sharded, 4, tmp_path / "1"), **settings)
    script = driver(tmp_path, NO_MORE_THAN_ITS_PART)
    words = flags(data_dir, copied(tmp_path / "1", 8, tmp_path / "4"), parallel="fsdp", **settings)
    result = train_ranks(4, words, script=script)
    assert result.returncode == 0, result.stderr
    words = flags(data_dir, copied(sharded, 8, tmp_path / "24"), parallel="hsdp", shard_size=2, **settings)
    result = train_ranks(4, words)
    assert result.returncode == 0, result.stderr
    for log, steps in ((here, range(5, 13)), *((read_log(tmp_path / n), range(9, 13)) for n in ("4", "24"))):
        assert sorted(losses(log)) == list(steps)
        for step in steps:
            assert losses(log)[step] == pytest.approx(losses(expected)[step], rel=4e-6)


@pytest.mark.slow
def test_merged_goes_on_exactly_as_sharded_and_exports_the_same(data_dir, tmp_path, sharded):
    merged, part = tmp_path / "merged", sharded / "step_00000004"
    convert.main(convert.Config(checkpoint=str(part), out=str(merged)))
    names = {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "manifest.json"}
    assert {p.name for p in (merged / "step_00000004").iterdir()} == names
    same_checkpoint(sharded, merged, 4)
    models = [train.checkpoint.load_model(folder, "cpu")[0] for folder in (part, merged)]
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models)))
    for name, source in (("a", part), ("b", merged)):
        convert.main(convert.Config(checkpoint=str(source), to_hf=str(tmp_path / name)))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    result = train_ranks(2, flags(data_dir, merged, parallel="fsdp", resume="auto", **SHARDED))
    assert result.returncode == 0, result.stderr
    same_checkpoint(sharded, merged, 12)
    for kind in ("train", "val"):
        expected = losses(read_log(sharded), kind)
        assert all(loss == expected[step] for step, loss in losses(read_log(merged), kind).items())


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_disk_full_on_one_rank_ends_all_with_the_same_line(data_dir, tmp_path, async_save):
    full = """
save_file = checkpoint.save_file
def full(tensors, path, header):
    if rank == 1 and "step_00000008" in str(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    save_file(tensors, path, header)
checkpoint.save_file = full
"""
    words = flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=async_save, **SHARDED)
    began = time.time()
    result = train_ranks(2, words, script=driver(tmp_path, full))
    assert result.returncode != 0 and time.time() - began < 60
    assert result.stderr.count("error: ") == 1 and "exitcode  : 4" in result.stderr
    errors = [(tmp_path / f"error_{rank}").read_text() for rank in (0, 1)]
    assert errors[0] == errors[1] and "rank 1: [Errno 28] No space left" in errors[0] and "\n" not in errors[0]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["step_00000004"]
    assert train.checkpoint.find(tmp_path / "run").name == "step_00000004"


@pytest.mark.slow
def test_kill_of_one_rank_while_it_writes(data_dir, tmp_path, sharded):
    kill = """
save_file = checkpoint.save_file
def killed(tensors, path, header):
    save_file(tensors, path, header)
    if rank == 1 and "step_00000008" in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_file = killed
"""
    words = flags(data_dir, tmp_path / "run", parallel="fsdp", async_save=True, **SHARDED)
    assert train_ranks(2, words, script=driver(tmp_path, kill)).returncode != 0
    assert train.checkpoint.find(tmp_path / "run").name == "step_00000004"
    again = train_here(data_dir, tmp_path / "run", resume="auto", **SHARDED)
    assert losses(again)[12] == pytest.approx(losses(read_log(sharded))[12], rel=4e-6)
    assert not list((tmp_path / "run").glob(".writing_*"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_hugging_face_weights_straight_into_shards(data_dir, tmp_path, family):
    """q, k and v, gate and up lie in one tensor of ours, GPT-2's are transposed, 257 rows of embedding are 384 here."""
    shape = dict(norm="rmsnorm", positions="rope", mlp="swiglu", n_kv_head=2, bias=False, n_hidden=96)
    shape = dict(tie_embeddings=False, **(shape if family == "llama" else {}))
    cfg = configure(train.Config, [str(ROOT / "config/test.py"), *flags("", "", **shape)[1:]])
    convert.save_hf(build(cfg, torch.device("cpu"), seed=5), tmp_path / "hf")
    settings = dict(init_from=f"hf:{tmp_path / 'hf'}", eval_interval=2, max_steps=2, batch_size=2, **shape)
    one = train_here(data_dir, tmp_path / "one", **settings)
    words = flags(data_dir, tmp_path / "two", parallel="fsdp", **settings)
    result = train_ranks(2, words, script=driver(tmp_path, NO_MORE_THAN_ITS_PART))
    assert result.returncode == 0, result.stderr
    two = read_log(tmp_path / "two")
    for kind in ("train", "val"):
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=4e-6)
    model, _ = convert.load_hf(tmp_path / "hf")
    untrained = build(cfg, torch.device("cpu"), seed=cfg.seed)
    for name, param in (("wte", model.wte), ("head", model.head)):  # two steps of 5e-4 from where it began
        found = weights(tmp_path / "two", 2)[f"{name}.weight"]
        begun = torch.cat([param.weight[:257], getattr(untrained, name).weight[257:]])
        assert (found - begun).abs().max() < 5e-3


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


def test_going_back_in_a_folder_with_later_checkpoints_is_refused(data_dir, tmp_path):
    settings = dict(max_steps=4, save_interval=2, keep_last=9)
    train_here(data_dir, tmp_path / "run", **settings)
    with pytest.raises(UserError, match="holds step_00000004, beyond .*step_00000002.*another --out_dir"):
        train_here(data_dir, tmp_path / "run", resume=tmp_path / "run/step_00000002", **settings)
    aside = train_here(data_dir, tmp_path / "aside", resume=tmp_path / "run/step_00000002", **settings)
    assert sorted(losses(aside)) == [3, 4]
    assert (
        train_here(data_dir, tmp_path / "run", resume=tmp_path / "run", **{**settings, "max_steps": 5})[-1]["step"] == 5
    )


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


def test_weights_after_a_gradient_that_is_not_finite_are_not_saved(data_dir, tmp_path, monkeypatch):
    clip, calls = train.parallel.clip_gradients, []

    def poisoned(model, limit):
        calls.append(model)
        if len(calls) == 4:
            next(model.parameters()).grad[0, 0] = float("nan")
        return clip(model, limit)

    monkeypatch.setattr(train.parallel, "clip_gradients", poisoned)
    with pytest.raises(train.NotFinite, match="step 4: the gradient norm is nan; nothing was saved since step 3"):
        train_here(data_dir, tmp_path / "run", max_steps=8, save_interval=1)
    assert train.checkpoint.find(tmp_path / "run").name == "step_00000003"


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
        (
            dict(softcap=-3, cooldown_fraction=-1),
            "softcap=-3.0 must be over 0.*cooldown_fraction=-1.0 must be at least 0",
        ),
        (dict(precision="tf32"), "precision=tf32 needs a CUDA device"),
        (dict(device="gpu"), "device=gpu: expected auto, cpu, cuda"),
        (dict(device="meta"), "device=meta: expected auto, cpu, cuda"),
        (dict(device="cuda:99"), r"device=cuda:99: \d+ of that kind found"),
        (
            dict(shuffle_seed=-1, top_k=0, seed=-3),
            "top_k=0 must be at least 1; seed=-3 must be at least 0; shuffle_seed=-1 must",
        ),
        (dict(lr=float("nan"), adam_eps=0), "lr=nan must be at least 0; adam_eps=0.0 must be over 0"),
        (dict(n_kv_head=-1, n_hidden=-5), "n_kv_head=-1 must be at least 1; n_hidden=-5 must be at least 1"),
        (dict(tokenizer="gpt2", sample_interval=2), "tokenizer=gpt2 has 50,257 ids, the model 257; give the one"),
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


def test_an_out_dir_that_cannot_be_is_refused(data_dir, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(UserError, match="out_dir=.*file.*try another --out_dir"):
            train_here(data_dir, out)


def test_a_run_that_is_beyond_max_steps_is_refused_and_tried_out_for_two(data_dir, tmp_path, capsys):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with pytest.raises(UserError, match="step_00000004 is beyond max_steps=2"):
        train_here(data_dir, tmp_path / "run", max_steps=2, resume="auto")
    log = train_here(data_dir, tmp_path / "run", max_steps=8, resume="auto", dry_run=True)
    assert max(losses(log)) == 4 and "step 6/6 |" in capsys.readouterr().out


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
