"""The checkpoints of a run, step_*/ in its folder: found, verified, put in place, pruned.

A folder is complete or absent, as it is put in place atomically: it is written under a hidden name,
.writing_*, and then renamed. One that is removed is first renamed to a hidden name. What a kill
leaves hidden is deleted by the next save.
"""

import glob
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run.reshard import open_merged, read_state_json
from run.states import CheckpointError
from scale import parallel
from system import files
from system.errors import warn

DIGITS = "[0-9]" * 8


def folders(out_dir):
    """A run's checkpoints, oldest first: the step_*/ that hold our files.

    A user's own step_plans/ is none.
    """
    found = (Path(out_dir, name) for name in glob.glob(f"step_{DIGITS}", root_dir=out_dir))
    return sorted(
        p for p in found if (p / "manifest.json").is_file() or (p / "state.json").is_file()
    )


def hidden_path(folder, kind=""):
    """The name under which a checkpoint is written.

    kind: "gone_" if it is removed, "old_" if it is replaced.
    """
    return folder.with_name(f".writing_{kind}{folder.name}")


def remove(folder):
    """Hides a checkpoint, then deletes it: what a kill leaves of it never looks complete."""
    gone = hidden_path(folder, "gone_")
    os.rename(folder, gone)
    delete(gone)


def delete(path):
    """Deletes what is hidden, and of a link the link alone.

    What cannot be deleted, the next save tries again.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def delete_hidden(out_dir):
    """Deletes what killed processes have left."""
    for path in Path(out_dir).glob(f".writing_*step_{DIGITS}"):
        delete(path)


def put_in_place(final):
    """Gives a written folder its name, in place of the same step that was saved before."""
    if is_other_step(final):
        number = 1
        while os.path.lexists(f"{final}_copy{number}"):
            number += 1
        os.rename(final, f"{final}_copy{number}")
        warn(f"{final} was of another step, by its state.json, and is now {final}_copy{number}")
    old = hidden_path(final, "old_")
    replaced = final in folders(final.parent)
    if replaced:
        os.rename(final, old)
    try:
        os.rename(hidden_path(final), final)
    except OSError:
        if replaced:
            os.rename(old, final)
        raise
    files.sync(final.parent)
    if replaced:
        delete(old)


def bring_back(out_dir):
    """Gives a step back its name, if a kill came between the renames when it was saved again."""
    for old in sorted(Path(out_dir).glob(f".writing_old_step_{DIGITS}")):
        final = old.with_name(old.name.removeprefix(".writing_old_"))
        for folder in (hidden_path(final), old):
            if not final.exists() and problem(folder) is None:
                os.rename(folder, final)
                warn(f"{final}: a kill left it hidden, as {folder.name}; it is back")


def is_other_step(folder):
    """Whether a checkpoint's name and its state.json are of two steps: it was copied or renamed."""
    try:
        step = read_state_json(folder).get("step")
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
                losses[folder] = read_state_json(folder).get("val_loss")
        except CheckpointError as error:
            whole.discard(folder)
            warn(f"{folder} was damaged while this run went on ({error})")
    whole.update(losses)
    evaluated = [folder for folder in losses if losses[folder] is not None]
    newest = list(losses)[-keep_last:]
    kept = {*newest, min(evaluated, key=losses.get, default=final)}
    for folder in older:
        if folder not in kept and (folder in whole or folder < newest[0]):
            remove(folder)


def find(path):
    """The checkpoint that `path` names: path itself, or a run's newest undamaged one.

    All ranks call it.
    """
    path = Path(path)
    exists = os.path.exists(path)
    is_one = exists and (path.match(f"step_{DIGITS}") or (path / "manifest.json").is_file())
    newest_first = [] if is_one else [folder.name for folder in reversed(folders(path))]
    # rank 0's, since another node may not see the folder, or may have its own
    is_one, newest_first = parallel.gather_objects((is_one, newest_first))[0]
    candidates = [path] if is_one else [path / name for name in newest_first]
    problems = []
    for folder in candidates:
        wrong = problem_of_ranks(folder)
        if wrong is None:
            if problems:
                warn(f"{folder} is taken, the newest that is whole")
            return folder
        problems.append(wrong)
        warn(f"{folder} is damaged ({wrong}); left in place")
    why = "no such folder"
    if problems:
        why = f"{len(candidates)} damaged, the newest: {problems[0]}"
    elif exists:
        why = "no folder step_*"
    hint = (
        "expected a run's folder, or one of its step_*/; Hugging Face weights are "
        "--pretrained=FOLDER, in train.py --init_from=hf:FOLDER"
    )
    raise CheckpointError(f"{path}: no whole checkpoint there, {why} ({hint})")


def problem_of_ranks(folder):
    """What is wrong with a checkpoint on any rank, in words; None if it is whole.

    A rank on another node may see another folder.
    """
    own = problem(folder, *parallel.rank_and_size())
    manifest = None if own else files.digest(folder / "manifest.json")
    of_ranks = parallel.gather_objects((own, manifest))
    for rank, (wrong, theirs) in enumerate(of_ranks):
        if wrong:
            return f"rank {rank}: {wrong}" if rank else wrong
        if theirs != of_ranks[0][1]:
            return f"rank {rank} has another one of that name; all nodes must share the folder"
    return None


def problem(folder, rank=0, ranks=1):
    """What is wrong with a checkpoint, in words; None if it is whole.

    Each of the ranks reads other files.
    """
    try:
        verify(Path(folder), rank, ranks)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def verify(folder, rank, ranks):
    """Raises CheckpointError, or OSError, unless a checkpoint is whole."""
    manifest = files.read_json(folder / "manifest.json", CheckpointError, {})
    needed = {"state.json"}
    for pattern in ("*.safetensors", "values.json"):
        needed |= {path.name for path in folder.glob(pattern)}
    if unnamed := sorted(needed - manifest.keys()):
        raise CheckpointError(f"manifest.json does not name {unnamed[0]}")
    for name in manifest:
        path = folder / name
        if not files.plain_name(name) or path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"manifest.json names {name!r}, which is not a file in the folder"
            )
    if is_other_step(folder):
        step = read_state_json(folder)["step"]
        raise CheckpointError(f"it is of step {step}: copied, or renamed")
    own = sorted(manifest)[rank::ranks]
    with ThreadPoolExecutor() as pool:
        digests = pool.map(files.digest, [folder / name for name in own])
        for name, digest in zip(own, digests):
            if list(digest) != manifest[name]:
                raise CheckpointError(
                    f"{name} is not as long as manifest.json says, or has another SHA-256"
                )
    if rank == 0 and "model" not in open_merged(folder)[0]:
        raise CheckpointError("it holds no weights")
