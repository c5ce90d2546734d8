"""The one place in tests that knows the form of a checkpoint: others look into one through it.

    tensors, state = saved.load(saved.find(out_dir))
    tensors["model"]["wte.weight"], saved.first_moments(folder)["wte.weight"], state["step"]

Tests of what a checkpoint promises, and of what a run does with one, hold in any form of it.
"""

import json
from pathlib import Path

import torch

from run import checkpoint, checkpoint_folders, reshard
from run.resume import Start
from run.states import CheckpointError
from scale import parallel
from system import files

Error = CheckpointError  # of a checkpoint that cannot be taken, or written
JSON = ("manifest.json", "state.json", "values.json")  # its files that are no tensors
ANY_VALUES = ("values.json",)  # those of them whose numbers may be any, as of an optimizer
FREE = ("val_loss", "evaluated", "world_size", "loader", "scaler")  # of state.json: the same
SAFETENSORS = ("model", "optimizer", "rng")  # its files of tensors, on one rank
AFRESH = ("rng",)  # those of them without which a run goes on, with a warning
CPU = torch.device("cpu")

find = checkpoint_folders.find  # the newest whole one of a run, or of a path itself
folders = checkpoint_folders.folders  # a run's, oldest first
problem = checkpoint_folders.problem  # what is wrong with one, in words; None if it is whole


def load(folder):
    """({kind: {name: tensor}}, state) of a checkpoint, the rows of all ranks put together.

    Kinds are model, optimizer ("<parameter>.<state>"), buffers, own, and of a rank's own rng.
    """
    tensors, state = reshard.open_merged(folder)
    read = {}
    for kind, stored in tensors.items():
        read[kind] = {name: tensor[...] for name, tensor in stored.items()}
    return read, state


def load_state(folder):
    """What a checkpoint says beside tensors: step, tokens, seconds, config, loader, val_loss."""
    return reshard.read_state_json(folder)


def first_moments(folder):
    """{parameter: first moment} of a checkpoint, AdamW's or Muon's; not 8-bit AdamW's codes."""
    return moments_of(load(folder)[0])


def moments_of(tensors):
    """The same of the tensors that `load` returned."""
    found = {}
    for key, tensor in tensors["optimizer"].items():
        name, _, state = key.rpartition(".")
        if state in ("exp_avg", "momentum"):
            found[name] = tensor
    return found


def parts(folder):
    """{kind: in how many files its tensors are}: one of each rank that holds rows of its own."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        kind = path.name.partition(".")[0]
        found[kind] = found.get(kind, 0) + 1
    return found


# -- written by tests


def save(out_dir, step, tensors, state, keep_last=2):
    """Saves what `load` returned, or as much of it as a test needs; returns the folder."""
    return checkpoint.save(out_dir, step, tensors, state, keep_last)


def save_model(folder, model, cfg, step=0):
    """A checkpoint of weights alone; returns its folder."""
    return save(folder, step, {"model": dict(model.named_parameters())}, {"config": vars(cfg)})


def sign(folder):
    """Makes the digests right, as somebody could who changes files on purpose."""
    manifest = {f.name: files.digest(f) for f in folder.iterdir() if f.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewrite(folder, change):
    """Has change(state) change what `load_state` returns; the checkpoint stays whole."""
    state = load_state(folder)
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    sign(folder)


def saver(world, out_dir, keep_last, async_save=False, saved=lambda *_: None):
    """What saves a run: save(train.State, config=...), written(), wait().

    saved(step, folder) follows each save.
    """
    return checkpoint.Saver(world, out_dir, keep_last, async_save, saved=saved)


def while_writing(before=None, after=None, put=setattr):
    """Has before(path) and after(path) called around the writing of each file of tensors.

    In path stands the step's folder, under whatever name it is written.
    """
    write = checkpoint.save_file

    def around(tensors, path, *more):
        if before:
            before(path)
        write(tensors, path, *more)
        if after:
            after(path)

    put(checkpoint, "save_file", around)


# -- read by runs


def saved_model(path):
    """The SavedModel of a run's folder or a checkpoint."""
    return checkpoint.open_model(path)


def model_of(saved):
    """The GPT of a SavedModel, on the CPU."""
    return checkpoint.model_of(saved, CPU)


def load_model(path):
    """The model of a run's folder or a checkpoint, on the CPU."""
    return model_of(saved_model(path))


def fill(model, tensors):
    """Copies {name: tensor} of a whole model into a model; raises Error where they do not fit."""
    reshard.load_resharded(model, tensors)


def check_reads(check):
    """Has check(shape, dtype, rows) called at each reading of a stored tensor.

    rows: a slice; None for all. Until this process ends.
    """
    read = reshard.MergedTensor.__getitem__

    def checked(stored, rows):
        check(stored.shape, stored.dtype, None if rows is ... else rows)
        return read(stored, rows)

    reshard.MergedTensor.__getitem__ = checked


def start(out_dir, resume="none", overwrite=False):
    """A run's start: `folder` of the checkpoint that it takes, or None; prepare_out_dir()."""
    return Start(out_dir, resume, overwrite)


def resume(folder, state, cfg):
    """Fills a new train.State of one process with all that a run takes from a checkpoint.

    Returns (the start's warnings, the validation loss that was saved).
    """
    began = Start(folder.parent, str(folder), dry_run=True)
    began.check(cfg)
    fill(state.model, began.weights)
    began.restore(state, parallel.World(0, 1, CPU))
    began.rows(cfg, state)  # the schedule, whose values may be others
    return began.warnings, began.state.get("val_loss")


def of_rank(model, rank, device):
    """{name: tensor} of what is a rank's own: random numbers, and fp8's largest magnitudes."""
    own = checkpoint.rank_tensors(model, device)
    return {f"{rank}.{kind}": tensor for kind, tensor in own.items()}


def restore_rank(tensors, model, rank, device):
    """Puts back what `of_rank` gave; whether it held anything of this rank."""
    return checkpoint.load_rank_tensors(tensors, model, rank, device)
