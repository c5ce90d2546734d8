"""Saved states come back, damaged folders are skipped, and no older checkpoint is lost."""

import errno
import os
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import saved
import torch
from compare import CPU, small
from conftest import load_checkpoint

import train
from model import build
from run import resume, source
from run.checkpoint import Saver, folders, load_weights
from scale import generators, parallel
from settings import Config
from system.errors import UserError


def save(folder, step, value=0.0, keep_last=3, last=None, **state):
    tensors = {"model": {"w": torch.full((50,), value)}}
    return saved.save(folder, step, tensors, state, keep_last, last)


def start(out_dir, path="none", overwrite=False):
    """A run's start, of any shape."""
    with mock.patch.object(resume, "compare"):
        return resume.find(Config(out_dir=str(out_dir), resume=path, overwrite=overwrite))


def test_keeps_the_last_and_the_best(tmp_path):
    for step, val_loss in enumerate([5.0, 3.0, 4.0, None, 4.5], start=1):
        save(tmp_path, step, keep_last=2, val_loss=val_loss)
    assert [int(p.name[5:]) for p in folders(tmp_path)] == [2, 4, 5]


def test_what_is_saved_behind_later_ones_stays(tmp_path):
    """In a run resumed from step 100, 200 and 300 belong to another attempt and do not count."""
    for last, step in [(None, 100), (100, 200), (200, 300), (100, 110), (110, 120), (120, 130)]:
        save(tmp_path, step, keep_last=2, last=last)
        assert saved.problem(tmp_path / f"step_{step:08d}") is None
    assert [f.name[-3:] for f in sorted(tmp_path.glob("step_*"))] == ["120", "130", "200", "300"]


@pytest.mark.parametrize("harm", ["flip", "no_manifest"])
@pytest.mark.fault(23)
def test_a_damaged_newest_is_passed_over_and_kept(tmp_path, harm, capsys):
    good, bad = save(tmp_path, 1, 1.0), save(tmp_path, 2, 2.0)
    if harm == "flip":
        target = bad / "model.safetensors"
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    else:
        (bad / "manifest.json").unlink()
    assert saved.find(tmp_path) == good
    assert "is damaged" in capsys.readouterr().err and bad.is_dir()
    for folder in (bad, tmp_path / "none"):
        with pytest.raises(saved.Error, match="no whole checkpoint"):
            saved.find(folder)


def state_of(model, step=0):
    """A train.State of a new run after so many steps, without data."""
    loader = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return train.State(model, optimizer, scaler, loader, step, tokens=64 * step)


def drawn():
    """A normal number of each generator.

    NumPy and Python draw two and keep the second for the next call.
    """
    second = np.random.random(), random.random()
    return torch.randn(3).tolist(), np.random.normal(), random.gauss(0, 1), second


def test_random_numbers_of_torch_numpy_and_python_go_on(tmp_path):
    drawn()
    own = generators.states(CPU)
    expected = drawn()
    assert drawn() != expected
    generators.restore(own, CPU)
    assert drawn() == expected


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_goes_on_while_a_copy_is_written(tmp_path, monkeypatch, device):
    """What is saved is what was there when `save` returned."""
    model, go_on, said = build(small(), torch.device(device), seed=1), threading.Event(), []
    before, state = model.wte.weight.detach().cpu().clone(), state_of(model, 1)
    saved.while_writing(before=lambda path: go_on.wait(10), put=monkeypatch.setattr)
    world = parallel.World(0, 1, torch.device(device))
    saver = Saver(world, tmp_path, 2, async_save=True, saved=lambda *what: said.append(what))
    saver.save(state, config={})
    with torch.no_grad():
        model.wte.weight.zero_()
    assert saver.written() == 0 and not said and not folders(tmp_path)
    go_on.set()
    state.step, state.tokens = 2, 128
    saver.save(state, config={})  # waits for the first
    assert [tmp_path / "step_00000001"] == folders(tmp_path) and len(said) == 1
    saver.wait()
    saver.wait()
    tensors, found = load_checkpoint(saved.find(tmp_path / "step_00000001"))
    assert torch.equal(tensors["model"]["wte.weight"], before)
    assert (found["step"], found["tokens"], found["ranks"]) == (1, 64, 1)
    assert not load_checkpoint(saved.find(tmp_path))[0]["model"]["wte.weight"].any()
    assert len(said) == 2


