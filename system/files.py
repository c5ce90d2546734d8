"""Files and folders: written atomically, locked, hashed; without torch."""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path

from system.errors import UserError, warn

UNFINISHED = ".unfinished"  # how the name of a file ends that write_atomic is writing


def write_atomic(path, data):
    """Writes bytes, or text as UTF-8; after a crash the file is the old or the new one.

    Raises OSError.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def by_umask(path):
    """Gives a file the mode of any new one; safetensors makes it 0600."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync(path):
    """Flushes a file, or a folder's list of names, to the disk, to survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writable(out_dir):
    """Turns a failure to read or write in a run's folder into a UserError."""
    try:
        yield
    except OSError as error:
        name, why = os.path.basename(error.filename or out_dir), error.strerror or error
        raise UserError(f"out_dir={out_dir}: {name}: {why}; try another --out_dir") from None


@contextlib.contextmanager
def locked(out_dir):
    """Holds the lock (flock) on out_dir/run.lock of the one run that may write in out_dir.

    It makes the folder. Raises UserError if that fails or another run holds the lock.
    """
    path = Path(out_dir, "run.lock")
    with writable(out_dir):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out_dir={out_dir} is in use by another run; wait for its end, stop it (fuser "
                f"{path} tells which), or give another --out_dir"
            ) from None
        except OSError as error:  # a file system without locks
            warn(f"{path}: {error.strerror}: a second run is not refused")
        yield


def digest(path):
    """(bytes, SHA-256 as hexadecimal text) of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")
