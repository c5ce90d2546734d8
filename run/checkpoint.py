"""A run's checkpoints, step_*/ in its folder: written, found, verified, read and pruned.

docs/checkpoints.md lists the files of a folder: safetensors and JSON, so that loading runs no code.
A folder is whole or absent: it is written under a hidden name and then renamed. Of a sharded model
each rank writes its rows into a file of its own, and any number of ranks read any rows of them.
"""

import contextlib
import glob
import hashlib
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
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
from scale.shards import copy_into, is_first_copy, local, rows_of
from settings import Config, GPTConfig
from system import files
from system.errors import UserError, listed, refuse, warn

DIGITS = "[0-9]" * 8
STATE_FORM = {"step": files.count, "config": {}, "tokens?": files.count, "seconds?": files.number}
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
        self.last = None  # step of the last save
        self.whole = set()  # checkpoints that need not be verified again
        self.best = {}
        if last is not None:
            self.last = last
            self.whole.add(self.folder_of(last))
            best = read_best(out_dir)
            if best.get("step", 0) <= self.last:  # else it is another attempt's
                self.best = best
        self.thread = ThreadPoolExecutor(1)
        self.pending = None  # the future of write_files

    def folder_of(self, step):
        return self.out_dir / f"step_{step:08d}"

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
        """Saves a train.State; facts: what else state.json says of the run, such as its settings.

        What cannot be saved ends all ranks before a file is begun.
        """
        self.wait()
        parallel.free_gathered(state.model)
        if drifted := parallel.copies_differ(state.model):
            what = f"{listed(drifted)}: the ranks' copies differ, which must not drift apart"
            raise CheckpointError(f"step {state.step}: {what}; earlier checkpoints are intact")
        tensors, values = everywhere(partial(pack, state))
        self.refuse_not_finite(state, tensors, values)
        own = files_of_rank(tensors, values)
        if self.background:
            for file in own:
                file.copy_to_host()
            parallel.synchronize(self.world.device)
        self.write(state.step, own, values | facts)

    def refuse_not_finite(self, state, tensors, values):
        leaves = values["leaves"].values()
        numbers = [x for x in leaves if isinstance(x, float) and not math.isinf(x)]
        checked = {
            "weights": state.model.parameters(),
            "optimizer states": tensors.get("optimizer", {}).values(),
            "values of State.own": tensors.get("own", {}).values(),
            "numbers": [torch.tensor([0.0, *numbers])],
        }
        for what, found in checked.items():
            if not parallel.all_finite(found, self.world.device):
                words = f"{what} are inf or NaN and were not saved; try a lower --lr"
                raise NotFinite(f"step {state.step}: {words}")

    def write(self, step, own, state):
        """Writes this rank's Files and, once, `state` as the checkpoint of a step."""
        self.last = step
        self.final = self.folder_of(step)
        self.aside = self.out_dir / f".writing_{self.final.name}"
        # no rank goes on before all have begun: rank 0's folder is then there
        self.or_removed(partial(self.begin, {"step": step, **state}))
        self.pending = self.thread.submit(write_files, self.aside, own)
        if not self.background:
            self.wait()

    def begin(self, state):
        """Makes the hidden folder, on rank 0, with state.json, the run's code and its tokenizer."""
        if not self.world.main:
            return
        for left in self.out_dir.glob(f".writing_step_{DIGITS}"):  # by a run that was killed
            delete(left)
        self.aside.mkdir()  # an error where out_dir was removed under the run
        files.write_json(self.aside / "state.json", state)
        copies = {self.out_dir / name: name for name in source.KEPT}
        tokenizer = tokenizer_file(self.out_dir, state["config"].get("tokenizer"))
        if tokenizer:
            copies |= {path: path.name for path in tokenizers.beside(tokenizer.parent)}
            # only if it is one, since what was loaded may name any file
            if tokenizers.is_one(tokenizer, tokenizer.stat().st_mtime_ns):
                copies[tokenizer] = f"tokenizer{tokenizer.suffix}"
        for path, name in copies.items():
            with contextlib.suppress(OSError):  # a file that cannot be read costs no checkpoint
                files.write_atomic(self.aside / name, path.read_bytes())

    def written(self):
        """Whether this rank has written its files of the save in progress."""
        return self.pending is not None and self.pending.done()

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it."""
        if self.pending is None:
            return
        writing = self.pending
        self.pending = None
        manifest = {}
        for digests in parallel.gather_objects(self.or_removed(writing.result)):
            manifest |= digests
        self.or_removed(partial(self.publish, manifest))
        self.saved(self.last, self.final)

    def publish(self, manifest):
        """On rank 0: gives a complete folder its name. What had that name gets another one."""
        if not self.world.main:
            return
        for path in self.aside.iterdir():
            if path.name not in manifest:
                manifest[path.name] = files.digest(path)
        files.write_json(self.aside / "manifest.json", manifest)
        read(self.aside)  # what cannot be read again is refused before it counts
        if os.path.lexists(self.final):
            other = f"{self.final}_before_{os.getpid()}"
            os.rename(self.final, other)
            warn(f"{self.final}, damaged or of another attempt, is now {other}")
        os.rename(self.aside, self.final)
        files.sync(self.out_dir)
        self.whole.add(self.final)
        self.prune()

    def or_removed(self, action):
        """action() on each rank; if it fails on one, what was written is removed and all raise."""
        try:
            return everywhere(action)
        except UserError as error:
            if self.world.main:
                shutil.rmtree(self.aside, ignore_errors=True)
            advice = "earlier checkpoints are intact: --resume=auto goes on from them"
            raise CheckpointError(f"{self.final} cannot be written: {error}; {advice}") from None

    def evaluated(self, step, score):
        """Notes that the evaluations due at a step have run; score: the lower the better, or None.

        Of a step that was not saved it notes nothing.
        """
        if not self.world.main or step != self.last:
            return
        if score is not None and score < self.best.get("score", math.inf):
            self.best |= {"step": step, "score": score}
        self.best["evaluated"] = step
        try:
            files.write_json(self.out_dir / "best.json", self.best)
        except OSError as error:
            warn(f"{self.out_dir}/best.json stays as it was: {error}")
        self.prune()

    def prune(self):
        """Removes all but the newest keep_last, the best, and those of later steps.

        Damaged ones do not count, and go with those that are older than what is kept; copies stay.
        """
        kept = 0
        for folder in reversed(folders(self.out_dir)):
            step = step_of(folder)
            if step > self.last or step == self.best.get("step"):
                continue
            with contextlib.suppress(CheckpointError):  # then it is damaged
                if is_copy(folder, read_state(folder)):
                    continue
            if kept == self.keep_last:
                try:
                    remove(folder)
                except OSError as error:
                    warn(f"{folder} stays, though a newer one is saved: {error}")
            elif folder in self.whole or problem(folder) is None:
                self.whole.add(folder)
                kept += 1


@dataclass
class File:
    """A safetensors file that this rank is to write."""

    name: str
    tensors: dict = field(default_factory=dict)  # {name: tensor}
    rows: dict = field(default_factory=dict)  # {name: (first row, rows of the whole tensor)}

    def add(self, name, tensor):
        """Adds the rows that this rank holds, unless a lower rank holds the same."""
        if not is_first_copy(tensor):
            return
        self.tensors[name] = local(tensor)
        if local(tensor).shape != tensor.shape:
            self.rows[name] = (rows_of(tensor)[0], len(tensor))

    def copy_to_host(self):
        """Replaces its tensors; pinned memory takes a copy at the bus's full rate."""
        for name, tensor in self.tensors.items():
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.tensors[name] = copy.copy_(tensor, non_blocking=True)


