"""train.py run whole: resumed against uninterrupted, and each user error with its code."""

import functools
import itertools
import json
import math
import shutil

import pytest
import saved
import torch
from compare import LLAMA, copied, gpt2, resumed_bitwise
from conftest import (
    ROOT,
    flags,
    load_checkpoint,
    losses,
    stdlib_bytes,
    train_here,
    write_manifest,
    write_shard,
)
from test_fineweb import refused

import fineweb
import train
from configurator import configure
from corpus.loader import DataError
from run import source
from run.checkpoint import open_model
from run.logger import NotFinite
from settings import Config
from system.errors import UserError


def test_trains_evaluates_samples_and_saves(data_dir, tmp_path):
    settings = dict(eval_interval=6, sample_interval=20, sample_prompt="def", lr=5e-3, max_steps=40)
    log = train_here(data_dir, tmp_path / "run", **settings)
    loss, val = losses(log), losses(log, "val")
    assert sorted(loss) == list(range(1, 41)) and sorted(val) == [0, 6, 12, 18, 24, 30, 36, 40]
    assert abs(val[0] - 5.55) < 0.1  # ln 257: nothing is known before the first step
    assert val[40] < 3.6 and loss[40] < 3.7
    samples = [line for line in log if line["kind"] == "sample"]
    assert [s["step"] for s in samples] == [20, 40]
    assert all(text.startswith("def") for text in samples[0]["texts"])
    # what ran, "auto" no longer in it
    found = json.loads((tmp_path / "run/step_00000040/state.json").read_text())["config"]
    assert [found[name] for name in ("precision", "attention", "ops")] == ["fp32", "flash", "torch"]
    # the device that samples decides
    assert open_model(tmp_path / "run").shape.attention == "auto"


def test_resumed_equals_uninterrupted_bitwise(data_dir, tmp_path):
    tensors = resumed_bitwise(data_dir, tmp_path, dropout=0.1, shuffle_seed=3)
    assert tensors.keys() == {"model", "optimizer", "rank"}


def test_another_batch_size_gives_the_same_run(data_dir, tmp_path):
    """Also a resumed one; the validation has 33 rows, which no batch size divides."""
    settings = dict(eval_interval=6, eval_tokens=1056, keep_last=9)
    whole = train_here(data_dir, tmp_path / "a", batch_size=16, **settings)
    copied(tmp_path / "a", 4, tmp_path / "b")
    again = train_here(data_dir, tmp_path / "b", batch_size=2, resume="auto", **settings)
    for kind, steps in dict(train=range(5, 13), val=(6, 12)).items():
        expected = {step: losses(whole, kind)[step] for step in steps}
        assert losses(again, kind) == pytest.approx(expected, rel=1e-5)


def test_overfits_one_batch(data_dir, tmp_path):
    settings = dict(overfit=True, max_steps=80, lr=1e-2, batch_tokens=128, save_interval=0)
    log = train_here(data_dir, tmp_path / "run", **settings)
    assert losses(log)[80] < 0.1 and not list((tmp_path / "run").glob("step_*"))


@pytest.mark.fault(7)
def test_dry_run_writes_nothing_and_compares_the_shards_with_their_digests(data_dir, tmp_path):
    settings = dict(dry_run=True, eval_interval=6)
    words = flags(data_dir, tmp_path / "run", **settings)
    train.main(configure(Config, [str(ROOT / words[0]), *words[1:]]))
    assert not (tmp_path / "run").exists()
    data = shutil.copytree(data_dir, tmp_path / "data")
    write_manifest(sorted(data.iterdir()))
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["shards"][0]["sha256"] = "0" * 64
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is damaged"):
        train_here(data, tmp_path / "run", **settings)


