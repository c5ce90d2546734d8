"""Where a run starts: afresh in an unused folder, or at a checkpoint that is restored whole."""

import os
from pathlib import Path

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
from settings import FIXED_AT_RESUME, TOLD_AT_RESUME
from system import files
from system.errors import UserError, listed, warn

WRITTEN = ("log.jsonl", "best.json", *source.KEPT)  # by a run, in its folder


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
        self.saved_at = None  # the step of what is in out_dir
        with files.writable(self.out_dir):
            path = cfg.resume
            if path == "auto":
                there = parallel.gather_objects(bool(folders(self.out_dir)))
                path = self.out_dir if any(there) else "none"
            if path != "none":
                self.folder, self.tensors, self.state = open_whole(path)
            if not cfg.dry_run:
                self.refuse_what_is_in_the_way()
        parallel.barrier()  # before rank 0 writes there, which would look like an earlier run
        self.step = self.state.get("step", 0)
        if self.folder:
            self.weights = self.tensors["model"]
            warn(source.warning(self.folder))  # first: an edited model may not fit
            self.compare()
            if self.is_in_out_dir():
                self.saved_at = self.step

    def is_in_out_dir(self):
        return self.folder.resolve().parent == self.out_dir.resolve()

    def compare(self):
        """Raises UserError unless the checkpoint has this model, optimizer and dtype."""
        saved = self.state["config"]
        wrong = shape_of(saved).differences(self.cfg)
        wrong += changed(saved, self.cfg, FIXED_AT_RESUME)
        if "leaves" not in self.state:
            wrong.append("it holds weights alone")
        if wrong:
            advice = "give the settings of its run, or begin a new one with --init_from"
            raise CheckpointError(f"{self.folder} cannot be resumed: {'; '.join(wrong)}; {advice}")

    def restore(self, state):
        """Puts what the checkpoint holds into a train.State that was built with its `weights`."""
        if not self.folder:
            return
        self.warnings += everywhere(unpack, state, self.state, self.tensors)
        if read_best(self.folder.parent).get("evaluated") == self.step:
            state.evaluated = self.step
        self.tensors = {}  # closes the files
        self.weights = None

    def prepare_out_dir(self):
        """On rank 0: clears out_dir for a new run, and keeps the code of this run in it."""
        with files.writable(self.out_dir):
            if self.cfg.resume == "none":  # then nothing that is there is to be kept
                for folder in folders(self.out_dir):
                    remove(folder)
                for name in ("log.jsonl", "best.json"):
                    (self.out_dir / name).unlink(missing_ok=True)
            source.record(self.out_dir)

    def refuse_what_is_in_the_way(self):
        """Raises UserError where another run, or a user's own file, is in the way of this run."""
        # a process that torchrun started again must not remove what the one before it saved
        if self.cfg.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            return
        log = self.out_dir / "log.jsonl"
        text = log.read_text(errors="replace") if log.exists() else ""
        there = folders(self.out_dir)
        used = there or '"kind": "train"' in text
        if self.cfg.resume == "auto":  # a run killed before its first checkpoint begins again
            used = '"kind": "saved"' in text
        goes_on = self.folder and self.is_in_out_dir()
        if goes_on and self.folder == Path(self.cfg.resume):  # else newer ones are damaged
            goes_on = self.folder.name >= max((folder.name for folder in there), default="")
        foreign = [name for name in WRITTEN if (self.out_dir / name).exists()]
        if "source.json" in foreign:  # they are a run's
            foreign = []
        if foreign or used and not goes_on:
            there = listed(foreign or ["a run"])
            what = f"holds {there}, which this run does not go on from and would overwrite"
            advice = "try --resume=auto, --overwrite or another --out_dir"
            raise UserError(f"out_dir={self.out_dir} {what}; {advice}")

    def rows(self):
        """Rows of the start-up summary: the checkpoint, and settings that it has otherwise."""
        if not self.folder:
            return []
        rows = [("resumed", str(self.folder))]
        if found := changed(self.state["config"], self.cfg, TOLD_AT_RESUME):
            rows.append(("changed", f"{', '.join(found)}, since the checkpoint"))
        return rows


def changed(saved, cfg, names):
    """["lr 0.1 to 0.2", ...] of the settings that a checkpoint has otherwise."""
    found = []
    for name in names.split():
        now = getattr(cfg, name)
        if name in saved and saved[name] != now:
            found.append(f"{name} {saved[name]} to {now}")
    return found
