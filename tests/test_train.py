"""train.py run whole: resumed against uninterrupted, and each user error with its code."""

import functools
import itertools
import json
import math
import pathlib
import shlex
import shutil
import time
import urllib.error
import urllib.request

import conftest
import pytest
import saved
import torch
from compare import LLAMA, copied, gpt2, resumed_bitwise
from conftest import (
    ROOT,
    flags,
    load_checkpoint,
    losses,
    read_log,
    stdlib_bytes,
    train_here,
    write_shard,
)

import fineweb
import hellaswag
import model as models
import optim
import train
from configurator import configure
from corpus.loader import DataError
from run import source
from run.build import describe_optimizer
from run.logger import Logger, NotFinite
from scale import parallel
from settings import Config, check
from system.errors import UserError


def test_trains_evaluates_samples_and_saves(data_dir, tmp_path, capsys):
    settings = dict(eval_interval=6, sample_interval=20, sample_prompt="def", lr=5e-3, max_steps=40)
    log = train_here(data_dir, tmp_path / "run", **settings)
    loss, val = losses(log), losses(log, "val")
    assert sorted(loss) == list(range(1, 41)) and sorted(val) == [0, 6, 12, 18, 24, 30, 36, 40]
    assert abs(val[0] - 5.55) < 0.1  # ln 257: nothing is known before the first step
    assert val[40] < 3.6 and loss[40] < 3.7
    samples = [line for line in log if line["kind"] == "sample"]
    assert [s["step"] for s in samples] == [20, 40]
    assert all(text.startswith("def") for text in samples[0]["texts"])
    assert (tmp_path / "run" / "step_00000040").is_dir()
    # what ran, "auto" no longer in it
    found = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [found[name] for name in ("precision", "attention", "ops")] == ["fp32", "flash", "torch"]
    # the device that samples decides
    assert saved.saved_model(tmp_path / "run").shape.attention == "auto"
    text = capsys.readouterr().out
    assert "parameters" in text and "step 40/40 | loss" in text and "--resume=auto" in text
    row = next(line for line in text.splitlines() if line.startswith("settings "))
    own = flags(data_dir, tmp_path / "run", **settings)
    assert row == f"settings     {shlex.join(own)} (config.json has all)"  # one line in a pipe
    recorded = dict(log[0]["rows"])["settings"]
    assert "max_steps=40" in recorded and "n_layer=2" in recorded and "precision" not in recorded


def test_the_summary_says_what_decays_at_which_rate(data_dir, tmp_path):
    """GPT-2 124M's matrices and embeddings, and its vectors; then groups of any optimizer."""
    cfg = configure(Config, [str(ROOT / "config/gpt2_124m.py")])
    words = describe_optimizer(optim.make_optimizer(models.on_meta(cfg), cfg), cfg.lr)
    assert "embedding: 39,419,904 parameters, rate 0.0006, decay 0.1" in words
    assert "vector: 121,344 parameters, rate 0.0006, decay 0;" in words
    weights = [torch.zeros(3, 4, requires_grad=True), torch.zeros(5, requires_grad=True)]
    groups = [dict(params=weights[:1], factor=3.0, weight_decay=0.2), dict(params=weights[1:])]
    words = describe_optimizer(torch.optim.SGD(groups, lr=0.5), 0.5)
    first = "all: 12 parameters, rate 1.5, decay 0.2"
    second = "all: 5 parameters, rate 0.5, decay 0"
    assert words == f"SGD; {first}; {second}; vocabulary padding counted"
    log = train_here(data_dir, tmp_path / "run", max_steps=1)
    rows = dict(log[0]["rows"])
    assert rows["optimizer"].startswith("AdamW, fused; ") and "decay 0.1" in rows["optimizer"]


def test_resumed_equals_uninterrupted_bitwise(data_dir, tmp_path):
    tensors = resumed_bitwise(data_dir, tmp_path, dropout=0.1, shuffle_seed=3)
    assert tensors.keys() == {"model", "optimizer", "rank00000"}


