"""Checkpoints: one folder a step, complete or absent, and nothing in it that could run code when loaded.

out_dir/step_00000250/
    model.safetensors       weights by name, shared ones once
    optimizer.safetensors   optimizer state by parameter name
    rng.safetensors         random-number state of every rank, and its magnitudes for fp8's scales
    state.json              step, configuration, loader position, schedule, git revision
    manifest.json           bytes and SHA-256 of the files above

Of a sharded model each rank writes what it holds, model.rank00003.safetensors and optimizer.rank00003.safetensors: rows
of the tensors, and in the file's header which rows of how many. Either layout is read by rows (Stored), so that any
ranks go on from any others' and each reads its own part alone. torch.distributed.checkpoint would reshard too, but its
index is a pickle; its safetensors writer has none, but would be a second layout beside the plain one, without digests.

A folder is written under another name, synced, and renamed: what has the name step_* was finished. out_dir must be on a
file system that all nodes share. `python convert.py --checkpoint=FOLDER --out=NEW` merges the files of the ranks.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import parallel
from configurator import UserError
from model import GPTConfig, build


class CheckpointError(UserError):
    exit_code = 4


def save(out_dir, step, tensors, state, keep_last=2):
    """Writes out_dir/step_<step> and prunes older ones; returns its path. Call on one rank.

    tensors: {"model": {name: tensor or Stored}, …}, a file each; state: what state.json holds besides step and git
    revision. Raises CheckpointError when it cannot be written; earlier checkpoints stay as they are.
    """
    final = folder_of(out_dir, step)
    with _whole_or_absent(final, _room(final, tensors)):
        _begin(final, step, state)
        manifest = _write(final, {f"{name}.safetensors": (group, {}) for name, group in tensors.items()})
        _publish(final, manifest, keep_last)
    return final


class Saver:
    """Saves a run, with cfg.async_save while it goes on: from a copy in the CPU's memory, written by a thread.

    All ranks make the same calls in the same order. The thread knows of no other rank: collectives are for the main
    thread, which names the folder once all have written. A failure on any rank is a CheckpointError on all of them.
    """

    def __init__(self, cfg, world, say=print):
        self.cfg, self.world, self.say = cfg, world, say
        self.thread, self.pending = ThreadPoolExecutor(1), None  # pending: folder, room, what the thread will return

    def save(self, step, model, optimizer, state):
        """Begins to save a run after `step` steps, once the save before is through; ends it unless async_save."""
        self.wait()
        parallel.reshard(model)
        final = folder_of(self.cfg.out_dir, step)
        groups = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
        ranks, rooms = zip(*parallel.gather_objects((rank_tensors(model, self.world.device), _room(final, groups))))

        def begin():
            if self.world.main:
                _begin(final, step, {"world_size": self.world.size, **state})
            return self._own_files(groups, ranks)

        with _whole_or_absent(final, rooms[0], self.world.main):
            self.pending = final, rooms[0], self.thread.submit(_write, final, _agreed(begin))
        if not self.cfg.async_save:
            self.wait()

    def _own_files(self, groups, ranks):
        """{file name: (tensors, shards)} that this rank writes; copies with async_save, since training goes on."""
        files = {}
        for group, tensors in groups.items():
            own = {name: parallel.local(t) for name, t in tensors.items() if parallel.is_first_copy(t)}
            parts = [name for name, t in own.items() if t.shape != tensors[name].shape]
            shards = {name: [parallel.own_rows(tensors[name])[0], len(tensors[name])] for name in parts}
            suffix = f".rank{self.world.rank:05d}" if shards else ""
            if own:
                own = {name: copied(t) for name, t in own.items()} if self.cfg.async_save else own
                files[f"{group}{suffix}.safetensors"] = own, shards
        parallel.synchronize(self.world.device)
        if self.world.main:
            states = {f"{rank}.{kind}": t for rank, found in enumerate(ranks) for kind, t in found.items()}
            files["rng.safetensors"] = states, {}
        return files

    def written(self):
        """1.0 once this rank's part of a save under way is written: when all ranks' are, `wait` will not have to."""
        return float(self.pending is not None and self.pending[2].done())

    def wait(self):
        """Ends a save under way, if there is one."""
        if self.pending is None:
            return
        (final, room, writing), self.pending = self.pending, None
        with _whole_or_absent(final, room, self.world.main):
            parts = parallel.gather_objects(_agreed(writing.result))
            manifest = {name: digest for part in parts for name, digest in part.items()}
            _agreed(lambda: self.world.main and _publish(final, manifest, self.cfg.keep_last))
        self.say(f"saved {final}")


def copied(tensor):
    """A copy on the CPU, on its way until the device is waited for: pinned, so that the bus runs at its full rate."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _agreed(action):
    """action() on this rank; where it failed on any, the same OSError on every rank."""
    result = error = None
    try:
        result = action()
    except (OSError, SafetensorError) as problem:
        error = str(problem)
    except Exception as problem:  # whatever it is: the others wait for this rank's word
        error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
    errors = parallel.gather_objects(error)
    failed = [f"rank {rank}: {error}" if len(errors) > 1 else error for rank, error in enumerate(errors) if error]
    if failed:
        raise OSError(failed[0] + f" and {len(failed) - 1} ranks more" * (len(failed) > 1))
    return result


