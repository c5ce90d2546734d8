"""Checkpoints: one folder for each saved step, complete or absent. Loading one cannot run code: nothing is pickled.

out_dir/step_00000250/
    model.safetensors       weights by name, shared ones once
    optimizer.safetensors   optimizer state by parameter name
    rng.safetensors         random-number state of every rank, and with fp8 the amax values behind its next scales
    state.json              step, configuration, loader position, schedule, git revision
    tokenizer.json          the tokenizer and what lies beside it, unless it has a name (gpt2)
    manifest.json           bytes and SHA-256 of the files above

With a sharded model, each rank writes the rows that it holds, to model.rank00003.safetensors and
optimizer.rank00003.safetensors, whose headers give the first row and the number of rows in all. Both layouts are read
by rows (Stored), so a run resumes on any number of ranks, and each rank reads its own rows only. The alternative,
torch.distributed.checkpoint, reshards too, but its index is a pickle; its safetensors writer keeps no index, but would
be a second layout, without digests.

A folder is written under another name, synced and renamed, so that a folder named step_* is complete. out_dir must be
on a file system that all nodes share. `python convert.py --checkpoint=FOLDER --out=NEW` merges the files of the ranks.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import model as models
from configurator import UserError, refuse, too_small, typed
from corpus import tokenizer as tokenizers
from fast.attention import best_attention
from run import files
from run.logger import NotFinite
from run.source import git_revision
from scale import parallel
from scale.shards import copy_into, is_first_copy, local, own_rows
from settings import Config, GPTConfig


class CheckpointError(UserError):
    exit_code = 4


def entry(value):
    """[bytes, SHA-256]"""
    return isinstance(value, list) and len(value) == 2 and files.count(value[0]) and files.sha256(value[1])


def loss(value):
    """a loss, a finite number from 0"""
    return files.number(value) and value >= 0


STATE = {"step": files.count, "config?": {}, "git?": (files.text, None), "wandb_id?": (files.text, None)}
STATE |= {"val_loss?": (loss, None), "evaluated?": files.flag, "world_size?": files.count}
STATE |= {"loader?": {"rows": files.count}, "scaler?": {}}
SCHEDULE = ("max_steps", "batch_tokens", "lr", "min_lr_ratio", "schedule", "warmup_steps", "warmup_tokens")
SCHEDULE += ("cooldown_fraction",)
READ = {f.name for f in fields(GPTConfig)} - {"attention"} | {*SCHEDULE, "optimizer", "weights", "tokenizer"}
BESIDE = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")
TABLES = (
    "wte.weight",
    "head.weight",
    "values.weight",
)  # how names end whose tensors have a row for each token id


def save(out_dir, step, tensors, state, keep_last=2):
    """Writes out_dir/step_<step>, prunes older checkpoints, and returns the path. One rank calls it.

    tensors: {"model": {name: tensor or Stored}, …}, one file for each key; state: what state.json has besides the step
    and the git revision. Raises CheckpointError if it cannot be written; earlier checkpoints are not touched.
    """
    final = folder_of(out_dir, step)
    with _whole_or_absent(final, _room(final, tensors)):
        _begin(final, step, state)
        manifest = _write(final, {f"{name}.safetensors": (group, {}) for name, group in tensors.items()})
        _publish(final, manifest, keep_last)
    return final


class Saver:
    """Saves a run; with cfg.async_save a thread writes from a copy in the CPU's memory while training continues.

    All ranks make the same calls in the same order. The thread runs no collective: the main thread does, and renames
    the folder once all ranks have written. A failure on any rank raises CheckpointError on all of them.
    """

    def __init__(self, cfg, world, saved=print, last=None, evaluated=True):
        """saved(step, folder): called once a checkpoint is there. last: step of the checkpoint that the run resumed from. evaluated: False where it was told to stop before it
        had that step's validation loss, which decides whether the checkpoint is the best: it is then saved once more.
        """
        self.cfg, self.world, self.saved, self.last, self.evaluated = cfg, world, saved, last, evaluated
        self.thread, self.pending = (
            ThreadPoolExecutor(1),
            None,
        )  # pending: folder, room, future of the digests

    def due(self, step, at_end):
        """Whether to save after `step` steps: every cfg.save_interval, and at the end."""
        every = 0 if self.cfg.dry_run else self.cfg.save_interval
        saved = step == 0 or step == self.last and self.evaluated
        return bool(every) and not saved and (at_end or step % every == 0)

    def save(self, step, model, optimizer, state):
        """Waits for the previous save, starts the one after `step` steps, and without async_save waits for it too."""
        self.wait()
        parallel.reshard(model)
        if not parallel.all_finite(model):
            since = (
                "nothing was saved yet" if self.last is None else f"the last checkpoint is step {self.last}'s"
            )
            raise NotFinite(
                f"step {step}: weights are inf or NaN and were not saved; {since}; try a lower --lr"
            )
        self.last, self.evaluated = step, True
        final = folder_of(self.cfg.out_dir, step)
        groups = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        ranks, rooms = zip(
            *parallel.gather_objects((rank_tensors(model, self.world.device), _room(final, groups)))
        )

        def begin():
            if self.world.main:
                _begin(final, step, {"world_size": self.world.size, **state})
            return self._own_files(groups, ranks)

        with _whole_or_absent(final, rooms[0], self.world.main):
            self.pending = final, rooms[0], self.thread.submit(_write, final, _agreed(begin))
        if not self.cfg.async_save:
            self.wait()

    def _own_files(self, groups, ranks):
        """{file name: (tensors, shards)} that this rank writes. async_save copies them, since training changes them."""
        contents = {}
        for group, tensors in groups.items():
            own = {name: local(t) for name, t in tensors.items() if is_first_copy(t)}
            parts = [name for name, t in own.items() if t.shape != tensors[name].shape]
            shards = {name: [own_rows(tensors[name])[0], len(tensors[name])] for name in parts}
            suffix = f".rank{self.world.rank:05d}" if shards else ""
            if own:
                own = {name: copied(t) for name, t in own.items()} if self.cfg.async_save else own
                contents[f"{group}{suffix}.safetensors"] = own, shards
        parallel.synchronize(self.world.device)
        if self.world.main:
            states = {f"{rank}.{kind}": t for rank, found in enumerate(ranks) for kind, t in found.items()}
            contents["rng.safetensors"] = states, {}
        return contents

    def written(self):
        """1.0 if this rank has written its files of the save in progress; if all ranks have, `wait` returns at once."""
        return float(self.pending is not None and self.pending[2].done())

    def wait(self):
        """Waits for the save in progress, if there is one, and publishes it."""
        if self.pending is None:
            return
        (final, room, writing), self.pending = self.pending, None
        with _whole_or_absent(final, room, self.world.main):
            parts = parallel.gather_objects(_agreed(writing.result))
            manifest = {name: digest for part in parts for name, digest in part.items()}
            _agreed(lambda: self.world.main and _publish(final, manifest, self.cfg.keep_last))
        self.saved(self.last, final)


def copied(tensor):
    """A copy on the CPU, complete once the device is synchronized; pinned memory takes it at the bus's full rate."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _agreed(action):
    """Returns action() of this rank; if it failed on any rank, raises the same OSError on every rank."""
    result = error = None
    try:
        result = action()
    except (OSError, SafetensorError) as problem:
        error = str(problem)
    except Exception as problem:  # any type: the other ranks wait in the collective below
        error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
    errors = parallel.gather_objects(error)
    failed = [
        f"rank {rank}: {error}" if len(errors) > 1 else error for rank, error in enumerate(errors) if error
    ]
    if failed:
        raise OSError(failed[0] + f" and {len(failed) - 1} ranks more" * (len(failed) > 1))
    return result


