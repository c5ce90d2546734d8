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
from safetensors.torch import load_file, save_file

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
        self.state = {"step": step, **state}
        self.final = self.out_dir / f"step_{step:08d}"
        self.aside = self.out_dir / f"{HIDDEN}{self.final.name}"
        self.pending = self.thread.submit(write_files, self.aside, own)
        if not self.background:
            self.wait()

    def written(self):
        """Whether this rank has written its files of the save in progress."""
        return self.pending is not None and self.pending.done()

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it.

        Where that fails on any rank, what was written is removed.
        """
        if self.pending is None:
            return
        writing = self.pending
        self.pending = None
        try:
            digests = parallel.gather_objects(everywhere(writing.result))
            everywhere(self.publish, digests)
        except UserError as error:
            if self.world.main:
                shutil.rmtree(self.aside, ignore_errors=True)
            advice = "earlier checkpoints are intact: --resume=auto goes on from them"
            raise CheckpointError(f"{self.final} cannot be written: {error}; {advice}") from None
        self.saved(self.last, self.final)

    def publish(self, digests):
        """On rank 0: completes a folder and gives it its name. What had that name gets another one.

        digests: of write_files, of each rank.
        """
        if not self.world.main:
            return
        files.write_json(self.aside / "state.json", self.state)
        source.record(self.aside)
        tokenizer = tokenizers.file_of(self.state["config"].get("tokenizer") or "bytes")
        if tokenizer and tokenizer.is_file():
            shutil.copyfile(tokenizer, self.aside / "tokenizer.json")
            for path in tokenizers.beside(tokenizer.parent):
                shutil.copyfile(path, self.aside / path.name)
        elif tokenizer:
            advice = "put that of an earlier checkpoint there"
            warn(f"{tokenizer} is not there: {self.final} is without a tokenizer; {advice}")
        manifest = {}
        for of_rank in digests:
            manifest |= of_rank
        for path in self.aside.iterdir():
            if path.name not in manifest:
                files.sync(path)
                manifest[path.name] = files.digest(path)
        files.write_json(self.aside / "manifest.json", manifest)
        read(self.aside)  # what cannot be read again is refused before it counts
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

    Of a model that FSDP2 divides each rank writes its rows. Other tensors are in one file where all
    ranks have the same, else in a file of each rank; of buffers the model's file has rank 0's too.
    """
    rank, _ = parallel.rank_and_size()
    suffix = f".rank{rank:05d}" if values["shards"] > 1 else ""
    apart = names_that_differ(tensors, values)
    alone = {}
    found = {f"rank{rank:05d}.safetensors": alone}
    for group, of_group in tensors.items():
        own = found[f"{group}{suffix}.safetensors"] = {}
        for inner, tensor in of_group.items():
            name = f"{group}/{inner}"
            if name in apart:
                alone[name] = tensor
            if is_first_copy(tensor) and (name not in apart or group == "model"):
                own[inner] = local(tensor)
    return {name: own for name, own in found.items() if own}


def names_that_differ(tensors, values):
    """Names of the tensors, not saved by rows, of which ranks have other values.

    Raises CheckpointError where ranks differ in what is no tensor.
    """
    if wrong := agreement.difference(values["leaves"] | {"the containers": values["tree"]}):
        raise CheckpointError(f"{wrong}; in a checkpoint only tensors may differ by rank")
    own = {}
    for name, leaf in values["leaves"].items():
        if isinstance(leaf, dict) and not leaf["rows"]:
            group, _, inner = name.partition("/")
            data = tensors[group][inner].detach().contiguous().reshape(-1).view(torch.uint8)
            own[name] = hashlib.sha256(data.cpu().numpy()).digest()
    of_ranks = parallel.gather_objects(own)
    return {name for name in own for theirs in of_ranks if theirs[name] != own[name]}


@torch.no_grad()
def write_files(aside, own):
    """Writes {file name: {name: tensor or MergedTensor}} -> {file name: digest}."""
    digests = {}
    aside.mkdir(exist_ok=True)  # an error where out_dir was removed under the run
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