def _room(final, groups):
    """What a checkpoint takes of its disk, and what there is, in words."""
    need = sum(t.shape.numel() * t.dtype.itemsize for group in groups.values() for t in group.values())
    free = shutil.disk_usage(final.parent).free if final.parent.is_dir() else 0
    return f"it needs {need / 1e9:.2f} GB of {free / 1e9:.2f} free"


@contextlib.contextmanager
def _whole_or_absent(final, room, main=True):
    """Makes a failure to write a CheckpointError, and leaves nothing of the folder `final`."""
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
    """An empty folder aside, with state.json; what killed saves have left is removed."""
    for leftover in final.parent.glob(".writing_*"):
        shutil.rmtree(leftover)
    _aside(final).mkdir(parents=True)
    _write_json(_aside(final) / "state.json", {"step": step, "git": git_revision(), **state})


def _write(final, files):
    """Writes {file name: (tensors, shards)} aside -> {file name: digest}. shards: {name: [first row, of rows]}."""
    digests = {}
    if not _aside(final).is_dir():
        raise OSError(f"{_aside(final)} is not there: out_dir must be on a file system that all nodes share")
    for name, (tensors, shards) in files.items():
        path = _aside(final) / name
        header = {"shards": json.dumps(shards)} if shards else None
        save_file({k: t[...].detach().cpu().contiguous() for k, t in tensors.items()}, path, header)
        _sync(path)
        digests[name] = _digest(path)
    return digests


def _publish(final, manifest, keep_last):
    """Gives a folder whose files are all written its manifest and its name, and prunes older ones."""
    aside = _aside(final)
    _write_json(aside / "manifest.json", {**manifest, "state.json": _digest(aside / "state.json")})
    for path in (aside / "state.json", aside / "manifest.json", aside):
        _sync(path)
    if final.exists():  # the same step again after a resume: replaced as a whole
        _remove(final)
    os.rename(aside, final)
    _sync(final.parent)
    prune(final, keep_last)


def folder_of(out_dir, step):
    return Path(out_dir) / f"step_{step:08d}"


def prune(final, keep_last):
    """Keeps the newest keep_last checkpoints up to `final` and that with the lowest validation loss, removes others.

    What is later than `final` is another attempt's, or damaged: it stays.
    """
    folders = [f for f in _folders(final.parent) if f <= final]
    losses = {f: _read_state(f).get("val_loss") for f in folders}
    scored = [f for f in folders if losses[f] is not None and math.isfinite(losses[f])]
    keep = set(folders[-keep_last:]) | ({min(scored, key=losses.get)} if scored else set())
    for folder in folders:
        if folder not in keep:
            _remove(folder)


def _remove(folder):
    """Deletes a checkpoint such that a kill in between leaves no folder that looks whole."""
    gone = folder.with_name(f".writing_gone_{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def _folders(out_dir):
    """Finished checkpoints, oldest first."""
    return sorted(p for p in Path(out_dir).glob("step_*") if p.is_dir())


def problem(folder):
    """What is wrong with a checkpoint folder, in words; None if every file is there with its recorded SHA-256.

    All ranks call it: each reads its share of the files.
    """
    rank, ranks = parallel.rank_and_size()
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        found = "manifest.json is missing or unreadable"
    else:
        found = _first_wrong(folder, dict(list(manifest.items())[rank::ranks]))
    return next((wrong for wrong in parallel.gather_objects(found) if wrong), None)


def _first_wrong(folder, manifest):
    for name, (size, _) in manifest.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} has {path.stat().st_size if path.is_file() else 'no'} bytes, expected {size}"
    with ThreadPoolExecutor() as pool:
        for name, found in zip(manifest, pool.map(_digest, [folder / n for n in manifest])):
            if found != manifest[name]:
                return f"{name} does not match its SHA-256"
    return None


