"""What a checkpoint holds of a run, saved and loaded; without pickles, so loading runs no code.

docs/checkpoints.md lists the files of a folder. run/checkpoint_folders.py chooses, verifies and
prunes folders; run/reshard.py reads tensors by rows.
"""

import contextlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import model as models
from configurator import typed
from corpus import as_user_error
from corpus import tokenizer as tokenizers
from fast.chips import best_attention
from run import agreement, source, states
from run.checkpoint_folders import delete_hidden, find, folders, hidden_path, prune, put_in_place
from run.logger import NotFinite
from run.reshard import (
    load_resharded,
    open_merged,
    persistent_buffers,
    read_state_json,
    with_prefix,
)
from run.states import CheckpointError
from scale import generators, parallel
from scale.shards import is_first_copy, rows_of
from settings import Config, GPTConfig
from system import files
from system.errors import UserError, refuse, warn

SHAPE = {f.name for f in fields(GPTConfig)} - {"attention"}
SCHEDULE = "max_steps batch_tokens lr min_lr_ratio warmup_steps cooldown_fraction schedule".split()
SCHEDULE += "max_tokens max_seconds batch_schedule".split()
OTHERS_READ = ("optimizer", "tokenizer", "document_mask")  # further settings that are read of it
GROUPS = {"optimizer": "optimizer states", "buffers": "buffers", "own": "values of State.own"}


def save(out_dir, step, tensors, state, keep_last=2):
    """As Saver.write, of a process alone; returns the folder."""
    saver = Saver(parallel.World(0, 1, torch.device("cpu")), out_dir, keep_last)
    saver.write(step, tensors, state)
    return saver.final


