"""The code of a run: model.py, kernels.py and a digest of every source.

It is kept in out_dir and in each checkpoint. train.py imports this file before those whose import
takes seconds: it notes the sources as they are when the process begins, and `check` tells whether a
file was edited before it was imported.
"""

import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path

from system import files
from system.errors import UserError

HERE = Path(__file__).parent.parent
COPIED = ("model.py", "kernels.py")
# written in this order: copies without source.json beside them are a user's own
KEPT = ("source.json", *COPIED)
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
COPIES = {name: (HERE / name).read_bytes() for name in COPIED if name in BEGAN}
_imported = set()  # files that `check` has seen


def check():
    """Raises UserError for a file that was edited between the process's start and its import.

    It looks at the files that were imported since the last call. If there are any, it looks at all
    CUDA sources too, which are no imports: they are read when they are compiled.
    """
    names = set()
    for path in imported_files():
        if path.startswith(f"{HERE}{os.sep}"):  # of thousands: Path's own test takes 30 ms
            names.add(Path(path).relative_to(HERE).as_posix())
    new = names - _imported
    if not new:
        return
    _imported.update(new)
    now = digests()
    edited = []
    for name in sorted(BEGAN.keys() | now.keys()):
        read = name in new or name.endswith((".cu", ".cuh"))
        if read and now.get(name) != BEGAN.get(name):
            edited.append(name)
    if edited:
        raise UserError(
            f"{', '.join(edited)}: edited while this run began to import its code; start it again"
        )


def imported_files():
    """The files of all imported modules, but for PyTorch's and what torch.compile wrote."""
    found = set()
    for name, module in [*sys.modules.items()]:
        if not name.startswith("torch."):  # as torch.compile names what it writes too
            found.add(getattr(module, "__file__", None) or "")
    return found


def imported():
    """SHA-256 of the imported code but Python's own: a package's RECORD, any other file's bytes."""
    library = Path(hashlib.__file__).parent
    site = Path(sys.modules["torch"].__file__).parents[1]
    records = sorted(
        found.read_text("RECORD") or "" for found in metadata.distributions(path=[str(site)])
    )
    code = hashlib.sha256("".join(records).encode())
    for path in sorted(map(Path, imported_files())):
        if path.suffix == ".py" and path.is_file() and not {library, site} & {*path.parents}:
            code.update(path.read_bytes())
    return code.hexdigest()


def record(out_dir):
    """Writes the code that this process runs into out_dir.

    Raises OSError, and UserError as `check`.
    """
    check()
    files.write_json(Path(out_dir) / "source.json", {"files": BEGAN})
    for name, data in COPIES.items():
        files.write_atomic(Path(out_dir) / name, data)


def warning(folder):
    """How model.py, kernels.py and fast/ differ from those that a folder keeps, or None.

    folder: of a run or a checkpoint.
    """
    try:
        then = files.read_json(Path(folder) / "source.json", form={"files": {str: files.sha256}})[
            "files"
        ]
    except UserError:
        return None
    changed = (path for path in sorted(then | BEGAN) if then.get(path) != BEGAN.get(path))
    found = [path for path in changed if path in COPIED or path.startswith("fast/")]
    if not found:
        return None
    how = f"this code differs ({', '.join(found)}) from that of {folder}, which keeps it"
    return f"{how}; its weights are run by this code, which may compute something else"