def test_figures_read_a_step_late_are_the_same(data_dir, tmp_path, monkeypatch):
    """As on CUDA, where a step is launched before the one before is waited for."""
    settings = dict(eval_interval=5, save_interval=4, keep_last=9)
    plain = train_here(data_dir, tmp_path / "a", **settings)
    unread = []

    class Late(train.Logger):
        def _read(self):
            found = self.unread is not None
            super()._read()
            self.late = max(self.late, found)

        def step(self, *launched):
            unread.append(self.unread is not None)
            return super().step(*launched)

    monkeypatch.setattr(train, "Logger", Late)
    late = train_here(data_dir, tmp_path / "b", **settings)
    # all are read after steps 1, 4, 5, 8, 10, and 12
    assert unread == [0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1]
    keys = ("kind", "step", "loss", "lr", "norm", "tokens")
    figures = [[{k: line[k] for k in keys if k in line} for line in log] for log in (plain, late)]
    assert figures[0] == figures[1]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_llama_trains_compiled_as_eager(data_dir, tmp_path):
    settings = dict(max_steps=4, save_interval=0, eval_interval=4, n_kv_head=2, qk_norm=True)
    eager = train_here(data_dir, tmp_path / "eager", **settings, **LLAMA)
    fused = train_here(data_dir, tmp_path / "fused", **settings, **LLAMA, compile=True)
    for kind in ("train", "val"):
        assert losses(fused, kind) == pytest.approx(losses(eager, kind), rel=1e-5)


def test_init_from_starts_at_those_weights(data_dir, tmp_path):
    shape = dict(eval_interval=12, value_embeddings=1)
    first = train_here(data_dir, tmp_path / "a", **shape)
    shape |= dict(init_from=tmp_path / "a", max_steps=1)
    second = train_here(data_dir, tmp_path / "b", **shape)
    assert losses(second, "val")[0] == losses(first, "val")[12]
    third = train_here(data_dir, tmp_path / "p", vocab_multiple=64, **shape)
    assert losses(third, "val")[0] == pytest.approx(losses(first, "val")[12], rel=1e-6)
    with pytest.raises(UserError, match="n_embd"):
        train_here(data_dir, tmp_path / "c", n_embd=32, **shape)


def test_weights_of_another_tokenizer_than_the_data_are_refused(tmp_path):
    """But a copy of the tokenizer that a checkpoint carries has the data's bytes."""
    for tokenizer in ("bytes", "chars"):
        source = dict(dataset=str(ROOT / "run/*.py"), out_dir=str(tmp_path / tokenizer))
        fineweb.main(fineweb.Config(tokenizer=tokenizer, shuffle_seed=1, **source))

    def run(data, out, **settings):
        settings |= dict(max_steps=1, tokenizer=None)
        train_here(tmp_path / data, tmp_path / out, **settings)

    run("bytes", "a")
    run("chars", "b")
    run("chars", "c", init_from=tmp_path / "b")
    command = "leave .*, or make the data again with python fineweb.py --tokenizer=bytes"
    with pytest.raises(DataError, match=f"chars was tokenized with .*/a use bytes; {command}"):
        run("chars", "d", init_from=tmp_path / "a")