def _room(final, groups):
    """The disk space that a checkpoint needs and the free space, in words."""
    need = sum(t.shape.numel() * t.dtype.itemsize for group in groups.values() for t in group.values())
    free = shutil.disk_usage(final.parent).free if final.parent.is_dir() else 0
    return f"it needs {need / 1e9:.2f} GB of {free / 1e9:.2f} free"


@contextlib.contextmanager
def _whole_or_absent(final, room, main=True):
    """Turns a failure to write into a CheckpointError, and removes what was written of the folder `final`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if main:
            shutil.rmtree(_aside(final), ignore_errors=True)
        raise CheckpointError(
            f"{final}: cannot write the checkpoint ({error}); {room}; "
            "earlier checkpoints are intact: free some space and go on with --resume=auto"
        ) from None


def _aside(final):
    return final.with_name(f".writing_{final.name}")


def _begin(final, step, state):
    """Creates the temporary folder with state.json in it; removes the leftovers of killed saves."""
    for leftover in final.parent.glob(".writing_*"):
        shutil.rmtree(leftover)
    _aside(final).mkdir(parents=True)
    files.write_json(_aside(final) / "state.json", {"step": step, "git": git_revision(), **state})
    _carry_tokenizer(final, state.get("config", {}).get("tokenizer"))


def _carry_tokenizer(final, name):
    """Copies a tokenizer that is a file, and what lies beside it, since the checkpoint may leave this machine."""
    source = name and tokenizers.file_of(name)
    if name and not tokenizers.built_in(name) and not (source and source.is_file()):  # the run was moved
        source = next(
            (path for folder in _folders(final.parent)[::-1] if (path := carried_tokenizer(folder))), None
        )
    for path in [source, *map(source.with_name, BESIDE)] if source else []:
        with contextlib.suppress(OSError):  # a file that cannot be read costs no checkpoint
            data, name = path.read_bytes(), "tokenizer" + path.suffix if path == source else path.name
            files.write_atomic(_aside(final) / name, data)


def carried_tokenizer(folder):
    """The file of the tokenizer in a checkpoint, or None."""
    paths = (Path(folder) / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((path for path in paths if path.is_file()), None)


def _write(final, contents):
    """Writes {file name: (tensors, shards)} to the temporary folder; returns {file name: digest}.

    shards: {name: [first row, rows in all]} for tensors of which a rank has a part.
    """
    digests = {}
    if not _aside(final).is_dir():
        raise OSError(f"{_aside(final)} is not there: out_dir must be on a file system that all nodes share")
    for name, (tensors, shards) in contents.items():
        path = _aside(final) / name
        header = {"shards": json.dumps(shards)} if shards else None
        save_file({k: t[...].detach().cpu().contiguous() for k, t in tensors.items()}, path, header)
        files.sync(path)
        digests[name] = _digest(path)
    return digests


def _publish(final, manifest, keep_last):
    """Writes the manifest of a folder whose files are complete, gives it its name, and prunes older checkpoints."""
    aside = _aside(final)
    others = {path.name: _digest(path) for path in sorted(aside.iterdir()) if path.suffix != ".safetensors"}
    files.write_json(aside / "manifest.json", manifest | others)
    if final.exists():  # a resumed run saved the same step again
        _remove(final)
    os.rename(aside, final)
    files.sync(final.parent)
    _looked_at[final] = _stamps(final), None
    prune(final, keep_last)


def folder_of(out_dir, step):
    return Path(out_dir) / f"step_{step:08d}"


def prune(final, keep_last):
    """Keeps the newest keep_last whole checkpoints up to `final` and the one with the lowest validation loss.

    Damaged ones among these do not count and stay; older ones are removed. Checkpoints of later steps than `final`
    belong to another attempt, or are damaged; they stay too.
    """
    older, keep, whole = [f for f in _folders(final.parent) if f <= final][::-1], set(), 0
    for folder in older:
        if whole < keep_last:
            keep.add(folder)
            whole += _damage(folder) is None
    losses = {f: _val_loss(f) for f in older}
    scored = sorted((f for f in older if losses[f] is not None), key=losses.get)
    keep |= {next((f for f in scored if _damage(f) is None), final)}
    for folder in older:
        if folder not in keep:
            _remove(folder)


def _val_loss(folder):
    try:
        return _read_state(folder).get("val_loss")
    except CheckpointError:
        return None


def _remove(folder):
    """Deletes a checkpoint; if the process is killed meanwhile, no folder is left that looks complete."""
    if folder.is_symlink():
        folder.unlink()
        return
    gone = folder.with_name(f".writing_gone_{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _folders(out_dir):
    """Complete checkpoints, oldest first."""
    return sorted(
        p for p in Path(out_dir).glob("step_*") if p.is_dir() and re.fullmatch("step_[0-9]+", p.name)
    )


def problem(folder):
    """Why a checkpoint folder is damaged, in words; None if every file is there with its recorded SHA-256.

    All ranks call it, and each reads some of the files.
    """
    found = parallel.gather_objects(_first_wrong(Path(folder), *parallel.rank_and_size()))
    wrong = next(filter(None, found), None)
    _looked_at[Path(folder)] = _stamps(folder), wrong
    return wrong


_looked_at = {}  # {checkpoint: (its _stamps then, what was wrong)}, so that a save need not read older ones again


def _stamps(folder):
    """What changes in a folder when one of its files does."""
    stats = {p.name: p.lstat() for p in Path(folder).glob("*")}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def _damage(folder):
    """As `problem`, but one rank alone calls it; a folder that has not changed since is not read again."""
    stamps, wrong = _looked_at.get(folder, (None, None))
    if stamps != _stamps(folder):
        wrong = _first_wrong(folder)
        _looked_at[folder] = _stamps(folder), wrong
    return wrong


def _first_wrong(folder, rank=0, ranks=1):
    """What is wrong with the manifest and with the files that this rank is to check, in words, or None."""
    try:
        manifest = files.read_json(folder / "manifest.json", CheckpointError, {str: entry})
    except CheckpointError as error:
        return str(error).removeprefix(f"{folder}/")
    names = [path.name for path in folder.glob("*.safetensors")]
    if missing := {"state.json", *names} - manifest.keys():
        return f"manifest.json does not name {min(missing)}"
    if not any(name.startswith("model.") for name in manifest):
        return "manifest.json names no weights"
    manifest = dict(list(manifest.items())[rank::ranks])
    for name, (size, _) in manifest.items():
        path = folder / name
        if not files.plain_name(name) or path.is_symlink():
            return f"manifest.json names {name!r}, which is not a file in the folder"
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} has {path.stat().st_size if path.is_file() else 'no'} bytes, expected {size}"
    with ThreadPoolExecutor() as pool:
        for name, found in zip(manifest, pool.map(_digest, [folder / n for n in manifest])):
            if found != manifest[name]:
                return f"{name} does not match its SHA-256"
    try:
        rank == 0 and open_folder(folder)
    except CheckpointError as error:
        return str(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: ")
    return None


def find(path):
    """The checkpoint folder that `path` names: path itself, or the newest undamaged checkpoint in a run's folder.

    All ranks call it and get the same result. It prints a warning for each damaged folder that it skips, and leaves the
    folder in place. Raises CheckpointError if there is no undamaged one.
    """
    path = Path(path)
    folders = (
        [path]
        if (path / "manifest.json").is_file() or path.name.startswith("step_")
        else _folders(path)[::-1]
    )
    main = parallel.rank_and_size()[0] == 0
    for folder in folders:
        wrong = problem(folder)
        if wrong is None:
            if main and folder != folders[0]:
                print(f"warning: taking {folder}, the newest that is whole", file=sys.stderr)
            return folder
        if main:
            print(f"warning: {folder} is damaged ({wrong}); left in place", file=sys.stderr)
    hint = f"{len(folders)} damaged; expected a run's folder, or one of its step_*/ with manifest.json"
    if (path / "config.json").is_file() and any(path.glob("model*.safetensors")):
        hint = f"Hugging Face weights are --init_from=hf:{path}, or --pretrained={path} of sample.py"
    elif not path.exists():
        hint = "no such folder; expected a run's, or one of its step_*/"
    raise CheckpointError(f"{path}: no whole checkpoint there ({hint})")


def later(out_dir, folder):
    """The newest checkpoint in out_dir if its step is later than that of the checkpoint `folder`, else None."""
    newest = _folders(out_dir)[-1:]
    return newest[0] if newest and newest[0].name > folder.name else None


def exists(out_dir):
    return bool(_folders(out_dir))


class Stored:
    """A tensor in one or more files: stored[a:b] reads rows a to b to the CPU, stored[...] reads all.

    parts: pairs (first row, slice of safetensors) that together hold each row exactly once. A part's own rows count
    from 0.
    """

    def __init__(self, name, parts, rows=None):
        """rows: the expected number of rows; None: the number that the parts hold."""
        self.parts = sorted(parts, key=lambda part: part[0])
        shapes = [tuple(part.get_shape()) for _, part in self.parts]
        ends = [first + shape[0] if shape else 0 for (first, _), shape in zip(self.parts, shapes)]
        rows = ends[-1] if rows is None else rows
        widths = {shape[1:] for shape in shapes}
        kinds = {part[slice(0, 0) if shape else ...].dtype for (_, part), shape in zip(self.parts, shapes)}
        complete = [first for first, _ in self.parts] == [0, *ends[:-1]] and ends[-1] == rows
        if not complete or len(widths) > 1 or len(kinds) > 1:
            raise CheckpointError(
                f"{name}: rows are missing or there twice, expected {rows}; is a rank's file gone?"
            )
        self.shape = torch.Size((rows, *shapes[0][1:]) if shapes[0] else ())
        self.dtype = min(kinds, key=str)

    def __getitem__(self, rows):
        if rows is ...:
            if len(self.parts) == 1:
                return self.parts[0][1][...]
            rows = slice(0, self.shape[0])
        pieces = []
        for first, part in self.parts:
            a, b = max(rows.start - first, 0), min(rows.stop - first, part.get_shape()[0])
            if a < b:
                pieces.append(part[a:b])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def load(folder):
    """(tensors, state) of a checkpoint folder, as for `save`, on the CPU."""
    tensors, state = open_folder(folder)
    return {group: {name: t[...] for name, t in stored.items()} for group, stored in tensors.items()}, state


def open_folder(folder):
    """(tensors, state) as from `load`, but each tensor is a Stored, whose rows are read when they are indexed."""
    found, tensors = {}, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        group = path.name.partition(".")[0]
        file, shards = _open(path)
        for name in file.keys():
            first, rows = shards.get(name, (0, None))
            found.setdefault((group, name), ([], rows))[0].append((first, file.get_slice(name)))
    for (group, name), (parts, rows) in found.items():
        tensors.setdefault(group, {})[name] = Stored(f"{folder}: {name}", parts, rows)
    return tensors, _read_state(folder)


def _open(path):
    """(file, {name: [first row, rows in all]} of the tensors of which the file holds a part)."""
    try:
        file = safe_open(path, "pt")
        shards = json.loads((file.metadata() or {}).get("shards", "{}"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); nothing else is read") from None
    if wrong := files.misfit(shards, {str: _rows}):
        raise CheckpointError(f"{path} is damaged: in its header {wrong}")
    return file, shards


def _rows(value):
    """[first row, rows in all]"""
    return isinstance(value, list) and len(value) == 2 and all(map(files.count, value))


def model_tensors(model):
    """{name: tensor} of a model, without a tied head."""
    return dict(model.named_parameters())


def load_model_tensors(model, tensors, vocab_size=None):
    """Copies weights by name into `model`, on each rank the rows that it holds; names and shapes must agree.

    tensors: {name: tensor or Stored}. vocab_size: the rows of embeddings and head from this one on are padding and
    keep their values. Raises CheckpointError.
    """
    own = model_tensors(model)
    rows = _rows_to_load(own, tensors, vocab_size)
    for name, param in own.items():
        copy_into(param, tensors[name], rows[name])


def _rows_to_load(own, tensors, vocab_size=None):
    """{name: number of rows}; raises CheckpointError unless names, shapes and kinds of number agree."""

    def shape(name, tensor):
        rows = tensor.shape[0] if vocab_size is None or not name.endswith(TABLES) else vocab_size
        return (min(rows, tensor.shape[0]), *tensor.shape[1:]) if len(tensor.shape) else ()

    wrong = [f"{k}: not expected" for k in tensors.keys() - own.keys()]
    wrong += [f"{k}: missing" for k in own.keys() - tensors.keys()]
    both = own.keys() & tensors.keys()
    pairs = {k: (shape(k, tensors[k]), shape(k, own[k])) for k in both}
    wrong += [
        f"{k}: {found}, expected {expected}" for k, (found, expected) in pairs.items() if found != expected
    ]
    wrong += [f"{k}: {t}, expected floats" for k in both if not (t := tensors[k].dtype).is_floating_point]
    if wrong:
        raise CheckpointError(
            f"weights do not fit the model: {'; '.join(sorted(wrong)[:4])} ({len(wrong)} in all)"
        )
    return {name: shape[0] for name, (shape, _) in pairs.items()}


def optimizer_tensors(model, optimizer):
    """{"<parameter>.<state>": tensor} of any optimizer whose states are tensors."""
    names = {p: n for n, p in model.named_parameters()}
    return {f"{names[p]}.{k}": v for p, state in optimizer.state.items() for k, v in state.items()}


def load_optimizer_tensors(model, optimizer, tensors):
    """Fills a new optimizer with saved states, each on its parameter's device, as the fused AdamW requires.

    tensors: {"<parameter>.<state>": tensor or Stored}; a rank reads the rows that it holds of the parameter.
    """
    params = dict(model.named_parameters())
    _refuse_other_states(params, optimizer, tensors)
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        param = params[name]
        if kind in optimizer.state[param]:  # adamw8bit allocates its states when it is made
            copy_into(optimizer.state[param][kind], value)
        elif value.shape == param.shape:
            optimizer.state[param][kind] = torch.empty_like(param, requires_grad=False)
            copy_into(optimizer.state[param][kind], value)
        else:
            optimizer.state[param][kind] = value[...].to(param.device)


def _refuse_other_states(params, optimizer, tensors):
    """Raises CheckpointError unless each state fits its parameter, and parameters of a group have the same states."""
    kinds, wrong = {}, []
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        kinds.setdefault(name, set()).add(kind)
        if name not in params:
            wrong.append(f"{key}: not expected")
        elif (there := optimizer.state[params[name]].get(kind)) is not None:
            wrong += [f"{key}: another shape or type"] * (
                (there.shape, there.dtype) != (value.shape, value.dtype)
            )
        elif (
            not value.dtype.is_floating_point
            or value.shape != params[name].shape
            and value.shape.numel() != 1
        ):
            wrong.append(f"{key}: {value.dtype} {tuple(value.shape)}")
    names = {param: name for name, param in params.items()}
    for group in optimizer.param_groups:
        own = {names[p]: frozenset(optimizer.state[p]) for p in group["params"] if names[p] in kinds}
        found = {frozenset(kinds[name]) for name, made in own.items() if not made}
        bad = [name for name, made in own.items() if made and made != kinds[name]]
        wrong += [f"{bad[0] if bad else min(own)}: states are missing"] * (len(found) > 1 or bool(bad))
    if wrong:
        raise CheckpointError(f"optimizer states do not fit the model: {wrong[0]} ({len(wrong)} in all)")


def rank_tensors(model, device):
    """This rank's random-number state and, with fp8, the amax values from which its next scales are computed."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    tops = magnitudes(model)
    if tops:
        state["magnitudes"] = torch.cat([top.flatten() for top in tops]).cpu()
    return state