def find(path):
    """The checkpoint folder that `path` means: itself, or the newest whole one of a run's folder.

    All ranks call it and find the same. Warns of each damaged one that it passes over and leaves it in place. Raises
    CheckpointError if none is whole.
    """
    path = Path(path)
    folders = [path] if (path / "manifest.json").is_file() or path.name.startswith("step_") else _folders(path)[::-1]
    for folder in folders:
        wrong = problem(folder)
        if wrong is None:
            return folder
        if parallel.rank_and_size()[0] == 0:
            print(f"warning: {folder} is damaged ({wrong}); left in place", file=sys.stderr)
    raise CheckpointError(f"{path}: no whole checkpoint there ({len(folders)} damaged); expected step_*/manifest.json")


def later(out_dir, folder):
    """The newest checkpoint in out_dir if its step is beyond that of the checkpoint `folder`, else None."""
    newest = _folders(out_dir)[-1:]
    return newest[0] if newest and newest[0].name > folder.name else None


def exists(out_dir):
    return bool(_folders(out_dir))


class Stored:
    """A tensor in files, perhaps in parts: stored[a:b] reads these rows, stored[...] all, to the CPU.

    parts: (first row, slice of safetensors) each, which give their own rows by [a:b]; together all rows, each once.
    """

    def __init__(self, name, parts, rows=None):
        """rows: how many there must be; None: as many as there are."""
        self.parts = sorted(parts, key=lambda part: part[0])
        shapes = [tuple(part.get_shape()) for _, part in self.parts]
        ends = [first + shape[0] if shape else 0 for (first, _), shape in zip(self.parts, shapes)]
        rows = ends[-1] if rows is None else rows
        widths = {shape[1:] for shape in shapes}
        if [first for first, _ in self.parts] != [0, *ends[:-1]] or ends[-1] != rows or len(widths) > 1:
            raise CheckpointError(f"{name}: rows are missing or there twice, expected {rows}; is a rank's file gone?")
        self.shape = torch.Size((rows, *shapes[0][1:]) if shapes[0] else ())
        self.dtype = self.parts[0][1][slice(0, 0) if self.shape else ...].dtype

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
    """(tensors, state) of a checkpoint folder, as `save` took them, on the CPU."""
    tensors, state = open_folder(folder)
    return {group: {name: t[...] for name, t in stored.items()} for group, stored in tensors.items()}, state


def open_folder(folder):
    """(tensors, state) as `load`, but each tensor a Stored: read when it is asked for, and what is asked for."""
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
    """(file, {name: [first row, of rows]} of the tensors that are parts)."""
    try:
        file = safe_open(path, "pt")
        return file, json.loads((file.metadata() or {}).get("shards", "{}"))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); nothing else is read") from None


def model_tensors(model):
    """{name: tensor} of a model, a tied head left out."""
    return dict(model.named_parameters())


def load_model_tensors(model, tensors, vocab_size=None):
    """Copies weights by name into `model`, each rank what it holds; another name or shape is a CheckpointError.

    tensors: {name: tensor or Stored}. vocab_size: rows of embedding and head from there on are padding, left alone.
    """
    own = model_tensors(model)

    def shape(name, tensor):
        rows = tensor.shape[0] if vocab_size is None or name not in ("wte.weight", "head.weight") else vocab_size
        return (min(rows, tensor.shape[0]), *tensor.shape[1:])

    wrong = [f"{k}: not expected" for k in tensors.keys() - own.keys()]
    wrong += [f"{k}: missing" for k in own.keys() - tensors.keys()]
    pairs = {k: (shape(k, tensors[k]), shape(k, own[k])) for k in own.keys() & tensors.keys()}
    wrong += [f"{k}: {found}, expected {expected}" for k, (found, expected) in pairs.items() if found != expected]
    if wrong:
        raise CheckpointError(f"weights do not fit the model: {'; '.join(sorted(wrong)[:4])} ({len(wrong)} in all)")
    for name, param in own.items():
        parallel.copy_into(param, tensors[name], pairs[name][0][0])