def files_of_rank(tensors, values):
    """[File] that this rank writes of what `pack` found.

    Of what is saved by rows, each rank writes its own; the rest is written once where all ranks
    have the same, else by each. Of buffers that differ, the model has rank 0's.
    """
    rank, _ = parallel.rank_and_size()
    apart = names_that_differ(tensors, values)
    alone = File(f"rank{rank:05d}.safetensors")
    found = [alone]
    for group, of_group in tensors.items():
        file = File(f"{group}.safetensors")
        found.append(file)
        for inner, tensor in of_group.items():
            name = f"{group}/{inner}"
            if name in apart:
                alone.tensors[name] = tensor
            if name not in apart or group == "model":
                file.add(inner, tensor)
        if file.rows:
            file.name = f"{group}.rank{rank:05d}.safetensors"
    return [file for file in found if file.tensors]


def names_that_differ(tensors, values):
    """Names of the tensors that each rank saves for itself.

    They are a rank's own, of the group "rank", and those that are neither saved by rows nor the
    same on all ranks. Raises CheckpointError where ranks differ in what is no tensor.
    """
    plain = {"the containers": values["tree"]}
    digests = {}
    differ = set()
    for name, leaf in values["leaves"].items():
        group, _, inner = name.partition("/")
        if not isinstance(leaf, dict) or "rows" in leaf:
            plain[name] = leaf
        elif group == "rank":
            differ.add(name)
        else:
            data = local(tensors[group][inner]).contiguous().reshape(-1).view(torch.uint8)
            digests[name] = hashlib.sha256(data.cpu().numpy()).hexdigest()
    if found := agreement.difference(plain):
        raise CheckpointError(f"{found}: a checkpoint may hold other tensors of each rank alone")
    for theirs in parallel.gather_objects(digests):
        differ.update(name for name, digest in digests.items() if theirs.get(name) != digest)
    return differ


