"""Where a run starts: afresh in an unused folder, or at a checkpoint that is restored whole."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from corpus import DataError
from run import source
from run.checkpoint import (
    HIDDEN,
    CheckpointError,
    everywhere,
    folders,
    open_whole,
    read_best,
    remove,
    shape_of,
    step_of,
)
from run.pack import unpack
from scale import parallel
from settings import FIXED_AT_RESUME, TOLD_AT_RESUME
from system import files
from system.errors import UserError, warn

WRITTEN = ("log.jsonl", "config.json", "best.json", *source.COPIES)  # by a run, in its folder


@dataclass
class Start:
    """The checkpoint that a run resumes from; `folder` is None for a new run."""

    folder: Path | None = None
    tensors: dict = field(default_factory=dict)  # as of checkpoint.read
    state: dict = field(default_factory=lambda: {"step": 0})
    saved_at: int | None = None  # the step, if the folder lies in out_dir

    def restore(self, state):
        """Puts what the checkpoint holds into a train.State that was built with its weights."""
        if not self.folder:
            return
        try:
            everywhere(unpack, state, self.state, self.tensors)
        except DataError as error:
            raise DataError(
                f"{error}; the checkpoint's data was {self.state['config']['data_dir']}"
            ) from None
        if read_best(self.folder.parent).get("evaluated") == state.step:
            state.evaluated = state.step
        self.tensors.clear()  # closes the files

    def rows(self, cfg):
        """Rows of the start-up summary: the checkpoint, and settings that it has otherwise."""
        if not self.folder:
            return []
        rows = [("resumed", str(self.folder))]
        if found := changed(self.state["config"], cfg, TOLD_AT_RESUME):
            rows.append(("changed", f"{', '.join(found)}, since the checkpoint"))
        return rows


def find(cfg):
    """The Start of a run, compared with its settings, opened, and not read yet."""
    out_dir = Path(cfg.out_dir)
    start = Start()
    with files.writable(out_dir):
        path = cfg.resume
        if path == "auto":
            path = out_dir if parallel.gather_objects(bool(folders(out_dir)))[0] else "none"
        if path != "none":
            start = Start(*open_whole(path))
            if start.folder.resolve().parent == out_dir.resolve():
                start.saved_at = start.state["step"]
        if not cfg.dry_run:
            refuse_what_is_in_the_way(cfg, start)
    parallel.barrier()  # before rank 0 writes there, which would look like an earlier run
    if start.folder:
        warn(source.warning(start.folder))  # first: an edited model may not fit
        compare(cfg, start)
    return start


def refuse_what_is_in_the_way(cfg, start):
    """Raises UserError where another run, or a user's own file, is in the way of this run."""
    # a process that torchrun started again must not remove what the one before it saved
    if cfg.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return
    out_dir = Path(cfg.out_dir)
    there = folders(out_dir)
    log = out_dir / "log.jsonl"
    text = log.read_text(errors="replace") if log.exists() else ""
    # with auto a run that was killed before its first checkpoint begins again
    kind = "saved" if cfg.resume == "auto" else "train"
    used = there or f'"kind": "{kind}"' in text
    named = start.folder == Path(cfg.resume)  # else it is the newest whole one
    behind = named and any(step_of(folder) > start.state["step"] for folder in there)
    goes_on = start.saved_at is not None and not behind
    a_runs = (out_dir / "source.json").exists()
    foreign = not a_runs and any((out_dir / name).exists() for name in WRITTEN)
    if foreign or used and not goes_on:
        what = "holds a run or files that this run does not go on from and would overwrite"
        advice = "try --resume=auto if its checkpoints are there, --overwrite or another --out_dir"
        raise UserError(f"out_dir={out_dir} {what}; {advice}")


def compare(cfg, start):
    """Raises UserError unless the checkpoint has this model, optimizer and dtype."""
    saved = start.state["config"]
    wrong = shape_of(saved).differences(cfg) + changed(saved, cfg, FIXED_AT_RESUME)
    if wrong:
        advice = "give the settings of its run, or begin a new one with --init_from"
        raise CheckpointError(f"{start.folder} cannot be resumed: {'; '.join(wrong)}; {advice}")


def changed(saved, cfg, names):
    """["lr 0.1 to 0.2", ...] of the settings that a checkpoint has otherwise."""
    found = []
    for name in names.split():
        now = getattr(cfg, name)
        if name in saved and saved[name] != now:
            found.append(f"{name} {saved[name]} to {now}")
    return found


def prepare_out_dir(cfg):
    """On rank 0: clears out_dir for a new run, and keeps the code of this run in it."""
    out_dir = Path(cfg.out_dir)
    with files.writable(out_dir):
        for left in out_dir.glob(f"{HIDDEN}step_*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if cfg.resume == "none":  # then nothing that is there is to be kept
            for folder in folders(out_dir):
                remove(folder)
            for name in ("log.jsonl", "best.json"):
                (out_dir / name).unlink(missing_ok=True)
        source.record(out_dir)
