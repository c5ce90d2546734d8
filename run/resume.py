"""Where a run starts: afresh in an unused folder, or at a checkpoint, of which everything is restored."""

import dataclasses
import shutil
import sys
from pathlib import Path

import torch

import optim
from configurator import UserError
from run import checkpoint, files, source
from scale import parallel

SCALER = {"scale": files.number, "growth_factor": files.number, "backoff_factor": files.number}
SCALER |= {"growth_interval": files.count, "_growth_tracker": files.count}


class Start:
    """The checkpoint that a run resumes from. For a new run `folder` is None and `step` is 0.

    All ranks make one. Raises UserError or CheckpointError where cfg does not go with out_dir or the checkpoint.
    """

    def __init__(self, cfg):
        self.folder = claim_out_dir(cfg)
        parallel.barrier()  # before rank 0 writes there, which a rank that looks later would take for an earlier run
        self._tensors, self.state = checkpoint.open_folder(self.folder) if self.folder else ({}, {})
        self.warnings = long_warmup(cfg)
        if self.folder:
            refuse_other(cfg, self.folder, self._tensors, self.state)
            if (words := source.warning(self.folder)) and parallel.rank_and_size()[0] == 0:
                print(f"warning: {words}", file=sys.stderr)  # now: an edited model may not fit the checkpoint
        self.step = self.state.get("step", 0)
        self.evaluated = self.step if self.folder and self.state.get("evaluated", True) else None
        if self.step > cfg.max_steps and not cfg.dry_run:
            raise UserError(f"{self.folder} is beyond max_steps={cfg.max_steps}; try a larger --max_steps")

    def own(self, cfg):
        """Whether the checkpoint lies in this run's out_dir."""
        return self.folder is not None and lies_in(cfg.out_dir, self.folder)

    @property
    def weights(self):
        """{name: Stored} of the checkpoint, None for a new run."""
        return self._tensors.get("model")

    def restore(self, job, loader, world, allow_data_change):
        """Optimizer, loss scaler, data position and random-number states, into what was built with `weights`."""
        if not self.folder:
            return
        if not parallel.all_finite(job.raw):
            raise checkpoint.CheckpointError(
                f"{self.folder} holds weights that are inf or NaN; remove it, and --resume=auto takes the one before"
            )
        checkpoint.load_optimizer_tensors(job.raw, job.optimizer, self._tensors["optimizer"])
        if job.scaler.is_enabled() and (wrong := files.misfit(self.state["scaler"], SCALER)):
            raise checkpoint.CheckpointError(
                f"{self.folder}/state.json has no loss scaler of precision=fp16: {wrong}"
            )
        job.scaler.load_state_dict(self.state["scaler"])
        loader.load_state_dict(self.state["loader"], allow_data_change=allow_data_change)
        saved_ranks, rng = self.state["world_size"], self._tensors.get("rng", {})
        same = saved_ranks == world.size
        if not (same and checkpoint.load_rank_tensors(rng, job.raw, world.rank, world.device)):
            self.warnings.append(f"saved by {saved_ranks} ranks: dropout and fp8's scales start afresh")
        self._tensors = {}  # closes the files

    def prepare_out_dir(self, cfg):
        """Clears out_dir for a new run, and keeps the code of this run in it. Called on rank 0, not in a dry run."""
        with files.writable(cfg.out_dir):
            if not self.folder:
                clear_out_dir(cfg.out_dir)
            self.warnings += filter(None, [source.record(cfg.out_dir, self.step)])

    def schedule(self, cfg):
        """Rows of the start block: what has changed of the learning rate's schedule since the checkpoint was saved."""
        names = checkpoint.SCHEDULE
        saved = self.state.get("config", {})
        new = {name: getattr(cfg, name) for name in names}
        old = new | {name: saved[name] for name in names if name in saved}
        if old == new:
            return []
        before, now = (
            f"{optim.learning_rate(self.step, dataclasses.replace(cfg, **of)):.3g}" for of in (old, new)
        )
        changes = ", ".join(f"{name} {old[name]} to {new[name]}" for name in names if old[name] != new[name])
        rate = f"stays {now}" if now == before else f"is {now} instead of {before}"
        return [("schedule", f"changed ({changes}): the next learning rate {rate}")]