@torch.no_grad()
def write_files(aside, own):
    """Writes each File of a list -> {file name: digest}."""
    digests = {}
    if not aside.is_dir():
        raise OSError(f"{aside} is not there: all nodes must share the file system of out_dir")
    for file in own:
        path = aside / file.name
        header = {"rows": json.dumps(file.rows)} if file.rows else None
        tensors = {name: tensor[...].cpu().contiguous() for name, tensor in file.tensors.items()}
        with files.by_umask(path):
            save_file(tensors, path, header)
        files.sync(path)
        digests[file.name] = files.digest(path)
    return digests


def everywhere(action):
    """action() on each rank; where one raises an error, all raise it, or a CheckpointError."""
    result = None
    error = None
    wrong = None
    try:
        result = action()
    except Exception as found:  # of any type: the other ranks wait
        error = found
        wrong = str(error) if isinstance(error, (UserError, OSError)) else repr(error)
    for rank, words in enumerate(parallel.gather_objects(wrong)):
        if words and words == wrong and isinstance(error, UserError):
            raise error
        if words:
            raise CheckpointError(f"rank {rank}: {words}" if rank else words)
    return result


def save_merged(out_dir, step, tensors, state):
    """Writes {group: {name: tensor or MergedTensor}} as a checkpoint of one file a group.

    Returns its folder.
    """
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    saver = Saver(parallel.World(0, 1, torch.device("cpu")), out_dir, keep_last=2)
    own = [File(f"{group}.safetensors", of_group) for group, of_group in tensors.items()]
    saver.write(step, own, state)
    return saver.final


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


# -- found and read


def folders(out_dir):
    """A run's checkpoints, oldest first; a user's own step_plans/ is none."""
    found = []
    for name in glob.glob(f"step_{DIGITS}", root_dir=out_dir):
        path = Path(out_dir, name)
        if (path / "manifest.json").is_file() or (path / "state.json").is_file():
            found.append(path)
    return sorted(found)


def remove(folder):
    """Hides a checkpoint, then deletes it: what a kill leaves of it never looks whole."""
    hidden = folder.with_name(f".writing_{folder.name}")
    os.rename(folder, hidden)
    delete(hidden)


def delete(path):
    """Deletes a folder, as far as it can be; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def step_of(folder):
    """The step in a checkpoint's name."""
    return int(Path(folder).name[-8:])


def read_state(folder):
    """state.json of a checkpoint. Raises CheckpointError if it is absent or damaged."""
    return files.read_json(Path(folder) / "state.json", CheckpointError, STATE_FORM)


def is_copy(folder, state):
    """Whether a checkpoint's name and its state.json are of two steps."""
    return folder.match(f"step_{DIGITS}") and state["step"] != step_of(folder)


def read_best(out_dir):
    """best.json of a run: {"step", "score"} of its best checkpoint, "evaluated": a step; or {}."""
    try:
        return json.loads((Path(out_dir) / "best.json").read_bytes())
    except (OSError, ValueError):
        return {}


def find(path):
    """The checkpoint that `path` names: path itself, or a run's newest whole one.

    All ranks call it.
    """
    path = Path(path)
    is_one = os.path.isfile(path / "manifest.json") or path.match(f"step_{DIGITS}")
    found = [path] if is_one else [*reversed(folders(path))]
    # rank 0's, since another node may not see the folder, or have its own
    found = parallel.gather_objects(found)[0]
    wrong = "no folder step_*"
    for number, folder in enumerate(found):
        wrong = problem_of_ranks(folder)
        if wrong is None:
            if number:
                warn(f"{folder} is taken, the newest that is whole")
            return folder
        warn(f"{folder} is damaged ({wrong}); left in place")
    hint = "expected a run's folder, or one of its step_*/"
    theirs = "Hugging Face weights are --pretrained=FOLDER, in train.py --init_from=hf:FOLDER"
    raise CheckpointError(f"{path}: no whole checkpoint there, {wrong} ({hint}; {theirs})")


def problem_of_ranks(folder):
    """What is wrong with a checkpoint on any rank, in words; None if it is whole."""
    rank, ranks = parallel.rank_and_size()
    own = problem(folder, rank, ranks)
    manifest = None if own else files.digest(folder / "manifest.json")
    of_ranks = parallel.gather_objects((own, manifest))
    for other, (wrong, theirs) in enumerate(of_ranks):
        if wrong:
            return f"rank {other}: {wrong}" if other else wrong
        if theirs != of_ranks[0][1]:
            return f"rank {other} has another one of that name; all nodes must share the folder"
    return None


def problem(folder, rank=0, ranks=1):
    """What is wrong with a checkpoint, in words; None if it is whole. Ranks hash other files."""
    try:
        with as_user_error(f"{folder}", CheckpointError):
            verify(Path(folder), rank, ranks)
    except CheckpointError as error:
        return str(error)
    return None


