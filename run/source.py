"""The code of a run: model.py, kernels.py and a digest of every source, in out_dir and in each checkpoint."""

import hashlib
import sys
from importlib import metadata
from pathlib import Path

from configurator import UserError
from run import files

HERE = Path(__file__).parent.parent
COPIED = ("model.py", "kernels.py")
KEPT = ("source.json", *COPIED)  # in this order: copies without source.json beside them are a user's own
FOLDERS = (".", "corpus", "fast", "measure", "run", "scale")


def digests():
    """{path from the repository's top: SHA-256} of every Python and CUDA source."""
    paths = (p for folder in FOLDERS for p in (HERE / folder).glob("*") if p.suffix in (".py", ".cu", ".cuh"))
    return {path.relative_to(HERE).as_posix(): files.digest(path)[1] for path in sorted(paths)}


def imported():
    """SHA-256 of the imported code but Python's own: a package's RECORD, any other file's bytes."""
    library, site = Path(hashlib.__file__).parent, Path(sys.modules["torch"].__file__).parents[1]
    files = {Path(str(getattr(m, "__file__", ""))) for n, m in [*sys.modules.items()] if n[:6] != "torch."}
    own = sorted(f for f in files if f.suffix == ".py" and not {library, site} & {*f.parents} and f.is_file())
    installed = sorted(p.read_text("RECORD") or "" for p in metadata.distributions(path=[str(site)]))
    code = "".join(installed).encode() + b"".join(file.read_bytes() for file in own)
    return hashlib.sha256(code).hexdigest()


def record(out_dir):
    """Writes today's code into out_dir. Raises OSError."""
    files.write_json(Path(out_dir) / "source.json", {"files": digests()})
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
    return f"this code differs ({', '.join(found)}) from that of {folder}, which keeps it" if found else None