@pytest.mark.fault(24)
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_old_ones(tmp_path, monkeypatch, background):
    """In the background the next call of the saver raises it."""
    good, model = save(tmp_path, 1), build(small(), CPU, seed=1)
    saver = Saver(saved.ONE, tmp_path, 2, background)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    words = "No space left.*earlier checkpoints are intact"
    with monkeypatch.context() as patch:
        saved.while_writing(before=full, put=patch.setattr)
        with pytest.raises(saved.Error, match=words):
            saver.save(state_of(model, 2), config={})
            saver.save(state_of(model, 3), config={})
    assert saved.find(tmp_path) == good and list(tmp_path.iterdir()) == [good]
    saver.save(state_of(model, 3), config={})
    saver.wait()
    assert saved.find(tmp_path).name == "step_00000003"


@pytest.mark.fault(39)
def test_no_pickle_is_ever_read(tmp_path):
    folder, canary = save(tmp_path, 1), tmp_path / "canary"
    (folder / "model.safetensors").write_bytes(saved.trap(canary))
    saved.sign(folder)
    with pytest.raises(saved.Error, match="is damaged"):
        load_checkpoint(folder)
    assert not canary.exists()


def test_weights_of_another_shape_are_named(tmp_path):
    model = build(small(), CPU, seed=0)
    with pytest.raises(saved.Error, match=r"attn.proj.bias: \(32,\), expected \(64,\)"):
        load_weights(build(small(n_embd=64), CPU, 0), dict(model.named_parameters()))
    with pytest.raises(saved.Error, match="blocks.2.*absent"):
        load_weights(build(small(n_layer=3), CPU, 0), dict(model.named_parameters()))


@pytest.mark.fault(53, 66)
def test_only_our_folders_and_files_are_removed(tmp_path):
    """What a user keeps in out_dir stays when checkpoints are pruned and by --overwrite."""
    for name in ("step_notes.md", "step_plans/a", "step_00000003/a", ".writing_plans/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    kept = lambda: {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    users = kept()
    (tmp_path / ".writing_step_00000004").mkdir()  # of a killed write
    for step in (1, 4):
        last = save(tmp_path, step, keep_last=1)
    assert folders(tmp_path) == [last]
    (tmp_path / "log.jsonl").write_text('{"kind": "train"}')
    start(tmp_path, overwrite=True)
    resume.prepare_out_dir(Config(out_dir=str(tmp_path), overwrite=True))
    assert kept() == users | {*map(Path, ["source.json", *source.COPIES])}
    folder = save(tmp_path, 5)
    assert (folder / "model.py").read_bytes() == (tmp_path / "model.py").read_bytes()


@pytest.mark.fault(45, 66)
def test_a_folder_in_use_is_refused_and_left(tmp_path, monkeypatch):
    def refused(*arguments, folder=tmp_path, **options):
        with pytest.raises(UserError, match="out_dir"):
            start(folder, *arguments, **options)

    for name in ("model.py", "config.json", "log.jsonl"):
        (tmp_path / name).write_text("mine")
        refused()
        refused("auto")
        (tmp_path / name).unlink()
    # where a run ended before its first step, as by a mistake in an edit
    (tmp_path / "log.jsonl").write_text('{"kind": "start", "step": 0, "rows": []}\n')
    (tmp_path / "source.json").write_text("{}")
    start(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1}\n')
    refused()
    # torchrun's: what is there, this run has saved
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refused(overwrite=True)
    # killed before its first checkpoint: begins again
    start(tmp_path, "auto")
    assert (tmp_path / "log.jsonl").exists()
    (tmp_path / "log.jsonl").write_text('{"kind": "saved", "step": 1}\n')
    save(tmp_path, 1).rename(tmp_path / "step_00000006.bak")
    refused("auto")
    first, last = save(tmp_path, 1), save(tmp_path, 2)
    for path in ("auto", str(tmp_path)):
        assert start(tmp_path, path).folder == last
    refused(str(first))
    refused(os.path.relpath(first))
    other = tmp_path / "other"
    assert start(other, str(first)).folder == first
    refused(str(save(other, 3)))
    refused(str(first), folder=other)
    best = first.rename(tmp_path / "step_best")
    refused(str(best))
    assert start(tmp_path / "another", str(best)).folder == best


@pytest.mark.fault(90)
def test_a_copied_checkpoint_is_told_and_not_taken(tmp_path, capsys):
    own = save(tmp_path, 4, 1.0)
    copy = shutil.copytree(own, tmp_path / "step_00000099")
    assert saved.find(tmp_path) == own
    assert "is of step 4" in capsys.readouterr().err
    last = save(tmp_path, 99, 3.0, last=4)
    assert saved.find(tmp_path) == last == copy
    [kept] = tmp_path.glob("step_00000099_*")
    assert (kept / "state.json").read_bytes() == (own / "state.json").read_bytes()