def test_validation_is_the_same_for_any_batch_size(data_dir, tmp_path):
    # 33 rows, which no batch size divides
    settings = dict(eval_interval=6, eval_tokens=1056, max_steps=1)
    runs = [train_here(data_dir, tmp_path / f"{b}", batch_size=b, **settings) for b in (2, 4)]
    assert losses(runs[0], "val")[0] == pytest.approx(losses(runs[1], "val")[0], rel=1e-6)


def test_a_batch_size_that_is_chosen_is_recorded_and_gives_the_same_run(data_dir, tmp_path, capsys):
    """All 16 rows of a step on the CPU; a resumed run may have another one."""
    auto = train_here(data_dir, tmp_path / "a", batch_size="auto", eval_interval=6)
    row = "batch_size 16 (the largest divisor of a rank's 16 rows a step with up to 2,048 tokens"
    assert row in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "a/config.json").read_text())["batch_size"] == 16
    given = train_here(data_dir, tmp_path / "b", batch_size=16, eval_interval=6)
    for kind in ("train", "val"):
        assert losses(auto, kind) == losses(given, kind) != {}
    tensors, state = load_checkpoint(tmp_path / "a/step_00000012")
    torch.testing.assert_close(
        tensors, load_checkpoint(tmp_path / "b/step_00000012")[0], rtol=0, atol=0
    )
    assert state["config"]["batch_size"] == 16
    copied(tmp_path / "a", 8, tmp_path / "c")
    again = train_here(data_dir, tmp_path / "c", batch_size=2, resume="auto", eval_interval=6)
    assert losses(again) == pytest.approx({n: losses(auto)[n] for n in (9, 10, 11, 12)}, rel=1e-5)
    train_here(data_dir, tmp_path / "c", batch_size="auto", resume="auto", dry_run=True)
    cfg = Config(batch_size="auto", block_size=32, batch_tokens=500)
    with pytest.raises(UserError, match="^batch_tokens=500 is not divisible by .* = 64"):
        check(cfg, ranks=2)


def test_overfits_one_batch(data_dir, tmp_path):
    settings = dict(overfit=True, max_steps=150, lr=1e-2, batch_tokens=128, save_interval=0)
    log = train_here(data_dir, tmp_path / "run", **settings)
    assert losses(log)[150] < 0.1 and not list((tmp_path / "run").glob("step_*"))


@pytest.mark.fault(7)
def test_dry_run_writes_nothing_and_compares_the_shards_with_their_digests(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", dry_run=True, eval_interval=6)
    train.main(configure(Config, [str(ROOT / words[0]), *words[1:]]))
    assert not (tmp_path / "run").exists()
    data = shutil.copytree(data_dir, tmp_path / "data")
    shards = [
        dict(name=p.name, tokens=1, bytes=p.stat().st_size, sha256="0" * 64) for p in data.iterdir()
    ]
    manifest = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "shards": shards}
    (data / "manifest.json").write_text(json.dumps(manifest))
    words[1] = f"--data_dir={data}"
    with pytest.raises(DataError, match="is damaged: found SHA-256"):
        train.main(configure(Config, [str(ROOT / words[0]), *words[1:]]))


def test_figures_read_a_step_late_are_the_same(data_dir, tmp_path, monkeypatch):
    """As on CUDA, where a step is launched before the one before is waited for."""
    settings = dict(eval_interval=5, save_interval=4, keep_last=9)
    plain = train_here(data_dir, tmp_path / "a", **settings)
    unread = []

    class Late(train.Logger):
        def _read(self, *launched):
            super()._read(*launched)
            self.late = 1

        def step(self, *launched):
            unread.append(len(self.unread))
            return super().step(*launched)

    monkeypatch.setattr(train, "Logger", Late)
    late = train_here(data_dir, tmp_path / "b", **settings)
    # all are read after steps 1, 4, 5, 8, 10, and 12
    assert unread == [0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1]
    keys = ("kind", "step", "loss", "lr", "norm", "tokens")
    figures = [[{k: line[k] for k in keys if k in line} for line in log] for log in (plain, late)]
    assert figures[0] == figures[1]


