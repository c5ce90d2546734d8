"""The one place in tests that knows the form of a checkpoint: others look into one through it.

    tensors, state = saved.load(saved.find(out_dir))
    tensors["model"]["wte.weight"], saved.first_moments(folder)["wte.weight"], state["step"]

Tests of what a checkpoint promises, and of what a run does with one, hold in any form of it.
"""

import dataclasses
import json
from pathlib import Path

import torch

from run import checkpoint, pack
from run.resume import Start
from scale import parallel
from settings import Config
from system import files

Error = pack.CheckpointError  # of a checkpoint that cannot be taken, or written
CPU = torch.device("cpu")
ONE = parallel.World(0, 1, CPU)

folders = checkpoint.folders  # a run's, oldest first


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

    Kinds are model, optimizer ("0/states/<parameter>/<state>"), own, rank00000.
    """
    tensors, state, _ = checkpoint.verified(Path(folder))
    read = {}
    for kind, stored in tensors.items():
        read[kind] = {name: tensor[...] for name, tensor in stored.items()}
    return read, state


def load_state(folder):
    """What a checkpoint says beside tensors: step, tokens, seconds, config."""
    return json.loads((folder / "state.json").read_text())


def position(state):
    """The loader's part of what `load_state` returns."""
    leaves = state["leaves"].items()
    return {name: value for name, value in leaves if name.startswith("loader/")}


def best(out_dir):
    """best.json of a run: the step and score of its best checkpoint, the step last evaluated."""
    return checkpoint.read_best(out_dir)


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
        last = max(map(checkpoint.step_of, folders(out_dir)), default=None)
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

    def around(tensors, path):
        if before:
            before(path)
        write(tensors, path)
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
    checkpoint.load_weights(model, tensors)


def check_reads(check):
    """Has check(shape, dtype, rows) called at each reading of a stored tensor.

    rows: a slice; None for all. Until this process ends.
    """
    read = checkpoint.MergedTensor.__getitem__

    def checked(stored, rows):
        check(stored.shape, stored.dtype, None if rows is ... else rows)
        return read(stored, rows)

    checkpoint.MergedTensor.__getitem__ = checked


class Opened(Start):
    """A start that takes a checkpoint of weights alone, and of any shape."""

    def compare(self):
        pass


def start(out_dir, resume="none", overwrite=False):
    """A run's start: `folder` of the checkpoint that it takes, or None; prepare_out_dir()."""
    return Opened(Config(out_dir=str(out_dir), resume=resume, overwrite=overwrite))


def resume(folder, state, cfg):
    """Fills a new train.State of one process with all that a run takes from a checkpoint.

    Returns (the start's warnings, best.json).
    """
    options = dict(out_dir=str(folder.parent), resume=str(folder), dry_run=True)
    began = Start(dataclasses.replace(cfg, **options))
    fill(state.model, began.weights)
    began.restore(state)
    return began.warnings, best(folder.parent)


def of_rank(model):
    """What is a rank's own: random numbers, and fp8's largest magnitudes."""
    return pack.rank_tree(model)


def restore_rank(tree, model):
    """Puts back what `of_rank` gave."""
    pack.load_rank(model, tree)