@pytest.mark.fault(45)
def test_overwrite_begins_again(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    log = train_here(data_dir, tmp_path / "run", max_steps=2, overwrite=True)
    assert sorted(losses(log)) == [1, 2]


@pytest.mark.fault(11)
def test_resume_refuses_another_model_and_other_data(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # torn, as by a kill: a resumed run's log is readable
    with pytest.raises(saved.Error, match="n_layer: checkpoint 2, now 3; .*n_embd: check"):
        train_here(data_dir, tmp_path / "run", resume="auto", n_layer=3, n_embd=32)
    other = shutil.copytree(data_dir, tmp_path / "data")
    write_shard(other / "py_train_000003.bin", stdlib_bytes(2_000))
    with pytest.raises(DataError, match=f"the checkpoint's data was {data_dir}$"):
        train_here(other, tmp_path / "run", resume="auto", max_steps=6)
    log = train_here(other, tmp_path / "run", resume="auto", max_steps=6, allow_data_change=True)
    assert sorted(losses(log)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault(58)
def test_weights_that_are_not_finite_are_not_saved(data_dir, tmp_path):
    absurd = dict(lr=1e38, weight_decay=10, warmup_steps=0, save_interval=1)
    with pytest.raises(NotFinite, match="not saved"):
        train_here(data_dir, tmp_path / "run", **absurd)


def poison(monkeypatch, value, *steps):
    """Puts a value into the gradients of these steps, counted over all runs from here on."""
    clip, calls = train.optim.clip_gradients, itertools.count(1)

    def poisoned(model, *more):
        if next(calls) in steps:
            next(model.parameters()).grad[0, 0] = value
        return clip(model, *more)

    monkeypatch.setattr(train.optim, "clip_gradients", poisoned)


@pytest.mark.fault(31)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_step_that_is_not_finite_is_skipped_bitwise(data_dir, tmp_path, monkeypatch, optimizer):
    settings = dict(optimizer=optimizer, save_interval=1, keep_last=9, max_skipped_steps=1)
    poison(monkeypatch, math.inf, 2, 5, 6)
    log = train_here(data_dir, tmp_path / "run", max_steps=3, **settings)
    found = [load_checkpoint(tmp_path / f"run/step_{step:08d}")[0] for step in (1, 2, 3)]
    for name in ("model", "optimizer"):
        one, two, three = (tensors[name] for tensors in found)
        assert all(torch.equal(one[k], two[k]) for k in one)
        assert not all(torch.equal(one[k], three[k]) for k in one)
    assert [line["step"] for line in log if line["kind"] == "skipped"] == [2]
    # inf is null
    norms = {line["step"]: line["norm"] for line in log if line["kind"] == "train"}
    assert norms[2] is None and norms[1] and norms[3]
    with pytest.raises(NotFinite, match="step 6"):  # its second in a row
        train_here(data_dir, tmp_path / "run", max_steps=9, resume="auto", **settings)


@pytest.mark.fault(105)
def test_a_resume_with_other_settings_or_code_is_told(data_dir, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("run.source.BEGAN", source.BEGAN | {"model.py": "0" * 64})
        train_here(data_dir, run, max_steps=4)
    for folder in (run, run / "step_00000004"):
        assert (folder / "model.py").read_text() == (ROOT / "model.py").read_text()
    capsys.readouterr()
    train_here(data_dir, run, max_steps=6, resume="auto")
    out, err = capsys.readouterr()
    assert "\nchanged      max_steps 4 to 6, since" in out and err.count("warning: ") == 1
    other = dict(seed=2, weight_decay=0.2, clip=None, beta2=0.9, dropout=0.1)
    train_here(data_dir, run, max_steps=6, resume="auto", **other)
    out, err = capsys.readouterr()
    [row] = [line for line in out.splitlines() if line.startswith("changed ")]
    assert all(name in row for name in other) and "warning" not in out + err
    assert max(losses(train_here(data_dir, run, max_steps=8, resume="auto", dry_run=True))) == 6


@pytest.mark.parametrize("settings, message", [
    (dict(n_layer=0, lr=-1), "n_layer=0 .*; lr=-1.0"),
    (dict(device="meta"), "device=meta"),
    (dict(device="cuda:1"), "device=cuda:1"),
    (dict(shuffle_seed=-1), "shuffle_seed=-1"),
    (dict(batch_size="auto"), "batch_size=auto"),
    gpt2(dict(tokenizer="gpt2", sample_interval=2), "50,257"),
    (dict(resume="auto", overwrite=True), "overwrite=True"),
    (dict(resume="out/none/step_00000001"), "no whole checkpoint"),
    (dict(batch_tokens=262_144), "262,?144"),
    (dict(data_dir="no/such"), "no/such"),
    (dict(out_dir=__file__), "out_dir"),
])  # fmt: skip
def test_user_errors(data_dir, tmp_path, settings, message):
    own = dict(data_dir=data_dir, out_dir=tmp_path / "run") | settings
    refused(UserError, message, train_here, own.pop("data_dir"), own.pop("out_dir"), **own)
    assert not (tmp_path / "run/log.jsonl").exists()


@pytest.mark.gpu
def test_fp16_skips_steps_whose_gradients_overflow(data_dir, tmp_path, monkeypatch):
    """The scale is halved from 2**40 until gradients are finite; skipped steps change no weight."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    settings = dict(
        device="cuda", precision="fp16", max_steps=60, save_interval=30, warmup_steps=0, lr=3e-3
    )
    settings |= dict(overfit=True, ops="torch")  # the same batch in each step
    log = train_here(data_dir, tmp_path / "run", **settings)
    found = losses(log)
    # inf or NaN
    skipped = [line["step"] for line in log if line["kind"] == "train" and line["norm"] is None]
    assert skipped[:5] == [1, 2, 3, 4, 5] and len(skipped) < 30 and 60 not in skipped
    # a skipped step leaves the weights, so that the next loss is the same
    for step in range(1, 60):
        assert (found[step + 1] == pytest.approx(found[step], rel=1e-6)) == (step in skipped)
    assert found[60] < found[1] - 0.2
    resumed = copied(tmp_path / "run", 30, tmp_path / "resumed")
    resumed = losses(train_here(data_dir, resumed, **settings, resume="auto"))
    assert {step: found[step] for step in range(31, 61)} == pytest.approx(resumed, rel=1e-2)