def test_llama_trains_compiled_as_eager(data_dir, tmp_path, compiler):
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    settings = dict(
        max_steps=4, save_interval=0, eval_interval=4, n_kv_head=2, qk_norm=True, **LLAMA
    )
    eager = train_here(data_dir, tmp_path / "eager", **settings)
    fused = train_here(data_dir, tmp_path / "fused", **settings, compile=True)
    for kind in ("train", "val"):
        assert losses(fused, kind) == pytest.approx(losses(eager, kind), rel=1e-5)


def test_init_from_starts_at_those_weights(data_dir, tmp_path):
    shape = dict(eval_interval=12, value_embeddings=1)
    first = train_here(data_dir, tmp_path / "a", **shape)
    second = train_here(data_dir, tmp_path / "b", init_from=tmp_path / "a", max_steps=1, **shape)
    assert losses(second, "val")[0] == losses(first, "val")[12]
    padded = dict(vocab_multiple=64, max_steps=1, **shape)
    third = train_here(data_dir, tmp_path / "p", init_from=tmp_path / "a", **padded)
    assert losses(third, "val")[0] == pytest.approx(losses(first, "val")[12], rel=1e-6)
    with pytest.raises(UserError, match="n_embd: checkpoint 64, now 32.*; give the settings of"):
        train_here(data_dir, tmp_path / "c", init_from=tmp_path / "a", n_embd=32)


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
    command = "make the data again with python fineweb.py --tokenizer=bytes"
    with pytest.raises(DataError, match=f"chars was tokenized with .*/a use bytes; {command}"):
        run("chars", "d", init_from=tmp_path / "a")


