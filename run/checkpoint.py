"""Checkpoints: a folder for each saved step, complete or absent; without pickles, so loading runs no code.

docs/checkpoints.md lists the files of a folder. Of a sharded model each rank writes its rows, which are read
by rows (Stored) on any number of ranks. A folder is written under another name, synced and renamed.
"""

import contextlib
import glob
import json
import operator
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import model as models
from configurator import UserError, refuse, typed, warn
from corpus import tokenizer as tokenizers
from corpus import told
from fast.chips import best_attention
from run import files, source, states
from run.logger import NotFinite
from run.states import CheckpointError
from scale import generators, parallel
from scale.shards import copy_into, is_first_copy, local, rows_of
from settings import Config, GPTConfig

STATE = {"step": files.count, "config?": {}, "loader?": {}, "scaler?": {}, "tokens?": files.count}
STATE |= {"seconds?": files.number, "world_size?": files.count, "evaluated?": (True, False)}
STATE |= {"wandb_id?": (files.text, None), "val_loss?": (files.number, None)}  # val_loss: a State's score
SHAPE = {f.name for f in fields(GPTConfig)} - {"attention"}
SCHEDULE = "max_steps batch_tokens lr min_lr_ratio warmup_steps cooldown_fraction schedule".split()
SCHEDULE += "max_tokens max_seconds batch_schedule".split()
# other settings that decide what is trained and may be others at a resume, which is told
FREE = "seed dropout document_mask weight_decay beta1 beta2 clip lr_embedding lr_head momentum_warmup".split()
FREE += "max_skipped_steps precision reduce_dtype overfit eval_tokens".split()
READ = SHAPE | {*SCHEDULE, "optimizer", "tokenizer"}
VALUES = {
    "optimizer": "optimizer states",
    "buffers": "buffers",
    "own": "values of State.own",
}  # values.json's
DIGITS = "[0-9]" * 8
TABLES = ("wte.weight", "head.weight", "values.weight")  # ends of names of tensors with a row per token id


def folders(out_dir):
    """A run's checkpoints, oldest first: step_*/ that hold our files; a user's step_plans/ is none."""
    found = (Path(out_dir, name) for name in glob.glob(f"step_{DIGITS}", root_dir=out_dir))
    return sorted(p for p in found if (p / "manifest.json").is_file() or (p / "state.json").is_file())


def remove(folder):
    """Hides a checkpoint, then deletes it: what a kill leaves of it never looks complete."""
    os.rename(folder, gone := folder.with_name(f".writing_gone_{folder.name}"))
    delete(gone)


def delete(hidden):
    """Deletes a folder, or a link to one; what cannot be deleted stays hidden, and the next save tries it."""
    if hidden.is_symlink():
        hidden.unlink()
    else:
        shutil.rmtree(hidden, ignore_errors=True)


def put_in_place(aside, final):
    """Gives a written folder its name, in place of the same step that was saved before."""
    if is_other_step(final):
        number = 1
        while os.path.lexists(f"{final}_copy{number}"):
            number += 1
        other = final.with_name(f"{final.name}_copy{number}")
        os.rename(final, other)
        warn(f"{final} was of another step, by its state.json, and is now {other}")
    old = None
    if final in folders(final.parent):
        old = final.with_name(f".writing_old_{final.name}")
        os.rename(final, old)
    try:
        os.rename(aside, final)
    except OSError:
        if old:
            os.rename(old, final)
        raise
    files.sync(final.parent)
    if old:
        delete(old)


def bring_back(out_dir):
    """Gives back its name to a step that was saved again when a kill came between the renames of that."""
    for old in sorted(Path(out_dir).glob(f".writing_old_step_{DIGITS}")):
        final = old.with_name(old.name.removeprefix(".writing_old_"))
        for folder in (old.with_name(f".writing_{final.name}"), old):
            if not final.exists() and problem(folder) is None:
                os.rename(folder, final)
                warn(f"{final}: a kill left it hidden, as {folder.name}; it is back")


def is_other_step(folder):
    """Whether a checkpoint's name and its state.json are of two steps: it was copied or renamed."""
    try:
        step = read_state(folder).get("step")
    except CheckpointError:
        return False
    named = re.fullmatch(f"step_({DIGITS})", folder.name)
    return step is not None and named is not None and step != int(named[1])