def save_merged(out_dir, tensors, state):
    """Writes what `read` found as a checkpoint of one file a group; returns its folder."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    saver = Saver(parallel.World(0, 1, torch.device("cpu")), out_dir, keep_last=1)
    own = {f"{group}.safetensors": of_group for group, of_group in tensors.items()}
    saver.write(state["step"], own, state)
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
            what = "no whole checkpoint there; expected a run's folder or step_*/; for Hugging Face"
            raise CheckpointError(f"{path}: {what} use --init_from=hf:FOLDER, --pretrained=FOLDER")
        try:
            tensors, state, manifest = everywhere(verified, folder)
            if wrong := agreement.difference({"manifest.json": manifest}):
                raise CheckpointError(f"{folder}: {wrong}; all nodes must share the folder")
            return folder, tensors, state
        except CheckpointError as error:
            warn(f"{error}; it is left in place")
            tried.add(folder)


def verified(folder):
    """(tensors, state, manifest) of a checkpoint, as of `read`. Ranks hash other files.

    Raises CheckpointError unless it is whole.
    """
    rank, ranks = parallel.rank_and_size()
    with as_user_error(f"{folder} is damaged", CheckpointError):
        tensors, state, manifest = read(folder)
        own = sorted({"state.json", *manifest})[rank::ranks]
        with ThreadPoolExecutor() as pool:
            digests = pool.map(files.digest, [folder / name for name in own])
        for name, digest in zip(own, digests):
            if list(digest) != manifest[name]:
                raise ValueError(f"{name} is not as manifest.json has it")
        if folder.match(NAME) and step_of(folder) != state["step"]:
            raise ValueError(f"it is of step {state['step']}: copied, or renamed")
    return tensors, state, manifest


def read(folder):
    """({group: {name: tensor}}, state.json, manifest.json) of a checkpoint.

    A group is a file, or a file of each rank, merged. The tensors are mapped: nothing of them is
    read before it is used.
    """
    manifest = json.loads((folder / "manifest.json").read_bytes())
    tensors = {}
    for name in sorted(manifest):  # of ranks in order, as their rows are
        if name.endswith(".safetensors"):
            group = tensors.setdefault(name.partition(".")[0], {})
            for inner, tensor in load_file(folder / name).items():
                group.setdefault(inner, []).append(tensor)
    if "model" not in tensors:
        raise ValueError("it holds no weights")
    for group in tensors.values():
        for inner, parts in group.items():
            group[inner] = parts[0] if len(parts) == 1 else MergedTensor(parts)
    return tensors, json.loads((folder / "state.json").read_bytes()), manifest


def shape_of(config):
    """The GPTConfig in a checkpoint's settings."""
    # the device that reads it chooses the attention
    names = {f.name for f in fields(GPTConfig)} & config.keys() - {"attention"}
    return GPTConfig(**{name: config[name] for name in names})


class MergedTensor:
    """Tensors whose rows follow each other, as those of ranks: [a:b] reads rows a to b, [...] all.

    They may be of several dtypes, of which it takes the widest.
    """

    def __init__(self, parts):
        self.parts = parts
        self.dtype = parts[0].dtype
        self.shape = (sum(map(len, parts)), *parts[0].shape[1:])

    def __getitem__(self, rows):
        if rows is ...:
            rows = slice(0, self.shape[0])
        pieces = []
        begin = 0  # the row with which a part begins
        for part in self.parts:
            pieces.append(part[max(rows.start - begin, 0) : max(rows.stop - begin, 0)])
            begin += len(part)
        return torch.cat(pieces)


def load_weights(model, tensors, may_lack=()):
    """Copies {name: tensor or MergedTensor} into a model, on each rank the rows that it holds.

    Raises CheckpointError unless they fit its parameters and its persistent buffers. may_lack:
    names of which there may be no tensor; those keep their values. Returns the names that did.
    """
    own = dict(model.named_parameters()) | persistent_buffers(model)
    kept = set(may_lack) - tensors.keys()
    wrong = []
    for name in sorted(own.keys() - kept | tensors.keys()):
        found = shape_in(tensors, name, model.cfg.vocab_size)
        expected = shape_in(own, name, model.cfg.vocab_size)
        if found != expected:
            wrong.append(f"{name}: {found}, expected {expected}")
    if wrong:
        raise CheckpointError(f"weights do not fit the model: {listed(wrong)}")
    for name, tensor in tensors.items():
        copy_into(own[name], tensor)
    return sorted(kept)


def shape_in(tensors, name, vocab_size):
    """The shape of a tensor without padding rows, of which the model may have more or fewer."""
    if name not in tensors:
        return "absent"
    shape = tuple(tensors[name].shape)
    if name.endswith(TABLES):
        return min(shape[0], vocab_size), *shape[1:]
    return shape


def carried_tokenizer(folder):
    """The path of the tokenizer's file in a checkpoint, a text; None if it holds none."""
    path = folder / "tokenizer.json"
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