class Saver:
    """Saves a run, with async_save from a copy in the CPU's memory.

    All ranks make the same calls.
    """

    def __init__(
        self, world, out_dir, keep_last, async_save=False, last=None, saved=lambda *_: None
    ):
        """last: the resumed checkpoint, if in out_dir. saved(step, folder) follows each save."""
        self.world = world
        self.out_dir = Path(out_dir)
        self.keep_last = keep_last
        self.background = async_save
        self.saved = saved
        self.last = None  # step of the last save
        self.whole = set()  # for prune
        if last is not None:
            self.last = read_state_json(last)["step"]
            self.whole.add(last)
        self.thread = ThreadPoolExecutor(1)
        self.pending = None  # the future of write_files

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """Ends a save in the background that was begun before the numbers were no longer finite."""
        if kind is NotFinite:
            self.wait()

    def due(self, step, every, at_end):
        """Whether to save after `step` steps: every so many and at the end, never if every is 0."""
        return every > 0 and step not in (0, self.last) and (at_end or step % every == 0)

    def save(self, state, **facts):
        """Starts the save of a train.State when the one before is done.

        It waits for the end of the save unless that runs in the background. All ranks exchange what
        they hold, in this order: what cannot be saved ends them all before a file is begun.

        facts: what else state.json says of the run, such as its settings.
        """
        model = state.model
        parallel.free_gathered(model)
        self.refuse_not_finite(state.step, "weights", model.parameters())
        tensors = {"model": dict(model.named_parameters())}
        tensors["rng"] = {}  # {"<rank>.<kind>": tensor}
        of_ranks = parallel.gather_objects(rank_tensors(model, self.world.device))
        for rank, own in enumerate(of_ranks):
            tensors["rng"] |= {f"{rank}.{kind}": tensor for kind, tensor in own.items()}
        tensors["own_of_ranks"] = {}
        buffers = persistent_buffers(model)
        packs = {
            "optimizer": partial(states.pack_optimizer, state.optimizer),
            "buffers": partial(states.pack_own, buffers),
            "own": partial(states.pack_own, state.own),
        }
        values = {}
        for group, pack in packs.items():
            values[group] = self.pack_group(group, pack, state, tensors)
        tensors["buffers"] = buffers  # rank 0's, which sample.py reads
        position = position_of_ranks(state.loader)
        numbers = {
            "world_size": self.world.size,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "scaler": state.scaler.state_dict(),
            "loader": position,
            "val_loss": state.score if state.evaluated == state.step else None,
            "values": values,
        }
        self.write(state.step, tensors, numbers | facts)

    def pack_group(self, group, pack, state, tensors):
        """Adds the tensors of a group to `tensors` of `write`; returns its JSON for values.json.

        pack: makes JSON of the group with a states.Packer.
        """
        packer = states.Packer(state.model)
        packed = everywhere(partial(pack, packer))
        saved, tensors[group], alone = states.shared_and_own(packed, packer, state.model)
        for name, tensor in alone.items():
            tensors["own_of_ranks"][f"{self.world.rank}.{group}.{name}"] = tensor
        checked = packer.checked
        if group == "buffers":  # a mask may hold -inf
            checked = [t.nan_to_num(torch.nan, 0.0, 0.0) for t in checked]
        self.refuse_not_finite(state.step, GROUPS[group], checked)
        return saved

    def refuse_not_finite(self, step, what, tensors):
        if not parallel.all_finite(tensors, self.world.device):
            raise NotFinite(
                f"step {step}: {what} are inf or NaN and were not saved; try a lower --lr"
            )

    def write(self, step, tensors, state):
        """Saves the `state` and {"model": {name: tensor or MergedTensor}, ...}, a file each key.

        Tensors of the key own_of_ranks are saved by each rank, all others once.
        """
        self.wait()
        self.last = step
        self.final = self.out_dir / f"step_{step:08d}"
        self.aside = hidden_path(self.final)
        self.need = 0  # bytes
        for group in tensors.values():
            for tensor in group.values():
                self.need += tensor.shape.numel() * tensor.dtype.itemsize
        # no rank goes on before all have begun: rank 0's folder is then there
        own = self.or_removed(partial(self.begin, tensors, {"step": step, **state}))
        self.pending = self.thread.submit(write_files, self.aside, own)
        if not self.background:
            self.wait()

    def begin(self, tensors, state):
        """Makes the folder, on rank 0; returns the File of each group that this rank writes."""
        if self.world.main:
            begin_folder(self.aside, state)
        own = [self.own_file(group, of_group) for group, of_group in tensors.items()]
        return [file for file in own if file.tensors]

    @torch.no_grad()
    def own_file(self, group, tensors):
        """The File of a group that this rank writes, perhaps without a tensor."""
        of_each_rank = group == "own_of_ranks" and self.world.size > 1
        own = {}
        shards = {}
        for name, tensor in tensors.items():
            if of_each_rank or is_first_copy(tensor):
                own[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if own[name].shape != tensor.shape:
                    shards[name] = (rows_of(tensor)[0], len(tensor))
        if self.background:
            for name, tensor in own.items():  # pinned memory takes a copy at the bus's full rate
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                own[name] = copy.copy_(tensor, non_blocking=True)
            parallel.synchronize(self.world.device)
        rank = f".rank{self.world.rank:05d}" if shards or of_each_rank else ""
        return File(f"{group}{rank}.safetensors", own, shards)

    def written(self):
        """1.0 if this rank has written its files of the save in progress, else 0.0.

        Once all ranks have, `wait` is short.
        """
        return float(self.pending is not None and self.pending.done())

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it."""
        if self.pending is None:
            return
        writing = self.pending
        self.pending = None
        of_ranks = parallel.gather_objects(self.or_removed(writing.result))
        self.or_removed(partial(self.publish, of_ranks))
        self.saved(self.last, self.final)

    def publish(self, of_ranks):
        """On rank 0: puts a complete folder in place, with its manifest, and prunes older ones."""
        if not self.world.main:
            return
        manifest = {}
        for written in of_ranks:
            manifest |= written
        for path in self.aside.iterdir():
            if path.name not in manifest:
                manifest[path.name] = files.digest(path)
        files.write_json(self.aside / "manifest.json", manifest)
        put_in_place(self.final)
        self.whole.add(self.final)
        try:
            prune(self.final, self.keep_last, self.whole)
        except OSError as error:
            warn(f"{self.out_dir}: older checkpoints are still there: {error}")

    def or_removed(self, action):
        """action() on each rank.

        If it fails on one, what was written is removed, and all ranks raise CheckpointError.
        """
        try:
            return everywhere(action, Exception)  # any type: the other ranks wait
        except CheckpointError as error:
            free = shutil.disk_usage(self.out_dir).free if self.out_dir.is_dir() else 0
            free = parallel.gather_objects(free)[0]  # all ranks raise the same line
            if self.world.main:
                shutil.rmtree(self.aside, ignore_errors=True)
            room = f"it needs {self.need / 1e9:.2f} GB of {free / 1e9:.2f} free"
            advice = "earlier checkpoints are intact: free some space, --resume=auto"
            raise CheckpointError(
                f"{self.final}: cannot be written ({error}; {room}); {advice}"
            ) from None


def everywhere(action, kind=UserError):
    """action() on each rank; where one raises an error of the kind, all raise CheckpointError."""
    result = None
    problem = None
    try:
        result = action()
    except kind as error:
        problem = str(error) if isinstance(error, (UserError, OSError)) else repr(error)
    for rank, words in enumerate(parallel.gather_objects(problem)):
        if words:
            raise CheckpointError(f"rank {rank}: {words}" if rank else words)
    return result


def position_of_ranks(loader):
    """A loader's state_dict(). Raises CheckpointError unless all ranks have the same."""
    position = loader.state_dict()
    if found := agreement.difference({"loader": str(position)}):
        raise CheckpointError(f"the loader's state must be the same on all ranks: {found}")
    return position


def begin_folder(aside, state):
    """Creates the temporary folder with state.json and copies of the run's code and tokenizer."""
    out_dir = aside.parent
    delete_hidden(out_dir)
    aside.mkdir(parents=True)
    values = state.pop("values", None)
    if values is not None:  # in a line: of a large model there are thousands
        files.write_atomic(aside / "values.json", json.dumps(values))
    files.write_json(aside / "state.json", state)
    copies = {}
    if (out_dir / "source.json").is_file():
        copies = {out_dir / name: name for name in source.KEPT}
    tokenizer = tokenizer_file(out_dir, state.get("config", {}).get("tokenizer"))
    if tokenizer:
        copies |= {path: path.name for path in tokenizers.beside(tokenizer.parent)}
        # only if it is one, since a manifest may name any file
        if tokenizers.is_one(tokenizer, tokenizer.stat().st_mtime_ns):
            copies[tokenizer] = f"tokenizer{tokenizer.suffix}"
    for path, name in copies.items():
        with contextlib.suppress(OSError):  # a file that cannot be read costs no checkpoint
            files.write_atomic(aside / name, path.read_bytes())


def tokenizer_file(out_dir, name):
    """The path of the tokenizer's file of a run, or of its newest copy in a checkpoint, or None."""
    if name is None or tokenizers.built_in(name):
        return None
    path = tokenizers.file_of(name)
    if path and path.is_file():
        return path
    for folder in reversed(folders(out_dir)):
        if carried := carried_tokenizer(folder):
            return Path(carried)
    return None


def carried_tokenizer(folder):
    """The path of the tokenizer's file in a checkpoint, a text; None if it holds none."""
    for name in ("tokenizer.json", "tokenizer.model"):
        path = Path(folder) / name
        if path.is_file():
            return str(path)
    return None


@dataclass
class File:
    """A safetensors file that this rank is to write."""

    name: str
    tensors: dict  # {name: tensor}
    shards: dict  # {name: (first row, rows of the whole tensor)} of those that are shards


@torch.no_grad()
def write_files(aside, own):
    """Writes each File of a list -> {file name: digest}."""
    digests = {}
    if not aside.is_dir():
        raise OSError(
            f"{aside} is not there: out_dir must be on a file system that all nodes share"
        )
    for file in own:
        path = aside / file.name
        header = {"shards": json.dumps(file.shards)} if file.shards else None
        tensors = {name: t[...].cpu().contiguous() for name, t in file.tensors.items()}
        with files.by_umask(path):
            save_file(tensors, path, header)
        files.sync(path)
        digests[file.name] = files.digest(path)
    return digests


def saved_settings(folder, state):
    """(settings in a checkpoint's state, their GPTConfig), with today's types and ranges.

    What is read has been checked for them.
    """
    try:
        config = typed(Config, state.get("config"), SHAPE | {*SCHEDULE, *OTHERS_READ})
        shape = GPTConfig(**{name: config[name] for name in SHAPE & config.keys()})
        refuse(shape.problems())
    except UserError as error:
        raise CheckpointError(f"{folder}/state.json is damaged: {error}") from None
    return config, shape


def rank_tensors(model, device):
    """This rank's random-number states and, with fp8, the amax values that set its next scales."""
    state = generators.states(device)
    if amaxes := magnitudes(model):
        state["magnitudes"] = torch.cat(amaxes).cpu()
    return state


def load_rank_tensors(tensors, model, rank, device):
    """Restores this rank's state; returns False if none is there for it and this type of device."""
    own = {kind: tensor[...] for kind, tensor in with_prefix(tensors, f"{rank}.").items()}
    if device.type not in own:
        return False
    # torch raises errors of several types
    with as_user_error(f"rng.safetensors: no state of rank {rank}", CheckpointError):
        generators.restore(own, device)
        amaxes = magnitudes(model)
        sizes = [amax.numel() for amax in amaxes]
        saved = own.get("magnitudes", torch.empty(0))
        if len(saved) == sum(sizes):  # DDP has two for a weight, FSDP2 one
            for amax, value in zip(amaxes, saved.split(sizes)):
                amax.copy_(value)
    return True


def magnitudes(model):
    """Buffers with the amax of fp8's previous calls, in the model's order.

    They are saved, so that the scales go on. Of a buffer only the first two values are more than 0
    between its calls.
    """
    buffers = model.named_buffers()
    return [buffer.view(-1)[:2] for name, buffer in buffers if name.endswith("_amax")]


@dataclass
class SavedModel:
    """A trained model, of which no weights are read yet."""

    tensors: dict  # {name: tensor or MergedTensor}
    shape: GPTConfig
    tokenizer: str | None  # its name or file
    document_mask: bool = False  # whether it was trained with it


def open_model(path):
    """The SavedModel of a run's folder or a checkpoint."""
    folder = find(path)
    warn(source.warning(folder))
    tensors, state = open_merged(folder)
    config, shape = saved_settings(folder, state)
    return SavedModel(
        tensors["model"] | tensors.get("buffers", {}),
        shape,
        carried_tokenizer(folder) or config.get("tokenizer"),
        config.get("document_mask", False),
    )


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
    load_resharded(model, saved.tensors)
    return model.eval()