def prune(final, keep_last, whole):
    """Keeps the newest keep_last up to `final`, the best, and later ones. whole: known as such.

    Those that are damaged do not count; such a one goes when it is older than those that are kept.
    """
    older = [f for f in folders(final.parent) if f <= final and not is_other_step(f)]
    losses = {}
    for folder in older:
        try:
            if folder in whole or problem(folder) is None:
                losses[folder] = read_state(folder).get("val_loss")
        except CheckpointError as error:
            whole.discard(folder)
            warn(f"{folder} was damaged while this run went on ({error})")
    whole.update(losses)
    best = min((f for f in losses if losses[f] is not None), key=losses.get, default=final)
    newest = list(losses)[-keep_last:]
    for folder in older:
        if folder not in (best, *newest) and (folder in whole or folder < newest[0]):
            remove(folder)


def find(path):
    """The checkpoint that `path` names: path itself, or a run's newest undamaged one. All ranks call it."""
    path, (rank, ranks) = Path(path), parallel.rank_and_size()
    single = path.match(f"step_{DIGITS}") or os.path.isfile(path / "manifest.json")
    names = None if single and os.path.exists(path) else [folder.name for folder in folders(path)[::-1]]
    names = parallel.gather_objects(names)[0]  # another node may not see the folder, or have its own
    found, first = [path] if names is None else [path / name for name in names], None
    for folder in found:
        wrong = problem_of_ranks(folder, rank, ranks)
        first = first or wrong
        if wrong or folder != found[0]:
            words = f"is damaged ({wrong}); left in place" if wrong else "is taken, the newest that is whole"
            warn(f"{folder} {words}")
        if wrong is None:
            return folder
    hint = "expected a run's folder, or one of its step_*/; Hugging Face weights are --init_from=hf:FOLDER"
    why = f"{len(found)} damaged" if os.path.exists(path) else "no such folder"
    if first:
        why += f", the newest: {first}"
    raise CheckpointError(f"{path}: no whole checkpoint there, {why} ({hint})")


def problem_of_ranks(folder, rank, ranks):
    """What is wrong with a checkpoint on any rank, perhaps of another node, in words; None if it is whole."""
    own = problem(folder, rank, ranks)
    manifest = None if own else files.digest(folder / "manifest.json")
    first = None
    for of_rank, (wrong, theirs) in enumerate(parallel.gather_objects((own, manifest))):
        if wrong:
            return f"rank {of_rank}: {wrong}" if of_rank else wrong
        first = first or theirs
        if theirs != first:
            return f"rank {of_rank} has another one of that name; all nodes must share the folder"
    return None


def problem(folder, rank=0, ranks=1):
    """What is wrong with a checkpoint, in words; None if it is whole. Each of the ranks reads other files."""
    folder = Path(folder)
    try:
        manifest = files.read_json(folder / "manifest.json", CheckpointError, {})
        held = [*folder.glob("*.safetensors"), *folder.glob("values.json")]
        if missing := {"state.json", *(p.name for p in held)} - manifest.keys():
            return f"manifest.json does not name {min(missing)}"
        for name in manifest:
            if not files.plain_name(name) or (folder / name).is_symlink() or not (folder / name).is_file():
                return f"manifest.json names {name!r}, which is not a file in the folder"
        if is_other_step(folder):
            return f"it is of step {read_state(folder)['step']}: copied, or renamed"
        own = sorted(manifest)[rank::ranks]
        with ThreadPoolExecutor() as pool:
            for name, found in zip(own, pool.map(files.digest, [folder / name for name in own])):
                if list(found) != manifest[name]:
                    return f"{name} is not as long as manifest.json says, or has another SHA-256"
        return None if rank or "model" in open_folder(folder)[0] else "it holds no weights"
    except (CheckpointError, OSError) as error:
        return str(error)


def save(out_dir, step, tensors, state, keep_last=2):
    """As Saver.write, of a process alone; returns the folder."""
    saver = Saver(parallel.World(0, 1, torch.device("cpu")), out_dir, keep_last, saved=lambda *_: None)
    saver.write(step, tensors, state)
    return saver.final


