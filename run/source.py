"""The code of a run: a digest of every source, and copies of model.py and kernels.py.

train.py imports this file first: it notes the sources as they are when the process begins. The
digests are compared over ranks and kept in out_dir and in each checkpoint.
"""

import hashlib
import json
from pathlib import Path

from system import files
from system.errors import UserError

HERE = Path(__file__).parent.parent
FOLDERS = (".", "corpus", "fast", "measure", "run", "scale", "system")


def digests():
    """{path from the repository's top: SHA-256} of every Python and CUDA source, as it is now."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((HERE / folder).glob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                found[path.relative_to(HERE).as_posix()] = files.digest(path)[1]
    return found


BEGAN = digests()  # what this process runs
COPIES = {name: (HERE / name).read_bytes() for name in ("model.py", "kernels.py")}


def tag():
    """SHA-256 of all sources, for torch.compile's cache."""
    return hashlib.sha256(str(BEGAN).encode()).hexdigest()


def check():
    """Raises UserError if a source was edited since the process began, while it imports them."""
    if changed := differences(digests()):
        raise UserError(f"{', '.join(changed)}: edited while this run began; start it again")


def differences(then):
    """Paths whose digests are not those of this process."""
    return [path for path in sorted(then | BEGAN) if then.get(path) != BEGAN.get(path)]


def record(out_dir):
    """Writes the code that this process runs into out_dir. Raises OSError.

    source.json first: copies without it beside them are a user's own.
    """
    files.write_json(Path(out_dir) / "source.json", BEGAN)
    for name, data in COPIES.items():
        files.write_atomic(Path(out_dir) / name, data)


def warning(folder):
    """How model.py, kernels.py and fast/ differ from those that a folder keeps, or None.

    folder: of a run or a checkpoint.
    """
    try:
        then = json.loads((Path(folder) / "source.json").read_bytes())
    except (OSError, ValueError):
        return None
    found = [name for name in differences(then) if name in COPIES or name.startswith("fast/")]
    if not found:
        return None
    return f"{', '.join(found)}: other code than that of {folder}, whose weights it now runs"
