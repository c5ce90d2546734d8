"""A run's checkpoints, step_*/ in its folder: written, found, verified, read and pruned.

docs/checkpoints.md lists the files of a folder: safetensors and JSON, so that loading runs no code.
A folder is whole or absent: it is written under a hidden name and then renamed. Of a sharded model
each rank writes its rows into a file of its own, and any number of ranks read any rows of them.
"""

import hashlib
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import model as models
from corpus import as_user_error
from corpus import tokenizer as tokenizers
from fast.chips import best_attention
from run import agreement, source
from run.logger import NotFinite
from run.pack import CheckpointError, pack, persistent_buffers
from scale import parallel
from scale.shards import copy_into, is_first_copy, local
from settings import Config, GPTConfig
from system import files
from system.errors import UserError, listed, warn

NAME = "step_" + "[0-9]" * 8  # of a checkpoint, for glob
HIDDEN = ".writing_"  # before the name of a checkpoint that is written or removed
# ends of names of tensors with a row per token id
TABLES = ("wte.weight", "head.weight", "values.weight")


# -- written


class Saver:
    """Saves a run, with async_save from a copy in the CPU's memory. All ranks make the same calls.

    last: the step in out_dir that the run goes on from. saved(step, folder) follows each save.
    """

    def __init__(
        self, world, out_dir, keep_last, async_save=False, last=None, saved=lambda *_: None
    ):
        self.world = world
        self.out_dir = Path(out_dir)
        self.keep_last = keep_last
        self.background = async_save
        self.saved = saved
        self.last = last  # step of the last save
        best = read_best(out_dir)  # a later one than `last` is another attempt's
        self.best = best if best.get("step", 0) <= (last or 0) else {}
        self.thread = ThreadPoolExecutor(1)
        self.pending = None  # the future of write_files

    def due(self, step, every, at_end):
        """Whether to save after `step` steps: every so many and at the end, never if every is 0."""
        return every > 0 and step not in (0, self.last) and (at_end or step % every == 0)

    def save(self, state, **facts):
        """Saves a train.State; facts: what else state.json says of the run, such as its settings.

        What cannot be saved ends all ranks before a file is begun.
        """
        self.wait()
        parallel.free_gathered(state.model)
        tensors, values = everywhere(pack, state)
        refuse_drift_and_nan(state, tensors)
        own = files_of_rank(tensors, values)
        if self.background:
            for of_file in own.values():
                for name, tensor in of_file.items():  # into pinned memory, at the bus's full rate
                    of_file[name] = tensor.to("cpu", non_blocking=tensor.is_cuda, copy=True)
            parallel.synchronize(self.world.device)
        self.write(state.step, own, values | facts)

    def write(self, step, own, state):
        """Writes a checkpoint: `own`, {file name: {name: tensor}}, on each rank, `state` on one."""
        self.last = step
        self.final = self.out_dir / f"step_{step:08d}"
        self.aside = self.out_dir / f"{HIDDEN}{self.final.name}"
        # no rank goes on before all have begun: rank 0's folder is then there
        self.or_removed(self.begin, {"step": step, **state})
        self.pending = self.thread.submit(write_files, self.aside, own)
        if not self.background:
            self.wait()

    def written(self):
        """Whether this rank has written its files of the save in progress."""
        return self.pending is not None and self.pending.done()

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it."""
        if self.pending is None:
            return
        writing = self.pending
        self.pending = None
        digests = parallel.gather_objects(self.or_removed(writing.result))
        self.or_removed(self.publish, digests)
        self.saved(self.last, self.final)

    def or_removed(self, action, *arguments):
        """As `everywhere`; where it fails, what was written is removed."""
        try:
            return everywhere(action, *arguments)
        except UserError as error:
            if self.world.main:
                shutil.rmtree(self.aside, ignore_errors=True)
            advice = "earlier checkpoints are intact: --resume=auto goes on from them"
            raise CheckpointError(f"{self.final} cannot be written: {error}; {advice}") from None

    def begin(self, state):
        """Makes the hidden folder, on rank 0, with state.json, the run's code and its tokenizer."""
        if not self.world.main:
            return
        for left in self.out_dir.glob(f"{HIDDEN}step_*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        self.aside.mkdir()  # an error where out_dir was removed under the run
        files.write_json(self.aside / "state.json", state)
        copies = {name: self.out_dir / name for name in source.KEPT}
        if tokenizer := tokenizers.file_of(state["config"].get("tokenizer") or "bytes"):
            copies |= {path.name: path for path in tokenizers.beside(tokenizer.parent)}
            copies["tokenizer.json"] = tokenizer
        for name, path in copies.items():
            if path.is_file():
                shutil.copyfile(path, self.aside / name)

    def publish(self, digests):
        """On rank 0: gives a complete folder its name. What had that name gets another one.

        digests: of write_files, of each rank.
        """
        if not self.world.main:
            return
        manifest = {}
        for of_rank in digests:
            manifest |= of_rank
        for path in self.aside.iterdir():
            if path.name not in manifest:
                files.sync(path)
                manifest[path.name] = files.digest(path)
        files.write_json(self.aside / "manifest.json", manifest)
        read(self.aside, manifest)  # what cannot be read again is refused before it counts
        if self.final.exists():
            other = f"{self.final}_before_{os.getpid()}"
            os.rename(self.final, other)
            warn(f"{self.final}, damaged or of another attempt, is now {other}")
        os.rename(self.aside, self.final)
        files.sync(self.out_dir)
        self.prune()

    def evaluated(self, step, score):
        """Notes that the evaluations due at a step have run; score: the lower the better, or None.

        Of a step that was not saved it notes nothing.
        """
        if not self.world.main or step != self.last:
            return
        if score is not None and score < self.best.get("score", math.inf):
            self.best |= {"step": step, "score": score}
        self.best["evaluated"] = step
        with files.writable(self.out_dir):
            files.write_json(self.out_dir / "best.json", self.best)
        self.prune()

    def prune(self):
        """Removes all but the newest keep_last, the best, and those of later steps."""
        own = [folder for folder in folders(self.out_dir) if step_of(folder) <= self.last]
        for folder in own[: -self.keep_last]:
            if step_of(folder) != self.best.get("step"):
                remove(folder)


def refuse_drift_and_nan(state, tensors):
    """Raises UserError where ranks' copies of weights differ, or numbers are not finite."""
    if drifted := parallel.copies_differ(state.model):
        what = f"{listed(drifted)}: the ranks' copies differ, which must not drift apart"
        raise CheckpointError(f"step {state.step}: {what}; earlier checkpoints are intact")
    checked = list(state.model.parameters())
    for group in ("optimizer", "own"):
        checked += tensors.get(group, {}).values()
    if not parallel.all_finite(checked, parallel.device_of(state.model)):
        what = "weights, optimizer states or State.own are inf or NaN and were not saved"
        raise NotFinite(f"step {state.step}: {what}; try a lower --lr")


def files_of_rank(tensors, values):
    """{file name: {name: tensor}} that this rank writes of what `pack` found.

    Of what is divided each rank has its rows; the rest is in one file where all ranks have the
    same, else in one of each rank. Of buffers that differ, the model has rank 0's.
    """
    rank, _ = parallel.rank_and_size()
    apart = names_that_differ(tensors, values)
    alone = {}
    found = {f"rank{rank:05d}.safetensors": alone}
    for group, of_group in tensors.items():
        own = {}
        suffix = ""
        for inner, tensor in of_group.items():
            name = f"{group}/{inner}"
            if name in apart or group == "rank":
                alone[name] = tensor
                if group != "model":
                    continue
            if is_first_copy(tensor):
                own[inner] = local(tensor)
                if own[inner].shape != tensor.shape:
                    suffix = f".rank{rank:05d}"
        found[f"{group}{suffix}.safetensors"] = own
    return {name: own for name, own in found.items() if own}


def names_that_differ(tensors, values):
    """Names of the tensors, not saved by rows, of which ranks have other values.

    Raises CheckpointError where ranks differ in what is no tensor.
    """
    own = {"the containers": values["tree"]}
    for name, leaf in values["leaves"].items():
        own[name] = str(leaf)
        if isinstance(leaf, dict) and not leaf["rows"]:
            group, _, inner = name.partition("/")
            data = tensors[group][inner].detach().contiguous().reshape(-1).view(torch.uint8)
            own[name] = hashlib.sha256(data.cpu().numpy()).digest()
    of_ranks = parallel.gather_objects(own)
    differ = {name for name in own for theirs in of_ranks if theirs.get(name) != own[name]}
    if plain := sorted(name for name in differ if isinstance(own[name], str)):
        what = f"{listed(plain)}: not the same on all ranks"
        raise CheckpointError(f"{what}; a checkpoint may hold other tensors of each rank alone")
    return differ


@torch.no_grad()
def write_files(aside, own):
    """Writes {file name: {name: tensor or MergedTensor}} -> {file name: digest}."""
    digests = {}
    if not aside.is_dir():
        raise OSError(f"{aside} is not there: all nodes must share the file system of out_dir")
    for name, tensors in own.items():
        path = aside / name
        tensors = {inner: tensor[...].cpu().contiguous() for inner, tensor in tensors.items()}
        save_file(tensors, path)
        files.by_umask(path)
        files.sync(path)
        digests[name] = files.digest(path)
    return digests


def everywhere(action, *arguments):
    """action(*arguments) on each rank; what it raises on one, as a UserError, all raise."""
    result = error = None
    try:
        with as_user_error(f"rank {parallel.rank_and_size()[0]}", CheckpointError):
            result = action(*arguments)
    except UserError as found:
        error = found
    for found in parallel.gather_objects(error):
        if found:
            raise found
    return result


def save_merged(out_dir, step, tensors, state):
    """Writes {group: {name: tensor or MergedTensor}} as a checkpoint of one file a group.

    Returns its folder.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    saver = Saver(parallel.World(0, 1, torch.device("cpu")), out_dir, keep_last=2)
    own = {f"{group}.safetensors": of_group for group, of_group in tensors.items()}
    saver.write(step, own, state)
    return saver.final


# -- found and read


def folders(out_dir):
    """A run's checkpoints, oldest first; a user's own step_00000003/ without JSON is none."""
    return sorted({path.parent for path in Path(out_dir).glob(f"{NAME}/*.json")})


def step_of(folder):
    """The step in a checkpoint's name."""
    return int(folder.name[-8:])


def remove(folder):
    """Hides a checkpoint, then deletes it: what a kill leaves of it never looks whole."""
    hidden = folder.with_name(HIDDEN + folder.name)
    os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def read_best(out_dir):
    """best.json of a run: {"step", "score"} of its best checkpoint, "evaluated": a step; or {}."""
    try:
        return json.loads((Path(out_dir) / "best.json").read_bytes())
    except (OSError, ValueError):
        return {}


def open_whole(path):
    """(folder, tensors, state) as of `verified`: of path itself, or of a run's newest whole one.

    All ranks call it, and take the same one.
    """
    path = Path(path)
    tried = set()
    while True:  # listed again each time, since a run may save and prune meanwhile
        there = [path] if (path / "manifest.json").exists() else folders(path)
        # rank 0's, since another node may not see the folder, or have its own
        folder = parallel.gather_objects(max({*there} - tried, default=None))[0]
        if folder is None:
            what = (
                "expected a run's folder, or a step_*/ of it; of Hugging Face --pretrained=FOLDER"
            )
            raise CheckpointError(
                f"{path}: no whole checkpoint there; {what} or --init_from=hf:FOLDER"
            )
        try:
            tensors, state, manifest = everywhere(verified, folder)
            if wrong := agreement.difference({"manifest.json": manifest}):
                raise CheckpointError(f"{folder}: {wrong}; all nodes must share the folder")
        except CheckpointError as error:
            warn(f"{error}; it is left in place")
            tried.add(folder)
            continue
        return folder, tensors, state


def verified(folder):
    """(tensors, state, manifest.json) of a checkpoint, as `read` opens it.

    Raises CheckpointError unless it is whole. Ranks hash other files.
    """
    rank, ranks = parallel.rank_and_size()
    with as_user_error(f"{folder} is damaged", CheckpointError):
        manifest = json.loads((folder / "manifest.json").read_bytes())
        own = sorted({"state.json", *manifest})[rank::ranks]
        with ThreadPoolExecutor() as pool:
            digests = pool.map(files.digest, [folder / name for name in own])
        for name, digest in zip(own, digests):
            if list(digest) != manifest[name]:
                raise CheckpointError(f"{folder / name} is damaged: not as manifest.json has it")
        tensors, state = read(folder, manifest)
        if folder.match(NAME) and step_of(folder) != state["step"]:
            raise CheckpointError(f"{folder} is of step {state['step']}: copied, or renamed")
    return tensors, state, manifest


def read(folder, names):
    """({group: {name: MergedTensor}}, state.json) of a checkpoint, its ranks' files merged.

    A group is a file, or a file of each rank. Nothing of a tensor is read before it is asked for.
    names: of the checkpoint's files.
    """
    tensors = {}
    for name in sorted(names):  # of ranks in order, as their rows are
        if name.endswith(".safetensors"):
            group = tensors.setdefault(name.partition(".")[0], {})
            file = safe_open(folder / name, "pt")
            for inner in file.keys():
                group.setdefault(inner, MergedTensor()).add(file.get_slice(inner))
    if "model" not in tensors:
        raise CheckpointError(f"{folder} holds no weights")
    return tensors, json.loads((folder / "state.json").read_bytes())


def shape_of(config):
    """The GPTConfig in a checkpoint's settings."""
    # the device that reads it chooses the attention
    names = {f.name for f in fields(GPTConfig)} & config.keys() - {"attention"}
    return GPTConfig(**{name: config[name] for name in names})


class MergedTensor:
    """A tensor whose rows lie in one or more files: [a:b] reads rows a to b, [...] all."""

    def __init__(self):
        self.parts = []

    def add(self, part):
        """part: a slice of safetensors, whose rows come after those of the parts before."""
        shape = part.get_shape()
        self.dtype = part[:0].dtype if shape else part[...].dtype
        if self.parts:
            shape[0] += self.shape[0]
        self.shape = torch.Size(shape)
        self.parts.append(part)

    def __getitem__(self, rows):
        if len(self.parts) == 1:
            return self.parts[0][rows]
        if rows is ...:
            rows = slice(0, self.shape[0])
        first = rows.start  # counted from the first row of a part
        last = rows.stop
        pieces = []
        for part in self.parts:
            count = part.get_shape()[0]
            if first < count and last > 0:
                pieces.append(part[max(first, 0) : min(last, count)])
            first -= count
            last -= count
        return torch.cat(pieces)


def check_model_tensors(model, tensors, may_lack=()):
    """Raises CheckpointError unless {name: tensor or MergedTensor} fit the model.

    They are of its parameters and its persistent buffers; the number of padding rows may be
    another. may_lack: names of which there may be none.
    """
    own = dict(model.named_parameters()) | persistent_buffers(model)
    wrong = []
    for name in sorted(own.keys() - set(may_lack) | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "absent"
        expected = tuple(own[name].shape) if name in own else "absent"
        padded = name.endswith(TABLES) and found[1:] == expected[1:]
        if padded and min(found[0], expected[0]) >= model.cfg.vocab_size:
            continue
        if found != expected:
            wrong.append(f"{name}: {found}, expected {expected}")
    if wrong:
        raise CheckpointError(f"weights do not fit the model: {listed(wrong)}")


def load_weights(model, tensors, may_lack=()):
    """Copies {name: tensor or MergedTensor} into a model, on each rank the rows that it holds.

    Padding rows that they lack are zeros. may_lack: names of which there may be no tensor; those
    keep their values. Returns the names that did.
    """
    kept = set(may_lack) - tensors.keys()
    check_model_tensors(model, tensors, kept)
    for name, tensor in [*model.named_parameters(), *persistent_buffers(model).items()]:
        if name not in kept:
            copy_into(tensor, tensors[name])
    return sorted(kept)


def carried_tokenizer(folder):
    """The path of the tokenizer's file in a checkpoint, a text; None if it holds none."""
    path = Path(folder) / "tokenizer.json"
    return str(path) if path.is_file() else None


@dataclass
class SavedModel:
    """A trained model, of which no weights are read yet."""

    tensors: dict  # {name: tensor or MergedTensor}
    shape: GPTConfig
    tokenizer: str | None  # its name or file
    document_mask: bool = False  # whether it was trained with it


def open_model(path):
    """The SavedModel of a run's folder or a checkpoint."""
    folder, tensors, state = open_whole(path)
    warn(source.warning(folder))
    config = state["config"]
    tokenizer = carried_tokenizer(folder) or config.get("tokenizer")
    masks = config.get("document_mask", False)
    return SavedModel(tensors["model"], shape_of(config), tokenizer, masks)


@torch.no_grad()
def model_of(saved, device, precision="fp32", world=None):
    """The GPT of a SavedModel, in bf16 or fp32.

    world: ranks among which FSDP2 divides it.
    """
    shape = replace(saved.shape, attention=best_attention(device, precision)[0])
    model = models.on_meta(shape)
    if precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    if world:
        from scale import fsdp

        settings = Config(parallel="fsdp", precision=precision, tie_embeddings=shape.tie_embeddings)
        fsdp.shard(model, settings, world)
    models.allocate(model, device)
    load_weights(model, saved.tensors)
    return model.eval()