def optimizer_tensors(model, optimizer):
    """{"<parameter>.<state>": tensor} of any optimizer whose state is tensors."""
    names = {p: n for n, p in model.named_parameters()}
    return {f"{names[p]}.{k}": v for p, state in optimizer.state.items() for k, v in state.items()}


def load_optimizer_tensors(model, optimizer, tensors):
    """The reverse, into a new optimizer; each tensor goes to its parameter's device, as the fused kernel wants.

    tensors: {"<parameter>.<state>": tensor or Stored}, of which a rank reads what it holds of the parameter.
    """
    params = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        param = params[name]
        if kind in optimizer.state[param]:  # made with the optimizer, of a dtype of its own
            parallel.copy_into(optimizer.state[param][kind], value)
        elif value.shape == param.shape:
            optimizer.state[param][kind] = torch.empty_like(param, requires_grad=False)
            parallel.copy_into(optimizer.state[param][kind], value)
        else:
            optimizer.state[param][kind] = value[...].to(param.device)


def rank_tensors(model, device):
    """This rank's random-number state and, with fp8, the magnitudes that its next scales follow from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    tops = magnitudes(model)
    if tops:
        state["magnitudes"] = torch.cat([top.flatten() for top in tops]).cpu()
    return state


def load_rank_tensors(tensors, model, rank, device):
    """Restores this rank's state; False where the checkpoint has none for it (another number of ranks or device)."""
    if f"{rank}.{device.type}" not in tensors:
        return False
    torch.set_rng_state(tensors[f"{rank}.cpu"][...])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{rank}.cuda"][...], device)
    tops, saved = magnitudes(model), tensors.get(f"{rank}.magnitudes")
    if tops and saved is not None:
        saved = saved[...].to(device).split([top.numel() for top in tops])
        for top, value in zip(tops, saved, strict=True):
            top.copy_(value.view_as(top))
    return True


def magnitudes(model):
    """fp8.py's buffers for the largest magnitudes of the call before, in the model's order."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_top")]


def save_model(folder, model, cfg, step=0):
    """Writes weights alone as a checkpoint of step `step`, for --init_from, sample.py and hellaswag.py."""
    return save(folder, step, {"model": model_tensors(model)}, {"config": asdict(cfg)})


def load_model(path, device):
    """(model in float32 on `device`, its configuration as a namespace) from a run's or a checkpoint's folder."""
    tensors, shape, config = open_model(path)
    model = build(shape, torch.device(device))
    load_model_tensors(model, tensors)
    return model.eval(), config


def open_model(path):
    """({name: Stored}, GPTConfig, the whole configuration) of the weights in a run's or a checkpoint's folder."""
    tensors, state = open_folder(find(path))
    config = state["config"]
    shape = GPTConfig(**{f.name: config[f.name] for f in fields(GPTConfig) if f.name in config})
    return tensors["model"], shape, _Settings(config)


class _Settings:
    """A saved configuration; a setting that it does not know reads as None."""

    def __init__(self, values):
        self.__dict__.update(values)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def shape_differences(saved, cfg, free=()):
    """["n_embd: checkpoint 768, now 1024", …] over the model's fields that decide shapes and results, `free` left out.

    saved: a dict of fields. None and the value that it stands for are the same.
    """
    old = GPTConfig(**{f.name: saved.get(f.name, f.default) for f in fields(GPTConfig)})
    free = {"attention", "dropout", "label_smoothing", "z_loss", *free}
    if old.positions == cfg.positions == "learned" or old.rope_factor == cfg.rope_factor is None:
        free |= {"rope_low_freq", "rope_high_freq", "rope_original"}
    own = {"n_kv_head": "kv_heads", "n_hidden": "hidden"}  # the property that says what None means
    pairs = [(f.name, own.get(f.name, f.name)) for f in fields(GPTConfig) if f.name not in free]
    pairs = [(name, getattr(old, p), getattr(cfg, p)) for name, p in pairs]
    return [f"{name}: checkpoint {a}, now {b}" for name, a, b in pairs if a != b]


def git_revision():
    """The commit that this code is at, with -dirty where files differ from it; None outside a repository."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        words = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _read_state(folder):
    try:
        return json.loads((Path(folder) / "state.json").read_text())
    except (OSError, ValueError):
        return {}


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def _digest(path):
    with open(path, "rb") as file:
        return [os.path.getsize(path), hashlib.file_digest(file, "sha256").hexdigest()]


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