def verify(folder, rank, ranks):
    """Raises any error unless a checkpoint is whole."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    there = {path.name for path in folder.glob("*.safetensors")}
    if missing := (there | {"state.json"}) - manifest.keys():
        raise CheckpointError(f"manifest.json does not name {missing}")
    own = sorted(manifest)[rank::ranks]
    for name in own:
        path = folder / name
        if not files.plain_name(name) or path.is_symlink() or not path.is_file():
            raise CheckpointError(f"manifest.json names {name!r}, which is no file in the folder")
    with ThreadPoolExecutor() as pool:
        digests = pool.map(files.digest, [folder / name for name in own])
        for name, digest in zip(own, digests):
            if list(digest) != manifest[name]:
                raise CheckpointError(
                    f"{name} has another length or SHA-256 than manifest.json says"
                )
    tensors, state = read(folder)
    if "model" not in tensors:
        raise CheckpointError("it holds no weights")
    if is_copy(folder, state):
        raise CheckpointError(f"it is of step {state['step']}: copied, or renamed")


def read(folder):
    """({group: {name: MergedTensor}}, state.json) of a checkpoint, its ranks' files merged.

    A group is a file, or a file of each rank. Nothing of a tensor is read before it is asked for.
    """
    parts = {}  # {(group, name): [(first row, slice of safetensors)]}
    rows = {}  # {(group, name): rows of the whole tensor}
    for path in sorted(Path(folder).glob("*.safetensors")):
        group = path.name.partition(".")[0]
        with as_user_error(f"{path} is damaged or not safetensors", CheckpointError):
            file = safe_open(path, "pt")
            shards = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():
                first, rows[group, name] = shards.get(name, (0, None))
                parts.setdefault((group, name), []).append((first, file.get_slice(name)))
    tensors = {}
    for (group, name), found in parts.items():
        merged = MergedTensor(f"{folder}: {name}", found, rows[group, name])
        tensors.setdefault(group, {})[name] = merged
    with as_user_error(f"{folder}/state.json is damaged", CheckpointError):
        state = read_state(folder)
        shape_of(state["config"])
    return tensors, state


def shape_of(config):
    """The GPTConfig in a checkpoint's settings."""
    # the device that reads it chooses the attention
    names = {f.name for f in fields(GPTConfig)} & config.keys() - {"attention"}
    shape = GPTConfig(**{name: config[name] for name in names})
    refuse(shape.problems())
    return shape


def open_whole(path):
    """(folder, tensors, state) of `find` and `read`, while a run may prune what is found.

    All ranks call it, and take the same one.
    """
    for _ in range(5):
        folder = find(path)
        found = None
        with contextlib.suppress(CheckpointError):  # it was removed since
            found = read(folder)
        if all(parallel.gather_objects(found is not None)):
            return folder, *found
    raise CheckpointError(f"{path}: its checkpoints are removed while they are read")


class MergedTensor:
    """A tensor whose rows lie in one or more files: [a:b] reads rows a to b, [...] all."""

    def __init__(self, name, parts, rows=None):
        """parts: [(first row, slice of safetensors)]; rows: of all together, None: any number."""
        self.parts = sorted(parts, key=lambda part: part[0])
        first, part = self.parts[0]
        self.shape = torch.Size(part.get_shape())
        self.dtype = part[:0].dtype if self.shape else part[...].dtype
        if rows is None and len(self.parts) == 1:
            return
        end = 0
        for first, part in self.parts:
            if first == end:
                end += part.get_shape()[0]
        if rows not in (None, end):
            raise CheckpointError(f"{name}: {end} of {rows} rows are there: is a rank's file gone?")
        self.shape = torch.Size([end, *self.shape[1:]])

    def __getitem__(self, rows):
        if rows is ... and len(self.parts) == 1:
            return self.parts[0][1][...]
        if rows is ...:
            rows = slice(0, self.shape[0])
        pieces = []
        for first, part in self.parts:
            begin = max(rows.start - first, 0)
            end = min(rows.stop - first, part.get_shape()[0])
            if begin < end:
                pieces.append(part[begin:end])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
        fits = found == expected
        if name.endswith(TABLES) and found[1:] == expected[1:]:
            fits = min(found[0], expected[0]) >= model.cfg.vocab_size
        if not fits:
            wrong.append(f"{name}: {found}, expected {expected}")
    if wrong:
        few = "; ".join(wrong[:4])
        raise CheckpointError(f"weights do not fit the model: {few} ({len(wrong)} in all)")


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
    for name in ("tokenizer.json", "tokenizer.model"):
        if (Path(folder) / name).is_file():
            return str(Path(folder) / name)
    return None


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