class Saver:
    """Saves a run, with async_save from a copy in the CPU's memory. All ranks make the same calls."""

    def __init__(self, world, out_dir, keep_last, async_save=False, last=None, saved=print):
        """last: the resumed checkpoint, if in out_dir. saved(step, folder) follows each save."""
        self.world, self.out_dir, self.keep_last = world, Path(out_dir), keep_last
        self.background, self.saved = async_save, saved
        self.last = None if last is None else read_state(last)["step"]  # of the last save
        self.whole = set() if last is None else {last}  # for prune
        self.thread, self.pending = ThreadPoolExecutor(1), None  # pending: the future of _write

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """Ends a save in the background that was begun before the numbers were no longer finite."""
        if kind is NotFinite:
            self.wait()

    def due(self, step, every, at_end):
        """Whether to save after `step` steps: every so many, and at the end; never if every is 0."""
        return every > 0 and step not in (0, self.last) and (at_end or step % every == 0)

    def save(self, state, **facts):
        """Starts the save of a train.State when the one before is done; waits unless in the background.

        facts: what else state.json says of the run, such as its settings.
        """
        parallel.reshard(state.model)
        if not parallel.all_finite(state.model.parameters(), self.world.device):
            raise NotFinite(f"step {state.step}: weights are inf or NaN and were not saved; try a lower --lr")
        ranks = parallel.gather_objects(rank_tensors(state.model, self.world.device))
        tensors = {
            "model": dict(state.model.named_parameters()),
            "rng": {f"{rank}.{kind}": t for rank, found in enumerate(ranks) for kind, t in found.items()},
        }
        values, tensors["own_of_ranks"] = {}, {}
        for group in VALUES:
            values[group], tensors[group], alone = self.packed(group, state)
            tensors["own_of_ranks"] |= {f"{self.world.rank}.{group}.{name}": t for name, t in alone.items()}
        positions = parallel.gather_objects(state.loader.state_dict())
        for rank, position in enumerate(positions):
            if position != positions[0]:
                places = f"that of rank {rank} is {position}, rank 0's {positions[0]}"
                raise CheckpointError(f"the loader's state must be the same on all ranks: {places}")
        numbers = {
            "world_size": self.world.size,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "scaler": state.scaler.state_dict(),
            "loader": positions[0],
            "val_loss": state.score if state.evaluated == state.step else None,
            "values": values,
        }
        self.write(state.step, tensors, numbers | facts)

    def packed(self, group, state):
        """states.agree's of the optimizer, the buffers or the own state of a train.State; all are finite."""
        found = states.Packed(state.model)

        def pack():
            if group == "optimizer":
                return states.pack_optimizer(found, state.optimizer, state.model)
            held = state.own if group == "own" else persistent_buffers(state.model)
            return states.pack_own(found, held)

        tree = everywhere(pack)
        shared, tensors, alone = states.agree(tree, found, state.model, self.world.device)
        if group == "buffers":  # of which sample.py reads rank 0's
            tensors = persistent_buffers(state.model)
        held = [*found.by_rows.values(), *found.others.values()]
        if group == "buffers":  # a mask may hold -inf
            held = [t.nan_to_num(torch.nan, 0.0, 0.0) for t in held]
        if found.has_nan:
            held.append(torch.tensor(torch.nan))
        if not parallel.all_finite(held, self.world.device):
            what = f"step {state.step}: {VALUES[group]} are inf or NaN and were not saved"
            raise NotFinite(f"{what}; try a lower --lr")
        return shared, tensors, alone

    def write(self, step, tensors, state):
        """Saves {"model": {name: tensor or Stored}, ...}, a file for each key, and the `state`.

        Tensors of the key own_of_ranks are saved by each rank, all others once.
        """
        self.wait()
        self.last, self.final = step, self.out_dir / f"step_{step:08d}"
        self.aside = self.final.with_name(f".writing_{self.final.name}")
        need = sum(t.shape.numel() * t.dtype.itemsize for group in tensors.values() for t in group.values())
        free = shutil.disk_usage(self.out_dir).free if self.out_dir.is_dir() else 0
        self.room = f"it needs {need / 1e9:.2f} GB of {free / 1e9:.2f} free"

        def begin():
            if self.world.main:
                _begin(self.aside, {"step": step, **state})
            return {file: part for group in tensors.items() for file, part in self._part(*group).items()}

        self.pending = self.thread.submit(_write, self.aside, self._agreed(begin))
        if not self.background:
            self.wait()

    def _part(self, group, tensors):
        """{file name: (tensors, shards)}, for _write, of a group of which this rank writes; else {}."""
        apart = group == "own_of_ranks" and self.world.size > 1
        own = {k: t for k, t in tensors.items() if apart or is_first_copy(t)}
        own = {k: t if isinstance(t, Stored) else local(t) for k, t in own.items()}
        cut = [name for name, t in own.items() if t.shape != tensors[name].shape]
        shards = {name: (rows_of(tensors[name])[0], len(tensors[name])) for name in cut}
        if self.background:  # pinned memory takes a copy at the bus's full rate
            copies = {k: torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for k, t in own.items()}
            own = {name: copies[name].copy_(t, non_blocking=True) for name, t in own.items()}
            parallel.synchronize(self.world.device)
        parts = shards or apart
        name = f"{group}.rank{self.world.rank:05d}.safetensors" if parts else f"{group}.safetensors"
        return {name: (own, shards)} if own else {}

    def written(self):
        """1.0 if this rank has written its files of the save in progress; once all have, `wait` is short."""
        return float(self.pending is not None and self.pending.done())

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it."""
        if self.pending is None:
            return
        writing, self.pending = self.pending, None
        parts = parallel.gather_objects(self._agreed(writing.result))
        manifest = {name: digest for part in parts for name, digest in part.items()}
        self._agreed(lambda: self.world.main and self._publish(manifest))
        self.saved(self.last, self.final)

    def _publish(self, manifest):
        """Writes the manifest of a complete folder, gives it its name, and prunes older checkpoints."""
        manifest |= {p.name: files.digest(p) for p in self.aside.iterdir() if p.name not in manifest}
        files.write_json(self.aside / "manifest.json", manifest)
        put_in_place(self.aside, self.final)
        self.whole.add(self.final)
        try:
            prune(self.final, self.keep_last, self.whole)
        except OSError as error:
            warn(f"{self.out_dir}: older checkpoints are still there: {error}")

    def _agreed(self, action):
        """Returns action(); if it fails on a rank, removes what was written, CheckpointError on all ranks."""
        result = error = None
        try:
            result = action()
        except Exception as problem:  # any type: the other ranks wait in the collective below
            kind = "" if isinstance(problem, OSError) else f"{type(problem).__name__}: "
            error = f"rank {self.world.rank}: {kind}{problem}".partition("\n")[0] + f"; {self.room}"
        if failed := list(filter(None, parallel.gather_objects(error))):
            if self.world.main:
                shutil.rmtree(self.aside, ignore_errors=True)
            words = f"{self.final}: cannot be written on {len(failed)} ranks ({failed[0]})"
            raise CheckpointError(f"{words}; earlier checkpoints are intact: free some space, --resume=auto")
        return result


def everywhere(action):
    """action() on each rank; where it fails on one, all raise CheckpointError."""
    result = error = None
    try:
        result = action()
    except UserError as problem:
        error = str(problem)
    for found in parallel.gather_objects(error):
        if found:
            raise CheckpointError(found)
    return result


def _begin(aside, state):
    """Creates the temporary folder with state.json and copies of the run's code and tokenizer."""
    out_dir = aside.parent
    for path in out_dir.glob(f".writing_*step_{DIGITS}"):  # of killed processes
        shutil.rmtree(path, True) if path.is_dir() and not path.is_symlink() else path.unlink()
    aside.mkdir(parents=True)
    values = state.pop("values", None)
    if values is not None:  # in a line: of a large model there are thousands
        files.write_atomic(aside / "values.json", json.dumps(values))
    files.write_json(aside / "state.json", state)
    copies = {out_dir / name: name for name in source.KEPT if (out_dir / "source.json").is_file()}
    name = state.get("config", {}).get("tokenizer")
    earlier = map(carried_tokenizer, folders(out_dir)[::-1])  # for a run that was moved
    places = () if name is None or tokenizers.built_in(name) else (tokenizers.file_of(name), *earlier)
    if path := next((path for path in places if path and path.is_file()), None):
        copies |= {beside: beside.name for beside in tokenizers.beside(path.parent)}
        if tokenizers.is_one(path, path.stat().st_mtime_ns):  # a stranger's manifest may name any file
            copies |= {path: f"tokenizer{path.suffix}"}
    for path, name in copies.items():
        with contextlib.suppress(OSError):  # a file that cannot be read costs no checkpoint
            files.write_atomic(aside / name, path.read_bytes())