def load_rank_tensors(tensors, model, rank, device):
    """Restores this rank's state; returns False if the checkpoint has none for this rank and type of device."""
    if f"{rank}.{device.type}" not in tensors:
        return False
    try:
        torch.set_rng_state(tensors[f"{rank}.cpu"][...])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"{rank}.cuda"][...], device)
        tops, saved = magnitudes(model), tensors.get(f"{rank}.magnitudes")
        if tops and saved is not None:
            saved = saved[...].to(device).split([top.numel() for top in tops])
            for top, value in zip(tops, saved, strict=True):
                top.copy_(value.view_as(top))
    except (KeyError, RuntimeError, TypeError) as error:  # torch's, of a state that is none
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"rng.safetensors: no state for rank {rank} ({reason})") from None
    return True


def magnitudes(model):
    """Buffers with the amax of fp8's previous call, in the model's order; they are saved, so that scales go on."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_amax")]


def save_model(folder, model, cfg, step=0):
    """Writes a checkpoint of weights only, for --init_from, sample.py and hellaswag.py."""
    return save(folder, step, {"model": model_tensors(model)}, {"config": asdict(cfg)})


def load_model(path, device, precision="fp32", world=None):
    """(model on `device`, its configuration as a namespace) from a run's or a checkpoint's folder; see model_of."""
    tensors, shape, config = open_model(path)
    return model_of(tensors, shape, torch.device(device), precision, world), config


@torch.no_grad()
def model_of(tensors, shape, device, precision="fp32", world=None):
    """A GPT for evaluation with these weights: in bf16 where that is the precision, else in float32.

    tensors: {name: tensor or Stored}; one at a time is in memory in its own dtype. shape: a GPTConfig. world: the ranks
    among which FSDP2 divides the model, each of which reads its own rows only; None: the whole model is here.
    """
    model = models.on_meta(replace(shape, attention=best_attention(device, precision)[0]))
    for parameter in model.parameters() if precision == "bf16" else ():
        parameter.data = parameter.data.bfloat16()
    _rows_to_load(model_tensors(model), tensors, shape.vocab_size)  # before memory is taken for another shape
    if world:
        settings = Config(parallel="fsdp", precision=precision, tie_embeddings=shape.tie_embeddings)
        parallel.shard(
            model, settings, world, regular=False
        )  # a unit for each block, also where an edit repeats one
    models.allocate(model, device)
    for name, parameter in model.named_parameters():
        if name.endswith(TABLES):  # padding, which Hugging Face's files do not have
            local(parameter)[max(0, shape.vocab_size - own_rows(parameter)[0]) :] = 0
    load_model_tensors(model, tensors, shape.vocab_size)
    return model.eval()


def open_model(path):
    """({name: Stored}, GPTConfig, the whole configuration) of the weights in a run's or a checkpoint's folder.

    Saved settings that no longer exist are ignored. attention becomes auto: the best backend depends on the device.
    """
    folder = find(path)
    tensors, state = open_folder(folder)
    config = saved_settings(folder, state)
    shape = _shape(config)
    if carried := carried_tokenizer(folder):
        config["tokenizer"] = str(carried)
    return tensors["model"], shape, _Settings(config)


def saved_settings(folder, state):
    """The configuration in a checkpoint's state, of which what is read has the types of today's settings."""
    try:
        config = typed(Config, state.get("config"), READ)
        least = {name: 0 for name in SCHEDULE if name != "schedule"} | {"max_steps": 1, "batch_tokens": 1}
        refuse(_shape(config).problems() + too_small(_Settings(config), least))
    except UserError as error:
        raise CheckpointError(f"{folder}/state.json is damaged: {error}") from None
    return config


def _shape(config):
    return GPTConfig(
        **{f.name: config[f.name] for f in fields(GPTConfig) if f.name in config and f.name in READ}
    )


class _Settings:
    """A saved configuration; a setting that it does not have is None."""

    def __init__(self, values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def shape_differences(saved, cfg, free=()):
    """["n_embd: checkpoint 768, now 1024", …] for the fields that decide shapes and results, except those in `free`.

    saved: {field: value}. None is replaced by the value that it stands for before the comparison.
    """
    old = GPTConfig(**{f.name: saved.get(f.name, f.default) for f in fields(GPTConfig)})
    free = {"attention", "dropout", "label_smoothing", "z_loss", "zero_init", "max_positions", *free}
    if old.positions == cfg.positions == "learned" or old.rope_factor == cfg.rope_factor is None:
        free |= {"rope_low_freq", "rope_high_freq", "rope_original"}
    own = {"n_kv_head": "kv_heads", "n_hidden": "hidden"}  # the property that says what None means
    pairs = [(f.name, own.get(f.name, f.name)) for f in fields(GPTConfig) if f.name not in free]
    pairs = [(name, getattr(old, p), getattr(cfg, p)) for name, p in pairs]
    return [f"{name}: checkpoint {a}, now {b}" for name, a, b in pairs if a != b]


def _read_state(folder):
    """state.json of a checkpoint; {} where there is none. Raises CheckpointError if it is damaged."""
    path = Path(folder) / "state.json"
    state = files.read_json(path, CheckpointError, STATE) if path.exists() else {}
    if (named := re.fullmatch("step_([0-9]+)", Path(folder).name)) and state.get("step") not in (
        None,
        int(named[1]),
    ):
        raise CheckpointError(f"{path} is damaged: step is {state['step']}")
    return state


def _digest(path):
    """[bytes, SHA-256], as manifest.json holds them."""
    return list(files.digest(path))
