"""Where a run starts: afresh in an unused folder, or at a checkpoint that is restored whole."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import optim
from corpus import as_user_error
from run import checkpoint, checkpoint_folders, reshard, source, states
from run.checkpoint import CheckpointError
from scale import parallel
from system import files
from system.errors import UserError, warn

# settings beside checkpoint.SCHEDULE that decide what is trained and may change at a resume: a row
# of the start-up summary names those that do
FREE = (
    "seed dropout document_mask weight_decay beta1 beta2 clip lr_embedding lr_head momentum_warmup"
).split()
FREE += "max_skipped_steps precision reduce_dtype overfit eval_tokens".split()
OLDER = {"ranks": None, "shards": None, "trees": [None], "of_each_rank": []}  # without values.json
WRITTEN = ("log.jsonl", "config.json", *source.KEPT)  # by a run, in its folder


class Start:
    """The checkpoint that a run resumes from; `folder` is None and `step` 0 for a new run."""

    def __init__(self, out_dir, resume="none", overwrite=False, dry_run=False):
        self.out_dir = Path(out_dir)
        self.resume = resume
        self.overwrite = overwrite
        self.warnings = []
        with files.writable(self.out_dir):
            if resume != "none" and parallel.rank_and_size()[0] == 0 and not dry_run:
                checkpoint_folders.bring_back(self.out_dir)
            parallel.barrier()
            self.folder = choose_checkpoint(self.out_dir, resume, overwrite, dry_run)
        parallel.barrier()  # before rank 0 writes there, which would look like an earlier run
        self.tensors = {}
        self.state = {}
        self.weights = None
        self.evaluated = None  # the step after which all evaluations that were due have run
        # the folder; None if it is another run's, or is to be saved again after the evaluations
        self.saved = None
        self.wandb_id = None  # of the run that goes on in wandb
        if self.folder:
            self.tensors, self.state = reshard.open_merged(self.folder)
            self.weights = self.tensors["model"] | self.tensors.get("buffers", {})
            if self.state.get("evaluated", True):
                self.evaluated = self.state["step"]
            if self.folder.resolve().parent == self.out_dir.resolve():
                self.wandb_id = self.state.get("wandb_id")
                self.saved = self.folder if self.evaluated is not None else None
        self.step = self.state.get("step", 0)
        self.saved_at = self.step if self.saved else None

    def check(self, cfg):
        """Raises UserError unless the checkpoint has this model, optimizer, dtype and length."""
        if not self.folder:
            return
        warn(source.warning(self.folder))  # now: an edited model may not fit the checkpoint
        config, shape = checkpoint.saved_settings(self.folder, self.state)
        self.state["config"] = config
        wrong = shape.differences(cfg)
        same_shape = not wrong
        optimizer = config.get("optimizer", "adamw")
        if optimizer != cfg.optimizer:
            wrong.append(f"optimizer: checkpoint {optimizer}, now {cfg.optimizer}")
        weights = config.get("weights", "fp32")
        if weights != cfg.weights:
            wrong.append(f"weights: checkpoint {weights}, now {cfg.weights}")
        # an optimizer without states has values alone, one of an earlier version tensors alone
        present = {*self.state, *self.tensors, *self.state.get("values", {})}
        absent = {"optimizer", "loader", "scaler", "world_size"} - present
        if cfg.precision == "fp16" and not self.state.get("scaler"):
            absent.add("loss scaler")
        wrong += [f"it has no {name}" for name in sorted(absent)]
        if wrong:
            more = "give the settings of its run"
            if same_shape:
                more += ", or begin a new one from its weights with --init_from"
            raise CheckpointError(f"{self.folder} cannot be resumed: {'; '.join(wrong)}; {more}")
        if cfg.max_seconds and "seconds" not in self.state:
            self.warnings.append(
                "an earlier version saved no time of its steps: max_seconds begins anew"
            )
        by_steps = cfg.max_tokens is None and cfg.max_seconds is None
        if by_steps and self.step > cfg.max_steps and not cfg.dry_run:
            raise UserError(
                f"{self.folder} is beyond max_steps={cfg.max_steps}; try a larger --max_steps"
            )

    def restore(self, state, world):
        """Puts what the checkpoint holds into a train.State that was built with its `weights`."""
        states.remember(state.optimizer)
        if not self.folder:
            return
        model = state.model
        for name, p in model.named_parameters():
            was = self.tensors["model"][name].dtype
            if was != p.dtype:
                raise CheckpointError(
                    f"{self.folder} cannot be resumed: {name}: checkpoint {was}, now {p.dtype}"
                )
        if not parallel.all_finite(model.parameters(), world.device):
            raise CheckpointError(
                f"{self.folder}: weights are inf or NaN; remove it to take the one before"
            )

        self.warnings += checkpoint.everywhere(partial(self.load_values, state))
        state.scaler.load_state_dict(self.state["scaler"])
        position = self.state["loader"]
        state.loader.load_state_dict(position)
        state.step = self.step
        state.evaluated = self.evaluated
        state.score = self.state.get("val_loss")
        state.seconds = self.state.get("seconds", 0.0)
        if "tokens" in self.state:
            state.tokens = self.state["tokens"]
        else:  # as checkpoints once counted them
            state.tokens = position["rows"] * position["block_size"]
        ranks = self.state["world_size"]
        rng = self.tensors.get("rng", {})
        why = None
        if ranks != world.size:
            why = f"saved by {ranks} ranks"
        elif not checkpoint.load_rank_tensors(rng, model, world.rank, world.device):
            why = f"not saved on {world.device.type}"
        if why:
            self.warnings.append(f"{why}: random numbers and fp8's scales start afresh")
        self.tensors = {}  # closes the files
        self.weights = None

    def load_values(self, state):
        """Fills the optimizer, State.own and the buffers of each rank. Returns warnings."""
        rank, ranks = parallel.rank_and_size()
        values = self.state.get("values", {})

        def unpacker(group):
            own = reshard.with_prefix(self.tensors.get("own_of_ranks", {}), f"{rank}.{group}.")
            tensors = self.tensors.get(group, {}) | own
            what = f"{self.folder}: {checkpoint.GROUPS[group]}"
            return states.Unpacker(what, values.get(group, OLDER), tensors, state.model)

        with as_user_error(
            f"{self.folder}: what values.json says does not fit this run", CheckpointError
        ):
            states.load_optimizer(state.optimizer, unpacker("optimizer"))
            warnings = states.load_own(state.own, unpacker("own"))
            # the model was built with rank 0's buffers
            buffers = values.get("buffers", OLDER)
            differ = buffers["of_each_rank"]
            if differ and buffers["ranks"] == ranks:
                states.load_own(reshard.persistent_buffers(state.model), unpacker("buffers"))
            elif differ:
                few = f"{differ[0]} ({len(differ)} in all)"
                warnings.append(f"{few} differed from rank to rank: all have rank 0's")
        return warnings

    def prepare_out_dir(self):
        """Clears out_dir for a new run, and keeps the code of this run in it.

        It is called on rank 0, and not in a dry run.
        """
        # another run may have made out_dir, and filled it, since __init__
        with files.writable(self.out_dir):
            found = checkpoint_folders.folders(self.out_dir)
            if not self.folder and (self.resume == "none" or found):
                refuse_what_is_in_the_way(self.out_dir, "none", self.overwrite, None)
            if self.resume == "none":  # then nothing that is there is to be kept
                for folder in found:
                    checkpoint_folders.remove(folder)
                (self.out_dir / "log.jsonl").unlink(missing_ok=True)
            for leftover in files.leftovers(self.out_dir, WRITTEN.__contains__):
                leftover.unlink()
            source.record(self.out_dir)

    def rows(self, cfg, state):
        """Rows of the start-up summary: the checkpoint, the schedule and settings that changed."""
        if not self.folder:
            return []
        rows = [("resumed", str(self.folder))]
        schedule = self.changed(checkpoint.SCHEDULE, cfg)
        if schedule:
            was = {name: self.state["config"][name] for name in schedule}
            with as_user_error(f"{self.folder}: its settings", CheckpointError):
                before = self.next_rate(dataclasses.replace(cfg, **was), state)
            now = self.next_rate(cfg, state)
            rate = f"the next learning rate is {now:.3g} instead of {before:.3g}"
            rows.append(("schedule", f"changed ({', '.join(schedule.values())}): {rate}"))
        others = self.changed(FREE, cfg)
        if others:
            rows.append(("changed", f"{', '.join(others.values())}, since the checkpoint"))
        return rows

    def changed(self, names, cfg):
        """{name: its change in words} of the settings that the checkpoint has otherwise."""
        saved = self.state["config"]
        found = {}
        for name in names:
            now = getattr(cfg, name)
            if name in saved and saved[name] != now:
                found[name] = f"{name} {saved[name]} to {now}"
        return found

    def next_rate(self, cfg, state):
        return optim.learning_rate(self.step, optim.share_done(state, cfg), cfg)


def choose_checkpoint(out_dir, resume, overwrite, dry_run):
    """The checkpoint to resume from, None for a new run.

    Raises UserError where another run is in its way.
    """
    found = None
    if resume == "auto":
        has_any = bool(checkpoint_folders.folders(out_dir))
        if any(parallel.gather_objects(has_any)):
            found = checkpoint_folders.find(out_dir)
    elif resume != "none":
        found = checkpoint_folders.find(resume)
    if not dry_run:
        refuse_what_is_in_the_way(out_dir, resume, overwrite, found)
    return found


def refuse_what_is_in_the_way(out_dir, resume, overwrite, found):
    """Raises UserError where another run, or a user's own file, is in the way of a run in out_dir.

    found: the checkpoint that the run resumes from, None for a new run.
    """
    # a process that torchrun started again must not remove what the one before it saved
    if overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return
    log = out_dir / "log.jsonl"
    if log.is_symlink() or log.exists() and not log.is_file():
        raise UserError(f"{log} is a link, or no file: a run would write elsewhere; remove it")
    if wrong := what_is_in_the_way(out_dir, resume, found):
        raise UserError(f"out_dir={out_dir} {wrong}")


def what_is_in_the_way(out_dir, resume, found):
    """The same in words; None if nothing is in the way."""
    log = out_dir / "log.jsonl"
    newest = max(checkpoint_folders.folders(out_dir), default=None)
    text = log.read_text(errors="replace") if log.exists() else ""
    there = [name for name in WRITTEN if (out_dir / name).exists()]
    if there and '"kind": ' not in text and not (out_dir / "source.json").exists():
        return f"holds {there[0]}, which no run wrote; move it, or give another --out_dir"
    if resume == "auto":  # a run that was killed before its first checkpoint begins again
        if found or '"kind": "saved"' not in text:
            return None
        advice = "bring one back or give another out_dir"
        return f"has a log that names checkpoints, and holds none; {advice}"
    if not newest and '"kind": "train"' not in text:
        return None
    if not found:
        return "holds an earlier run; try --resume=auto, --overwrite or another --out_dir"
    if found.resolve().parent != out_dir.resolve():
        advice = "try another --out_dir, or --resume=auto for the run there"
        return f"holds another run than {found}; {advice}"
    # where resume is a run's folder, the newer ones are damaged
    if newest and newest.name > found.name and found == Path(resume):
        return f"holds {newest.name}, beyond {found}; remove it first, or give another --out_dir"
    return None