def long_warmup(cfg):
    """[A warning] where the learning rate falls, or the run ends, before the warm-up does; else []."""
    falls = round(cfg.max_steps * (1 - cfg.cooldown_fraction * (cfg.schedule == "wsd")))
    if (steps := cfg.warmup_steps) <= falls:
        return []
    end = "rate falls from" if falls < cfg.max_steps else "run ends at"
    return [f"the warm-up takes {steps} steps, and the {end} step {falls}"]


def claim_out_dir(cfg):
    """The checkpoint folder to resume from, or None for a new run, whose out_dir must be unused."""
    if cfg.resume not in ("none", "auto"):
        found = checkpoint.find(cfg.resume)
        if not lies_in(cfg.out_dir, found) and is_used(cfg.out_dir) and not cfg.dry_run:
            raise UserError(
                f"out_dir={cfg.out_dir} holds another run than {found}; try another --out_dir, or --resume=auto, which "
                "goes on from the newest checkpoint in out_dir"
            )
        newer = checkpoint.later(cfg.out_dir, found)
        if (
            newer and found == Path(cfg.resume) and not cfg.dry_run
        ):  # of a run's folder, newer ones are damaged
            raise UserError(
                f"out_dir={cfg.out_dir} holds {newer.name}, beyond {found}, which the next --resume=auto would take; "
                "remove it, or give another --out_dir"
            )
        return found
    if cfg.resume == "auto" and checkpoint.exists(cfg.out_dir):
        return checkpoint.find(cfg.out_dir)
    if is_used(cfg.out_dir) and not (cfg.overwrite or cfg.dry_run or cfg.resume == "auto"):
        raise UserError(
            f"out_dir={cfg.out_dir} holds an earlier run; try --resume=auto, --overwrite or another --out_dir"
        )
    return None


def lies_in(out_dir, folder):
    return folder.resolve().parent == Path(out_dir).resolve()


def is_used(out_dir):
    """Whether out_dir holds a checkpoint or a training step's line in a log."""
    if checkpoint.exists(out_dir):
        return True
    log = Path(out_dir) / "log.jsonl"
    if not log.exists():
        return False
    with open(log, errors="replace") as lines:
        return any('"kind": "train"' in line for line in lines)


def refuse_other(cfg, folder, tensors, state):
    """Raises CheckpointError unless the checkpoint is of a run with this model, optimizer and type of weights."""
    state["config"] = checkpoint.saved_settings(folder, state)
    if wrong := checkpoint.shape_differences(state["config"], cfg):
        raise checkpoint.CheckpointError(
            f"{folder} is another model: {'; '.join(wrong)}; nothing was changed"
        )
    new = f"for a new run from its weights: --init_from={folder}"
    if "optimizer" not in tensors:
        raise checkpoint.CheckpointError(f"{folder} holds weights alone; {new}")
    for name, usual in (("optimizer", "adamw"), ("weights", "fp32")):
        if (saved := state["config"].get(name, usual)) != getattr(cfg, name):
            raise checkpoint.CheckpointError(
                f"{folder} was saved with {name}={saved}, now {getattr(cfg, name)}; {new}"
            )
    wrong = [f"there is no {name}" for name in ("loader", "scaler", "world_size") if name not in state]
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.weights]
    wrong += [f"{name} is {t.dtype}" for name, t in tensors["model"].items() if t.dtype != kind]
    if wrong:
        raise checkpoint.CheckpointError(f"{folder} cannot be resumed: {wrong[0]}; {new}")


def clear_out_dir(out_dir):
    """Removes an earlier run's checkpoints and log."""
    for path in [*Path(out_dir).glob("step_*"), *Path(out_dir).glob("log.jsonl")]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
