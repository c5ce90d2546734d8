"""A run remembers its code: the sources that decide what is computed, kept and compared.

At its start a run writes out_dir/source.json (SHA-256 of every source file), model.py and kernels.py. Where a resumed
run finds other code there, the older goes to out_dir/source_step_XXXXXXXX/: the code of the steps up to that one. What
goes wrong here costs the record, never the run.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from configurator import UserError
from run import files

HERE = Path(__file__).parent.parent
KEPT = ("model.py", "kernels.py")  # copied whole; of the other sources the digest is kept
WINGS = ("fast", "scale", "run", "corpus", "measure")


def digests():
    """{path from the repository's top: SHA-256} of every *.py, *.cu and *.cuh at the top level and in the wings."""
    paths = [p for folder in (HERE, *(HERE / wing for wing in WINGS)) for p in folder.iterdir()]
    return {
        p.relative_to(HERE).as_posix(): files.digest(p)[1]
        for p in sorted(paths)
        if p.suffix in (".py", ".cu", ".cuh")
    }


def git_revision():
    """The commit that this code is at, with -dirty where files differ from it; None outside a repository."""
    try:
        words = ["git", "-C", os.fspath(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def record(out_dir, step):
    """Writes today's code into out_dir of a run that starts after `step` steps; returns a problem in words or None."""
    out_dir = Path(out_dir)
    try:
        now = {"git": git_revision(), "files": digests()}
        out_dir.mkdir(parents=True, exist_ok=True)
        if step == 0:
            forget(out_dir)
        elif (out_dir / "source.json").is_file():
            if _recorded(out_dir) == now["files"]:
                return None
            _set_aside(out_dir, step)
        for name in KEPT:
            files.write_atomic(out_dir / name, (HERE / name).read_bytes())
        files.write_json(out_dir / "source.json", now)
    except OSError as error:
        return f"the code of this run is not kept in {out_dir}: {error}"
    return None


def _set_aside(out_dir, step):
    """Moves the recorded code to source_step_<step>, unless older code from an earlier resume is there."""
    aside = out_dir / f"source_step_{step:08d}"
    if not aside.exists():
        aside.mkdir()
        for name in ("source.json", *KEPT):
            if (out_dir / name).is_file():
                (out_dir / name).rename(aside / name)


def forget(out_dir):
    """Removes the record of an earlier run."""
    out_dir = Path(out_dir)
    for folder in out_dir.glob("source_step_*"):
        shutil.rmtree(folder, ignore_errors=True)
    if (out_dir / "source.json").is_file():
        for name in ("source.json", *KEPT):
            (out_dir / name).unlink(missing_ok=True)


def kept(folder):
    """The folder with the code that a run's folder or a checkpoint's (step_*) was trained with, or None."""
    folder, step = Path(folder), None
    if folder.name.startswith("step_") and folder.name[5:].isdecimal():
        folder, step = folder.parent, int(folder.name[5:])
    aside = sorted(p for p in folder.glob("source_step_*") if p.name[12:].isdecimal())
    found = [p for p in aside if step is not None and int(p.name[12:]) >= step][:1] or [folder]
    return found[0] if (found[0] / "source.json").is_file() else None


def _recorded(folder):
    """{path: SHA-256} as recorded in `folder`; empty where it is unreadable."""
    try:
        return files.read_json(folder / "source.json", form={"files": {str: files.sha256}})["files"]
    except UserError:
        return {}


def differences(folder):
    """[path] of the sources that decide what is computed and differ today from those that `folder` was trained with.

    These are model.py, kernels.py and fast/. folder: a run's or a checkpoint's; without a record nothing differs.
    """
    source = kept(folder)
    then = _recorded(source) if source else {}
    if not then:
        return []
    try:
        now = digests()
    except OSError:
        return []
    paths = sorted(p for p in then.keys() | now.keys() if p in KEPT or p.startswith("fast/"))
    return [p for p in paths if then.get(p) != now.get(p)]


def warning(folder):
    """What to tell the user of `differences`, in one or two lines, or None."""
    found, lines = differences(folder), []
    if own := [p for p in found if p in KEPT]:
        verb = "differs" if len(own) == 1 else "differ"
        copies = "; ".join(shlex.join(["cp", str(kept(folder) / name), name]) for name in own)
        lines.append(
            f"{' and '.join(own)} {verb} from the code that {folder} was trained with; to go back: {copies}"
        )
    if fast := [p for p in found if p not in KEPT]:
        names = ", ".join(fast[:3]) + f" and {len(fast) - 3} more" * (len(fast) > 3)
        lines.append(f"fast forms differ from that run's ({names}): results agree up to rounding")
    return "\n".join(lines) or None
