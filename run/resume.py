"""Where a run starts: afresh in an unused folder, or at a checkpoint that is restored whole."""

import dataclasses
import os
from pathlib import Path

import optim
from corpus import as_user_error
from run import source
from run.checkpoint import (
    CheckpointError,
    everywhere,
    folders,
    open_whole,
    read_best,
    remove,
    shape_of,
)
from run.pack import unpack
from scale import parallel
from settings import FIXED_AT_RESUME, SCHEDULE, TOLD_AT_RESUME
from system import files
from system.errors import UserError, warn

WRITTEN = ("log.jsonl", "config.json", "best.json", *source.KEPT)  # by a run, in its folder


class Start:
    """The checkpoint that a run resumes from; `folder` is None and `step` 0 for a new run.

    It is found, compared with the settings and opened here; `restore` fills a run's state from it.
    """

    def __init__(self, cfg):
        self.cfg = cfg
        self.out_dir = Path(cfg.out_dir)
        self.warnings = []
        self.folder = None
        self.tensors = {}
        self.state = {}
        self.weights = None
        self.evaluated = None  # the step of the checkpoint, if all evaluations due there have run
        self.wandb_id = None  # of the run that goes on in wandb
        with files.writable(self.out_dir):
            self.choose()
        parallel.barrier()  # before rank 0 writes there, which would look like an earlier run
        self.step = self.state.get("step", 0)
        self.saved_at = None  # the step of what is in out_dir
        if self.folder:
            self.weights = self.tensors["model"]
            warn(source.warning(self.folder))  # first: an edited model may not fit
            self.compare()
            if read_best(self.folder.parent).get("evaluated") == self.step:
                self.evaluated = self.step
            if self.folder.resolve().parent == self.out_dir.resolve():
                self.wandb_id = self.state.get("wandb_id")
                self.saved_at = self.step

    def choose(self):
        """Opens the checkpoint of cfg.resume; UserError where another run is in the way."""
        path = self.cfg.resume
        if path == "auto":
            path = "none"
            if any(parallel.gather_objects(bool(folders(self.out_dir)))):
                path = self.out_dir
        if path != "none":
            self.folder, self.tensors, self.state = open_whole(path)
        if not self.cfg.dry_run:
            self.refuse_what_is_in_the_way()

    def compare(self):
        """Raises UserError unless the checkpoint has this model, optimizer, dtype and length."""
        saved = self.state["config"]
        wrong = shape_of(saved).differences(self.cfg)
        for name, words in changed(saved, self.cfg, FIXED_AT_RESUME).items():
            wrong.append(f"{name}: {words}")
        if "leaves" not in self.state:
            wrong.append("it holds weights alone")
        if wrong:
            advice = "give the settings of its run, or begin a new one with --init_from"
            raise CheckpointError(f"{self.folder} cannot be resumed: {'; '.join(wrong)}; {advice}")
        by_steps = self.cfg.max_tokens is None and self.cfg.max_seconds is None
        if by_steps and self.step > self.cfg.max_steps and not self.cfg.dry_run:
            beyond = f"{self.folder} is beyond max_steps={self.cfg.max_steps}"
            raise UserError(f"{beyond}; try a larger --max_steps")

    def restore(self, state):
        """Puts what the checkpoint holds into a train.State that was built with its `weights`."""
        if not self.folder:
            return
        for name, p in state.model.named_parameters():
            was = self.weights[name].dtype
            if was != p.dtype:
                types = f"{name}: checkpoint {was}, now {p.dtype}"
                raise CheckpointError(f"{self.folder} cannot be resumed: {types}")
        if not parallel.all_finite(state.model.parameters(), parallel.device_of(state.model)):
            advice = "remove it to take the one before"
            raise CheckpointError(f"{self.folder}: weights are inf or NaN; {advice}")
        rank, _ = parallel.rank_and_size()
        tensors = {group: dict(of_group) for group, of_group in self.tensors.items()}
        for name, tensor in self.tensors.get(f"rank{rank:05d}", {}).items():
            group, _, inner = name.partition("/")
            tensors.setdefault(group, {})[inner] = tensor

        def fill():
            with as_user_error(f"{self.folder} does not fit this run", CheckpointError):
                return unpack(state, self.state, tensors)

        self.warnings += everywhere(fill)
        state.evaluated = self.evaluated
        self.tensors = {}  # closes the files
        self.weights = None

    def prepare_out_dir(self):
        """On rank 0: clears out_dir for a new run, and keeps the code of this run in it."""
        with files.writable(self.out_dir):
            # another run may have made out_dir, and filled it, since `choose`
            self.refuse_what_is_in_the_way()
            if self.cfg.resume == "none":  # then nothing that is there is to be kept
                for folder in folders(self.out_dir):
                    remove(folder)
                for name in ("log.jsonl", "best.json"):
                    (self.out_dir / name).unlink(missing_ok=True)
            for leftover in files.leftovers(self.out_dir, WRITTEN.__contains__):
                leftover.unlink()
            source.record(self.out_dir)

    def refuse_what_is_in_the_way(self):
        """Raises UserError where another run, or a user's own file, is in the way of this run."""
        # a process that torchrun started again must not remove what the one before it saved
        if self.cfg.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return
        log = self.out_dir / "log.jsonl"
        if log.is_symlink() or log.exists() and not log.is_file():
            raise UserError(f"{log} is a link, or no file: a run would write elsewhere; remove it")
        text = log.read_text(errors="replace") if log.exists() else ""
        there = [name for name in WRITTEN if (self.out_dir / name).exists()]
        newest = max(folders(self.out_dir), default=None)
        wrong = None
        if there and "source.json" not in there:
            wrong = f"holds {there[0]}, which no run wrote; move it, or give another --out_dir"
        elif self.cfg.resume == "auto":  # a run killed before its first checkpoint begins again
            if not self.folder and '"kind": "saved"' in text:
                wrong = "has a log that names checkpoints, and holds none; bring one back"
        elif newest or '"kind": "train"' in text:
            if not self.folder:
                wrong = "holds an earlier run; try --resume=auto, --overwrite or another --out_dir"
            elif self.folder.resolve().parent != self.out_dir.resolve():
                wrong = f"holds another run than {self.folder}; try another --out_dir"
            # where resume is a run's folder, the newer ones are damaged
            elif newest.name > self.folder.name and self.folder == Path(self.cfg.resume):
                wrong = f"holds {newest.name}, beyond {self.folder}; remove it first"
        if wrong:
            raise UserError(f"out_dir={self.out_dir} {wrong}")

    def rows(self, state):
        """Rows of the start-up summary: the checkpoint, the schedule and settings that changed."""
        if not self.folder:
            return []
        rows = [("resumed", str(self.folder))]
        saved = self.state["config"]
        schedule = changed(saved, self.cfg, SCHEDULE)
        if schedule:
            before = dataclasses.replace(self.cfg, **{name: saved[name] for name in schedule})
            rates = []
            for cfg in (self.cfg, before):
                share = optim.share_done(state, cfg)
                rates.append(optim.learning_rate(self.step, share, cfg))
            words = ", ".join(f"{name} {what}" for name, what in schedule.items())
            rate = "the next learning rate is {:.3g} instead of {:.3g}".format(*rates)
            rows.append(("schedule", f"changed ({words}): {rate}"))
        others = changed(saved, self.cfg, TOLD_AT_RESUME)
        if others:
            words = ", ".join(f"{name} {what}" for name, what in others.items())
            rows.append(("changed", f"{words}, since the checkpoint"))
        return rows


def changed(saved, cfg, names):
    """{name: its change in words} of the settings that a checkpoint has otherwise."""
    found = {}
    for name in names.split():
        now = getattr(cfg, name)
        if name in saved and saved[name] != now:
            found[name] = f"{saved[name]} to {now}"
    return found
