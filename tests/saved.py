"""Checkpoints as tests write them and look into them.

tensors, state = saved.load(saved.find(out_dir))
tensors["model"]["wte.weight"], saved.first_moments(folder)["wte.weight"], state["step"]
"""

import json
import os
import pickle
from pathlib import Path

import torch

from run import checkpoint, pack
from scale import parallel
from system import files

Error = pack.CheckpointError  # of a checkpoint that cannot be taken, or written
CPU = torch.device("cpu")
ONE = parallel.World(0, 1, CPU)


def find(path):
    """The newest whole checkpoint of a run, or of a path itself."""
    return checkpoint.open_whole(path)[0]


def problem(folder):
    """What is wrong with a checkpoint, in words; None if it is whole."""
    try:
        checkpoint.verified(folder)
    except Error as error:
        return str(error)


def load(folder):
    """({kind: {name: tensor}}, state) of a checkpoint, the rows of all ranks put together.

    Kinds are model, optimizer ("0/states/<parameter>/<state>"), own, rank.
    """
    tensors, state, _ = checkpoint.verified(Path(folder))
    read = {}
    for kind, stored in tensors.items():
        read[kind] = {name: tensor[...] for name, tensor in stored.items()}
    return read, state


def position(state):
    """The loader's part of a checkpoint's state."""
    leaves = state["leaves"].items()
    return {name: value for name, value in leaves if name.startswith("loader/")}


def first_moments(folder):
    """{parameter: first moment} of a checkpoint, AdamW's or Muon's; not 8-bit AdamW's codes."""
    return moments_of(load(folder)[0])


def moments_of(tensors):
    """The same of the tensors that `load` returned."""
    found = {}
    for key, tensor in tensors["optimizer"].items():
        *_, name, state = key.split("/")
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


def load_model(path):
    """The model of a run's folder or a checkpoint, on the CPU."""
    return checkpoint.model_of(checkpoint.open_model(path), CPU)


# -- written by tests


def save(out_dir, step, tensors, state, keep_last=2, last=None):
    """Saves what `load` returned, or as much of it as a test needs; returns the folder.

    state may have a val_loss, by which the best checkpoint is chosen. last: the step from which the
    run goes on; None: the newest.
    """
    state = {"config": {}} | state
    score = state.pop("val_loss", None)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    if last is None:
        last = max(map(checkpoint.step_of, checkpoint.folders(out_dir)), default=None)
    one = checkpoint.Saver(ONE, out_dir, keep_last, last=last)
    own = {f"{kind}.safetensors": of_kind for kind, of_kind in tensors.items()}
    one.write(step, own, state)
    if score is not None:
        one.evaluated(step, score)
    return one.final


def save_model(folder, model, cfg, step=0):
    """A checkpoint of weights alone; returns its folder."""
    return save(folder, step, {"model": dict(model.named_parameters())}, {"config": vars(cfg)})


def sign(folder):
    """Makes the digests right, as somebody could who changes files on purpose."""
    manifest = {f.name: files.digest(f) for f in folder.iterdir() if f.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def trap(folder):
    """A pickle that makes this folder where it is loaded."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(folder),)

    return pickle.dumps(Trap())


# -- until this process ends


def while_writing(before=None, after=None, put=setattr):
    """Has before(path) and after(path) called around the writing of each file of tensors.

    In path stands the step's folder, under whatever name it is written.
    """
    write = checkpoint.save_file

    def around(tensors, path):
        if before:
            before(path)
        write(tensors, path)
        if after:
            after(path)

    put(checkpoint, "save_file", around)


def check_reads(check):
    """Has check(shape, dtype, rows) called at each reading of a tensor of several files.

    rows: a slice; None for all.
    """
    read = checkpoint.MergedTensor.__getitem__

    def checked(stored, rows):
        check(stored.shape, stored.dtype, None if rows is ... else rows)
        return read(stored, rows)

    checkpoint.MergedTensor.__getitem__ = checked
