"""The code of a run: model.py, kernels.py and a digest of every source, in out_dir and in each checkpoint."""

import os
import shlex
import subprocess
from pathlib import Path

from configurator import UserError
from run import files

HERE = Path(__file__).parent.parent
COPIED = ("model.py", "kernels.py")
KEPT = ("source.json", *COPIED)  # in this order: copies without source.json beside them are a user's own
FOLDERS = (".", "corpus", "fast", "measure", "run", "scale")


def digests():
    """{path from the repository's top: SHA-256} of every Python and CUDA source."""
    paths = sorted(path for folder in FOLDERS for path in (HERE / folder).glob("*"))
    sources = (path for path in paths if path.suffix in (".py", ".cu", ".cuh"))
    return {path.relative_to(HERE).as_posix(): files.digest(path)[1] for path in sources}


def git_revision():
    """The commit that this code is at, with -dirty where files differ from it; None outside a repository."""
    try:
        words = ["git", "-C", os.fspath(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def refuse_own(out_dir):
    """Raises UserError where out_dir holds a model.py or kernels.py that no run wrote."""
    own = [Path(out_dir) / name for name in COPIED if (Path(out_dir) / name).exists()]
    if own and not (Path(out_dir) / "source.json").exists():
        raise UserError(f"{own[0]} is not a run's copy; move it, or give another --out_dir")


def record(out_dir):
    """Writes today's code into out_dir. Raises OSError."""
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    files.write_json(Path(out_dir) / "source.json", {"git": git_revision(), "files": digests()})
    for name in COPIED:
        files.write_atomic(Path(out_dir) / name, (HERE / name).read_bytes())


def warning(folder):
    """How model.py, kernels.py and fast/ differ from what a run's or checkpoint's folder keeps, or None."""
    try:
        then = files.read_json(Path(folder) / "source.json", form={"files": {str: files.sha256}})["files"]
    except UserError:
        return None
    now = digests()
    changed = (path for path in sorted(then | now) if then.get(path) != now.get(path))
    found = [path for path in changed if path in COPIED or path.startswith("fast/")]
    if not found:
        return None
    copies = [shlex.join(["cp", f"{folder}/{name}", name]) for name in COPIED if name in found]
    back = f"; to go back: {'; '.join(copies)}" if copies else ", so results agree up to rounding"
    return f"this code differs from the one that {folder} was trained with ({', '.join(found)}){back}"
