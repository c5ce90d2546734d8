"""Checkpoints: one folder a step, complete or absent, and nothing in it that could run code when loaded.

out_dir/step_00000250/
    model.safetensors       weights by name, shared ones once
    optimizer.safetensors   optimizer state by parameter name
    rng.safetensors         random-number state of every rank
    state.json              step, configuration, loader position, schedule, git revision
    manifest.json           bytes and SHA-256 of the files above

A folder is written under another name, synced, and renamed: what has the name step_* was finished.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from configurator import UserError
from model import GPTConfig, build
from parallel import barrier, copy_into, gather_objects, reshard, whole


class CheckpointError(UserError):
    exit_code = 4


def save(out_dir, step, tensors, state, keep_last=2):
    """Writes out_dir/step_<step> and prunes older ones; returns its path. Call on one rank.

    tensors: {"model": {name: tensor}, …}, a file each; state: what state.json holds besides step and git revision.
    Raises CheckpointError when it cannot be written; earlier checkpoints stay as they are.
    """
    final = folder_of(out_dir, step)
    aside = Path(out_dir) / f".writing_{final.name}"
    for leftover in Path(out_dir).glob(".writing_*"):
        shutil.rmtree(leftover)
    try:
        aside.mkdir(parents=True)
        for name, group in tensors.items():
            save_file({k: t.detach().cpu().contiguous() for k, t in group.items()}, aside / f"{name}.safetensors")
        _write_json(aside / "state.json", {"step": step, "git": git_revision(), **state})
        _write_json(aside / "manifest.json", {f.name: _digest(f) for f in sorted(aside.iterdir())})
        for path in [*aside.iterdir(), aside]:
            _sync(path)
        if final.exists():  # the same step again after a resume: replaced as a whole
            _remove(final)
        os.rename(aside, final)
        _sync(final.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        need = sum(t.nbytes for group in tensors.values() for t in group.values())
        free = shutil.disk_usage(out_dir).free if os.path.isdir(out_dir) else 0
        raise CheckpointError(
            f"{final}: cannot write the checkpoint ({error}); it needs {need / 1e9:.2f} GB of {free / 1e9:.2f} free; "
            "earlier checkpoints are intact: free some space and go on with --resume=auto"
        ) from None
    prune(out_dir, keep_last)
    return final


def save_training(out_dir, step, model, optimizer, state, world, keep_last):
    """Saves a run after `step` steps, the random-number state of every rank included. All ranks call it."""
    ranks = gather_objects(rng_tensors(world.device))
    reshard(model)
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    tensors = {name: gathered(group, world.main) for name, group in tensors.items()}
    if world.main:
        tensors["rng"] = {f"{rank}.{kind}": t for rank, states in enumerate(ranks) for kind, t in states.items()}
        save(out_dir, step, tensors, {"world_size": world.size, **state}, keep_last)
    barrier()
    return folder_of(out_dir, step)


def gathered(tensors, keep):
    """{name: tensor} with sharded ones gathered to the CPU of the ranks that `keep` them, one at a time."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full if full is tensor else full.cpu()
    return found


def folder_of(out_dir, step):
    return Path(out_dir) / f"step_{step:08d}"


def prune(out_dir, keep_last):
    """Removes all but the newest `keep_last` checkpoints and the one with the lowest validation loss."""
    folders = _folders(out_dir)
    losses = {f: _read_state(f).get("val_loss") for f in folders}
    scored = [f for f in folders if losses[f] is not None]
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
    """What is wrong with a checkpoint folder, in words; None if every file is there with its recorded SHA-256."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "manifest.json is missing or unreadable"
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

    Warns of each damaged one that it passes over and leaves it in place. Raises CheckpointError if none is whole.
    """
    path = Path(path)
    folders = [path] if (path / "manifest.json").is_file() or path.name.startswith("step_") else _folders(path)[::-1]
    for folder in folders:
        wrong = problem(folder)
        if wrong is None:
            return folder
        print(f"warning: {folder} is damaged ({wrong}); left in place", file=sys.stderr)
    raise CheckpointError(f"{path}: no whole checkpoint there ({len(folders)} damaged); expected step_*/manifest.json")


def exists(out_dir):
    return bool(_folders(out_dir))


def load(folder):
    """(tensors, state) of a checkpoint folder, as `save` took them, on the CPU."""
    return {f.stem: _read_tensors(f) for f in Path(folder).glob("*.safetensors")}, _read_state(folder)


def _read_tensors(path):
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); nothing else is read") from None


def model_tensors(model):
    """{name: tensor} of a model, a tied head left out."""
    return dict(model.named_parameters())


def load_model_tensors(model, tensors):
    """Copies weights by name into `model`; a difference in names or shapes is a CheckpointError."""
    own = model_tensors(model)
    wrong = [f"{k}: not expected" for k in tensors.keys() - own.keys()]
    wrong += [f"{k}: missing" for k in own.keys() - tensors.keys()]
    both = own.keys() & tensors.keys()
    wrong += [
        f"{k}: {tuple(tensors[k].shape)}, expected {tuple(own[k].shape)}"
        for k in both
        if own[k].shape != tensors[k].shape
    ]
    if wrong:
        raise CheckpointError(f"weights do not fit the model: {'; '.join(sorted(wrong)[:4])} ({len(wrong)} in all)")
    with torch.no_grad():
        for name, param in own.items():
            copy_into(param, tensors[name])


def optimizer_tensors(model, optimizer):
    """{"<parameter>.<state>": tensor} of any optimizer whose state is tensors."""
    names = {p: n for n, p in model.named_parameters()}
    return {f"{names[p]}.{k}": v for p, state in optimizer.state.items() for k, v in state.items()}


def load_optimizer_tensors(model, optimizer, tensors):
    """The reverse, into a new optimizer; each tensor goes to its parameter's device, as the fused kernel wants."""
    params = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        param = params[name]
        if kind in optimizer.state[param]:  # made with the optimizer, of a dtype of its own
            copy_into(optimizer.state[param][kind], value)
        elif value.shape == param.shape:
            optimizer.state[param][kind] = torch.empty_like(param, requires_grad=False)
            copy_into(optimizer.state[param][kind], value)
        else:
            optimizer.state[param][kind] = value.to(param.device)


def rng_tensors(device):
    """This rank's random-number state."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_rng_tensors(tensors, rank, device):
    """Restores this rank's state; False where the checkpoint has none for it (another number of ranks or device)."""
    if f"{rank}.{device.type}" not in tensors:
        return False
    torch.set_rng_state(tensors[f"{rank}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{rank}.cuda"], device)
    return True


def save_model(folder, model, cfg, step=0):
    """Writes weights alone as a checkpoint of step `step`, for --init_from, sample.py and hellaswag.py."""
    return save(folder, step, {"model": model_tensors(model)}, {"config": asdict(cfg)})


def load_model(path, device):
    """(model in float32 on `device`, its configuration as a namespace) from a run's or a checkpoint's folder."""
    device = torch.device(device)
    folder = find(path)
    config = _read_state(folder)["config"]
    shape = GPTConfig(**{f.name: config[f.name] for f in fields(GPTConfig) if f.name in config})
    model = build(shape, device)
    load_model_tensors(model, _read_tensors(folder / "model.safetensors"))
    return model.eval(), _Settings(config)


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
