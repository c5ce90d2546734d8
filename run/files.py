"""Files: written atomically, read as JSON with a one-line error, hashed. Imports only the standard library."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from configurator import UserError


def write_atomic(path, data):
    """Writes `data` (bytes, or text as UTF-8) to `path`: after a crash the file is the old one or the new one, whole.

    The data goes to a file beside it, which is synced and renamed. Raises OSError, and leaves nothing behind then.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextlib.contextmanager
def writable(out_dir):
    """Turns a failure to write in a run's folder into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: {error.strerror}; try another --out_dir") from None


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path, error=UserError):
    """The value in the JSON file `path`; raises `error`, a subclass of UserError, where it cannot be read."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{path} is damaged: it is not valid JSON ({problem})") from None


def digest(path):
    """(bytes, SHA-256 as hexadecimal text) of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def sync(path):
    """Flushes a file, or a folder's list of names, to the disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def patiently(call, *args, **options):
    """A call of huggingface_hub or datasets, up to five times at a server's error or half a file.

    These end a download there at once, while they go on by themselves after a lost connection or a 429.
    """
    for wait in (1, 2, 4, 8, None):
        try:
            return call(*args, **options)
        except Exception as error:
            causes = [error, error.__cause__]  # LocalEntryNotFoundError: nothing is cached, because of its cause
            busy = any(getattr(getattr(e, "response", None), "status_code", 0) >= 500 for e in causes)
            if wait is None or not (busy or "Consistency check failed" in str(error)):
                raise
        time.sleep(wait)