@pytest.mark.fault(45)
def test_used_folder_is_refused_and_kept(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with pytest.raises(UserError, match="holds an earlier run; try --resume=auto, --overwrite"):
        train_here(data_dir, tmp_path / "run")
    assert sorted(losses(read_log(tmp_path / "run"))) == [1, 2, 3, 4]
    # where a run ended before its first step, as by a mistake in an edit
    (tmp_path / "new").mkdir()
    (tmp_path / "new/log.jsonl").write_text('{"kind": "start", "step": 0, "rows": []}\n')
    for name, settings in dict(new={}, run=dict(overwrite=True)).items():
        assert sorted(losses(train_here(data_dir, tmp_path / name, max_steps=2, **settings))) == [
            1,
            2,
        ]


def test_going_back_in_a_folder_with_later_checkpoints_is_refused(data_dir, tmp_path):
    settings = dict(max_steps=4, save_interval=2, keep_last=9)
    train_here(data_dir, tmp_path / "run", **settings)
    with pytest.raises(UserError, match="holds step_00000004, beyond .*step_00000002"):
        train_here(data_dir, tmp_path / "run", resume=tmp_path / "run/step_00000002", **settings)
    aside = train_here(
        data_dir, tmp_path / "aside", resume=tmp_path / "run/step_00000002", **settings
    )
    assert sorted(losses(aside)) == [3, 4]
    before = sorted(path.name for path in (tmp_path / "aside").iterdir())
    # out_dir is used by another run than the one to be resumed
    for other in ("run/step_00000002", "run"):
        with pytest.raises(UserError, match="out_dir=.*aside holds another run than .*run/step_"):
            train_here(
                data_dir,
                tmp_path / "aside",
                resume=tmp_path / other,
                **{**settings, "max_steps": 6},
            )
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == before
    log = train_here(
        data_dir, tmp_path / "run", resume=tmp_path / "run", **{**settings, "max_steps": 5}
    )
    assert log[-1]["step"] == 5
    best = (tmp_path / "run/step_00000005").rename(tmp_path / "run/step_best")
    settings["max_steps"] = 6
    assert train_here(data_dir, tmp_path / "run", resume=best, **settings)[-1]["step"] == 6


def test_a_resumed_run_counts_tokens_and_names_its_own_checkpoint(data_dir, tmp_path, capsys):
    settings = dict(max_steps=4, save_interval=4, batch_tokens=256)
    train_here(data_dir, tmp_path / "run", **settings)
    settings |= dict(max_steps=6, batch_tokens=512, save_interval=0)
    log = train_here(data_dir, tmp_path / "other", resume=tmp_path / "run", **settings)
    counts = {line["step"]: line["tokens"] for line in log if line["kind"] == "train"}
    assert counts == {5: 4 * 256 + 512, 6: 4 * 256 + 2 * 512}
    assert "steps 4 to 6: 2,048 tokens" in (out := capsys.readouterr().out), out
    assert "--checkpoint=" not in out.rpartition("steps 4 to 6")[2]  # none was saved in out_dir


@pytest.mark.fault(11, 19)
def test_resume_refuses_another_model_and_other_data(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with open(tmp_path / "run" / "log.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # torn, as by a kill: a resumed run's log is readable
    with pytest.raises(saved.Error, match="n_layer: checkpoint 2, now 3; .*n_embd: check"):
        train_here(data_dir, tmp_path / "run", resume="auto", n_layer=3, n_embd=32)
    other = shutil.copytree(data_dir, tmp_path / "data")
    write_shard(other / "py_train_000003.bin", stdlib_bytes(2_000))
    with pytest.raises(DataError):
        train_here(other, tmp_path / "run", resume="auto", max_steps=6)
    log = train_here(other, tmp_path / "run", resume="auto", max_steps=6, allow_data_change=True)
    assert sorted(losses(log)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault(58)
def test_weights_that_are_not_finite_are_neither_saved_nor_resumed_into(data_dir, tmp_path):
    with pytest.raises(NotFinite, match="step 1: weights are inf or NaN and were not saved"):
        train_here(
            data_dir, tmp_path / "run", lr=1e38, weight_decay=10, warmup_steps=0, save_interval=1
        )
    train_here(data_dir, tmp_path / "run", overwrite=True, max_steps=4)
    tensors, state = load_checkpoint(tmp_path / "run" / "step_00000004")
    tensors["model"]["blocks.0.mlp.up.weight"][0, 0] = float("nan")
    saved.save(tmp_path / "run", 4, tensors, state)
    with pytest.raises(saved.Error, match="step_00000004: weights are inf or NaN"):
        train_here(data_dir, tmp_path / "run", resume="auto", max_steps=8)


def poison(monkeypatch, value, *steps):
    """Puts a value into the gradients of these steps, counted over all runs from here on."""
    clip, calls = train.optim.clip_gradients, itertools.count(1)

    def poisoned(model, *more):
        if next(calls) in steps:
            next(model.parameters()).grad[0, 0] = value
        return clip(model, *more)

    monkeypatch.setattr(train.optim, "clip_gradients", poisoned)


@pytest.mark.fault(58)
def test_weights_after_a_gradient_that_is_not_finite_are_not_saved(data_dir, tmp_path, monkeypatch):
    poison(monkeypatch, math.nan, 4)
    with pytest.raises(
        NotFinite, match="step 4: the gradient norm is nan; nothing was saved since step 3"
    ):
        train_here(data_dir, tmp_path / "run", max_steps=8, save_interval=1)
    assert saved.find(tmp_path / "run").name == "step_00000003"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
@pytest.mark.fault(31)
def test_a_step_that_is_not_finite_is_skipped_bitwise(
    data_dir, tmp_path, monkeypatch, capsys, optimizer
):
    settings = dict(
        optimizer=optimizer, max_steps=3, save_interval=1, keep_last=9, max_skipped_steps=1
    )
    poison(monkeypatch, math.inf, 2, 5, 6)
    log = train_here(data_dir, tmp_path / "run", **settings)
    found = [load_checkpoint(tmp_path / f"run/step_{step:08d}")[0] for step in (1, 2, 3)]
    for name in ("model", "optimizer"):
        one, two, three = (tensors[name] for tensors in found)
        assert all(torch.equal(one[k], two[k]) for k in one)
        assert not all(torch.equal(one[k], three[k]) for k in one)
    assert [(line["step"], line["in_all"]) for line in log if line["kind"] == "skipped"] == [(2, 1)]
    assert "step 2 was skipped, the gradient norm is inf; 1 in a row" in capsys.readouterr().out
    with pytest.raises(NotFinite, match="step 6: the gradient norm is inf"):  # its second in a row
        train_here(data_dir, tmp_path / "run", **{**settings, "max_steps": 9}, resume="auto")


@pytest.mark.fault(63)
def test_another_schedule_is_told_on_a_resume(data_dir, tmp_path, capsys):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    train_here(data_dir, tmp_path / "run", max_steps=4, resume="auto")
    assert "\nschedule" not in capsys.readouterr().out
    log = train_here(data_dir, tmp_path / "run", max_steps=6, lr=2e-3, resume="auto")
    rate = next(line["lr"] for line in log if line["step"] == 5)
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("schedule ")]
    assert "max_steps 4 to 6, lr 0.001 to 0.002" in row and row.endswith(
        f"is {rate:.3g} instead of 0.0001"
    )


@pytest.mark.fault(105)
def test_other_settings_that_decide_what_is_trained_are_told_on_a_resume(
    data_dir, tmp_path, capsys
):
    train_here(data_dir, tmp_path / "run", max_steps=2)
    train_here(data_dir, tmp_path / "run", max_steps=2, resume="auto")
    assert "\nchanged" not in capsys.readouterr().out
    other = dict(seed=2, weight_decay=0.2, clip=None, beta2=0.9, dropout=0.1)
    train_here(data_dir, tmp_path / "run", max_steps=2, resume="auto", **other)
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")]
    was = (
        "seed 1337 to 2, dropout 0.0 to 0.1, weight_decay 0.1 to 0.2, beta2 0.95 "
        "to 0.9, clip 1.0 to None"
    )
    assert was in row


@pytest.mark.fault(96)
def test_a_log_that_is_a_link_is_not_followed(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=2)
    outside, log = tmp_path / "outside", tmp_path / "run/log.jsonl"
    outside.write_text('{"kind": "train"}\nkept, without an end of the line')
    log.unlink()
    log.symlink_to(outside)
    with pytest.raises(UserError, match="log.jsonl is a link, or no file"):
        train_here(data_dir, tmp_path / "run", max_steps=3, resume="auto")
    logger = Logger(parallel.World(0, 1, torch.device("cpu")), Config(max_steps=1), 0)
    with pytest.raises(UserError, match="log.jsonl: Too many levels of symbolic links"):
        logger.open(tmp_path / "run", {})
    train_here(data_dir, tmp_path / "run", max_steps=2, overwrite=True)
    assert outside.read_text().endswith("of the line") and not log.is_symlink()


@pytest.mark.fault(61)
def test_a_folder_that_cannot_be_cleared_is_one_line(data_dir, tmp_path, monkeypatch):
    train_here(data_dir, tmp_path / "run", max_steps=1, save_interval=0)

    def read_only(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "unlink", read_only)
    with pytest.raises(UserError, match="out_dir=.*run: log.jsonl: Permission denied; try another"):
        train_here(data_dir, tmp_path / "run", overwrite=True)


def test_hellaswag_in_the_loop_and_without_its_file(data_dir, tmp_path, monkeypatch, capsys):
    path = tmp_path / "hellaswag.jsonl"
    example = {"ctx": "A man", "endings": [" runs", " eats", " sits", " falls"], "label": 2}
    path.write_text((json.dumps(example) + "\n") * 3)
    log = train_here(
        data_dir, tmp_path / "a", max_steps=2, hellaswag_interval=2, hellaswag_file=path
    )
    assert [line["n"] for line in log if line["kind"] == "hellaswag"] == [3, 3]
    with pytest.raises(UserError, match="none: No such file or directory"):
        train_here(data_dir, tmp_path / "b", hellaswag_interval=2, hellaswag_file=tmp_path / "none")

    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(
        hellaswag, "download", functools.partial(hellaswag.download, tmp_path / "cache")
    )
    log = train_here(data_dir, tmp_path / "b", max_steps=2, hellaswag_interval=2)
    assert sorted(losses(log)) == [1, 2] and "no HellaSwag in this run" in capsys.readouterr().out


@pytest.mark.fault(34)
def test_wandb_offline_resumes_the_same_run(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_here(data_dir, tmp_path / "run", wandb=True, max_steps=4)
    train_here(data_dir, tmp_path / "run", wandb=True, max_steps=6, resume="auto")
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 2
    states = [tmp_path / f"run/step_{step:08d}/state.json" for step in (4, 6)]
    first, resumed = (json.loads(state.read_text())["wandb_id"] for state in states)
    assert first is not None and first == resumed


@pytest.mark.parametrize("settings, message", [
    (dict(batch_tokens=1000), "1000 is not divisible .* = 128; try 1024"),
    (dict(n_head=5, lr=-1), "n_embd=64 must be divisible by n_head=5; lr=-1.0 must be at least 0"),
    (dict(precision="tf32"), "precision=tf32 needs a CUDA device"),
    (dict(device="meta"), "device=meta: expected auto, cpu, cuda"),
    (dict(device="cuda:99"), "device=cuda:99 is not there"),
    (dict(shuffle_seed=-1, seed=-3), "seed=-3 must be at least 0; shuffle_seed=-1 must"),
    (dict(lr=float("nan")), "lr=nan is not a float"),
    gpt2(dict(tokenizer="gpt2", sample_interval=2),
     "tokenizer=gpt2 has 50,257 ids, the model 257; give"),
    (dict(resume="auto", overwrite=True), "overwrite=True does not go with resume=auto"),
    (dict(resume="out/none/step_00000001"), "is damaged|no whole checkpoint"),
    (dict(batch_tokens=262_144), "262,?144"),
    (dict(data_dir="no/such"), "no/such"),
])  # fmt: skip
@pytest.mark.fault(9, 10, 12, 13, 18)
def test_user_errors(data_dir, tmp_path, settings, message):
    with pytest.raises(UserError, match=message) as error:
        train_here(settings.pop("data_dir", data_dir), tmp_path / "run", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(46)
def test_an_out_dir_that_cannot_be_is_refused(data_dir, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(UserError, match="out_dir=.*file.*try another --out_dir"):
            train_here(data_dir, out)


def test_a_run_that_is_beyond_max_steps_is_refused_and_tried_out_for_two(
    data_dir, tmp_path, capsys
):
    train_here(data_dir, tmp_path / "run", max_steps=4)
    with pytest.raises(UserError, match="step_00000004 is beyond max_steps=2"):
        train_here(data_dir, tmp_path / "run", max_steps=2, resume="auto")
    log = train_here(data_dir, tmp_path / "run", max_steps=8, resume="auto", dry_run=True)
    assert max(losses(log)) == 4 and "step 6/6 |" in capsys.readouterr().out


def test_a_run_of_before_some_settings_went_is_resumed_and_loaded(data_dir, tmp_path):
    train_here(data_dir, tmp_path / "run", max_steps=4, save_interval=4)
    tensors, state = load_checkpoint(tmp_path / "run" / "step_00000004")
    state["config"] |= {"z_loss": 1e-4, "wandb_project": "as it was"}
    saved.save(tmp_path / "run", 4, tensors, state)
    log = train_here(data_dir, tmp_path / "run", max_steps=6, resume="auto")
    assert sorted(losses(log)) == [1, 2, 3, 4, 5, 6]
    assert conftest.load_model(tmp_path / "run" / "step_00000004").cfg.n_embd == 64


def test_a_run_keeps_its_code_and_a_resumed_one_says_what_differs(
    data_dir, tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("run.source.BEGAN", source.BEGAN | {"model.py": "0" * 64})
        train_here(data_dir, run, max_steps=2)
    capsys.readouterr()
    train_here(data_dir, run, max_steps=4, resume="auto")
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
    ]
    assert len(warnings) == 1 and f"{run}/step_00000002" in warnings[0]
    for folder in (run, run / "step_00000002"):
        assert (folder / "model.py").read_text() == (ROOT / "model.py").read_text()
    train_here(data_dir, run, max_steps=6, resume="auto")
    assert "warning" not in "".join(capsys.readouterr())


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