def carried_tokenizer(folder):
    """The file of the tokenizer in a checkpoint, or None."""
    paths = (Path(folder) / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((path for path in paths if path.is_file()), None)


def _write(aside, contents):
    """Writes {file name: (tensors, {name: (first row, rows)} of shards)} -> {file name: digest}."""
    digests = {}
    if not aside.is_dir():
        raise OSError(f"{aside} is not there: out_dir must be on a file system that all nodes share")
    for name, (tensors, shards) in contents.items():
        path, header = aside / name, {"shards": json.dumps(shards)} if shards else None
        with files.by_umask(path):
            save_file({k: t[...].detach().cpu().contiguous() for k, t in tensors.items()}, path, header)
        files.sync(path)
        digests[name] = files.digest(path)
    return digests


class Stored:
    """A tensor in one or more files: stored[a:b] reads rows a to b to the CPU, stored[...] reads all."""

    def __init__(self, name, parts, rows=None):
        """parts: [(first row, slice of safetensors)]. rows: the number expected; None: what parts hold."""
        self.parts = sorted(parts, key=lambda part: part[0])
        empty = [part[slice(0, 0) if part.get_shape() else ...] for _, part in self.parts]
        ends = [first + (part.get_shape() or [0])[0] for first, part in self.parts]
        rows = ends[-1] if rows is None else rows
        complete = [first for first, _ in self.parts] + [rows] == [0, *ends]
        if not complete or len({(part.shape, part.dtype) for part in empty}) > 1:
            raise CheckpointError(f"{name}: not each of {rows} rows is there once; is a rank's file gone?")
        self.shape = torch.Size((rows, *empty[0].shape[1:]) if empty[0].dim() else ())
        self.dtype = empty[0].dtype

    def __getitem__(self, rows):
        if rows is ... and len(self.parts) == 1:
            return self.parts[0][1][...]
        start, stop = (0, self.shape[0]) if rows is ... else (rows.start, rows.stop)
        spans = [(max(start - n, 0), min(stop - n, part.get_shape()[0]), part) for n, part in self.parts]
        pieces = [part[a:b] for a, b, part in spans if a < b]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def open_folder(folder):
    """(tensors, state) of a folder, as for `save`; each tensor is a Stored, read where it is indexed.

    state["values"], of values.json, says what the tensors of VALUES are; older checkpoints lack it.
    """
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        group = tensors.setdefault(path.name.partition(".")[0], {})
        with told(f"{path} is damaged or not safetensors", CheckpointError):
            file = safe_open(path, "pt")
            shards = json.loads((file.metadata() or {}).get("shards", "{}"))
            for name in file.keys():
                first, rows = map(operator.index, shards[name]) if name in shards else (0, None)
                group.setdefault(name, ([], rows))[0].append((first, file.get_slice(name)))
    for group in tensors.values():
        for name, parts in group.items():
            group[name] = Stored(f"{folder}: {name}", *parts)
    state, values = read_state(folder), Path(folder) / "values.json"
    if values.exists():
        state["values"] = files.read_json(values, CheckpointError, states.FORM)
    return tensors, state


def read_state(folder):
    """state.json of a checkpoint; {} where there is none. Raises CheckpointError if it is damaged."""
    path = Path(folder) / "state.json"
    return files.read_json(path, CheckpointError, STATE) if path.exists() else {}


def saved_settings(folder, state):
    """(settings in a checkpoint's state, their GPTConfig); what is read has today's types and ranges."""
    try:
        config = typed(Config, state.get("config"), READ)
        shape = GPTConfig(**{name: config[name] for name in SHAPE & config.keys()})
        refuse(shape.problems())
    except UserError as error:
        raise CheckpointError(f"{folder}/state.json is damaged: {error}") from None
    return config, shape


def persistent_buffers(model):
    """{name: tensor} of the buffers that a checkpoint holds."""
    found = {}
    for place, module in model.named_modules():
        for name, buffer in module.named_buffers(place, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    return found


def check_model_tensors(model, tensors, may_lack=()):
    """Raises CheckpointError unless {name: tensor or Stored} fit the model, padding rows aside.

    They are of its parameters and its persistent buffers; may_lack: names of which there may be none.
    """
    own = dict(model.named_parameters()) | persistent_buffers(model)
    vocab_size = model.cfg.vocab_size
    wrong = []
    for name in sorted(own.keys() - set(may_lack) | tensors.keys()):
        found, expected = (tuple(of[name].shape) if name in of else "absent" for of in (tensors, own))
        padded = name.endswith(TABLES) and found[1:] == expected[1:]
        if not (min(found[0], expected[0]) >= vocab_size if padded else found == expected):
            wrong.append(f"{name}: {found}, expected {expected}")
    if wrong:
        raise CheckpointError(f"weights do not fit the model: {'; '.join(wrong[:4])} ({len(wrong)} in all)")


def load_model_tensors(model, tensors, may_lack=()):
    """Copies {name: tensor or Stored}, on each rank its rows; padding rows that they lack are zeros.

    may_lack: names that keep their values where there are none. Returns those that did.
    """
    may_lack = set(may_lack) - tensors.keys()
    check_model_tensors(model, tensors, may_lack)
    for name, param in model.named_parameters():
        if name not in may_lack:
            copy_into(param, tensors[name])
    for name, buffer in persistent_buffers(model).items():
        if name not in may_lack:
            buffer.copy_(tensors[name][...])
    return sorted(may_lack)


def load_values(folder, tensors, values, state):
    """Puts what `Saver.packed` found into a train.State; tensors, values: of open_folder -> warnings."""
    model, ranks = state.model, parallel.rank_and_size()[1]
    open_group = partial(opened, folder, tensors, values, model)
    states.load_optimizer(state.optimizer, *open_group("optimizer"))
    warnings = states.load_own(state.own, *open_group("own"))
    buffers = values.get("buffers", {"of_each_rank": []})
    if buffers["of_each_rank"] and buffers["ranks"] != ranks:
        names = buffers["of_each_rank"]
        warnings.append(f"{names[0]} ({len(names)} in all) differed from rank to rank: all have rank 0's")
    elif buffers["of_each_rank"]:
        states.load_own(persistent_buffers(model), *open_group("buffers"))
    return warnings


def opened(folder, tensors, values, model, group):
    """(Unpacked, tree) of a group of values for this rank; the tree is None in older checkpoints."""
    rank, ranks = parallel.rank_and_size()
    what = f"{folder}: {VALUES[group]}"
    found = dict(tensors.get(group, {}))
    saved = values.get(group)
    if saved is None:
        return states.Unpacked(what, {}, found, model), None if group == "optimizer" else {}
    if (saved["of_each_rank"] or len(saved["trees"]) > 1) and saved["ranks"] != ranks:
        name = saved["of_each_rank"][0] if saved["of_each_rank"] else "what they hold"
        differ = f"{name} differs from rank to rank of the {saved['ranks']} that saved it"
        raise CheckpointError(f"{what}: {differ}; go on with as many, not {ranks}")
    start = f"{rank}.{group}."
    for name, tensor in tensors.get("own_of_ranks", {}).items():
        if name.startswith(start):
            found[name.removeprefix(start)] = tensor
    return states.Unpacked(what, saved, found, model), saved["trees"][rank % len(saved["trees"])]


def rank_tensors(model, device):
    """This rank's random-number states and, with fp8, the amax values from which its next scales follow."""
    state = generators.states(device)
    if amaxes := magnitudes(model):
        state["magnitudes"] = torch.cat([amax.flatten() for amax in amaxes]).cpu()
    return state


def load_rank_tensors(tensors, model, rank, device):
    """Restores this rank's state; returns False if there is none for this rank and type of device."""
    own = {name.partition(".")[2]: t[...] for name, t in tensors.items() if name.startswith(f"{rank}.")}
    if device.type not in own:
        return False
    with told(f"rng.safetensors: no state of rank {rank}", CheckpointError):  # torch has several errors
        generators.restore(own, device)
        sizes = [amax.numel() for amax in magnitudes(model)]
        if sizes and sum(sizes) == len(own.get("magnitudes", ())):  # DDP has two for a weight, FSDP2 one
            for amax, value in zip(magnitudes(model), own["magnitudes"].split(sizes)):
                amax.copy_(value.view_as(amax))
    return True


def magnitudes(model):
    """Buffers with the amax of fp8's previous call, in the model's order; saved, so that scales go on."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_amax")]


def open_model(path):
    """({name: Stored}, GPTConfig, tokenizer's name or file, if known) of a run's or a checkpoint's folder."""
    folder = find(path)
    warn(source.warning(folder))
    tensors, state = open_folder(folder)
    config, shape = saved_settings(folder, state)
    carried = carried_tokenizer(folder)
    tokenizer = str(carried) if carried else config.get("tokenizer")
    return tensors["model"] | tensors.get("buffers", {}), shape, tokenizer


@torch.no_grad()
def model_of(tensors, shape, device, precision="fp32", world=None):
    """A GPT in bf16 or fp32 with {name: tensor or Stored}. world: the ranks among which FSDP2 divides it."""
    model = models.on_meta(replace(shape, attention=best_attention(device, precision)[0]))
    for parameter in model.parameters() if precision == "bf16" else ():
        parameter.data = parameter.data.bfloat16()
    if world:
        from scale import fsdp

        settings = Config(parallel="fsdp", precision=precision, tie_embeddings=shape.tie_embeddings)
        fsdp.shard(model, settings, world)
    models.allocate(model, device)
    load_model_tensors(model, tensors)
    return model.eval()
