"""Files: written atomically, locked, read as JSON of an expected form, hashed; without torch."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import reprlib
import socket
import time
from pathlib import Path

from system.errors import UserError, warn


def write_atomic(path, data):
    """Writes bytes, or text as UTF-8; after a crash the file is the old or the new one.

    Raises OSError.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def leftovers(folder, ours):
    """What a killed write_atomic has left in a folder.

    It looks for files for whose names ours(name) is true.
    """
    found = []
    for path in sorted(Path(folder).iterdir()):
        aside = re.fullmatch(r"\.(.+)\.\d+\.tmp", path.name)
        if aside and ours(aside[1]) and (path.is_file() or path.is_symlink()):
            found.append(path)
    return found


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


class Lock:
    """The lock (flock) on out_dir/run.lock of the one run that may write in out_dir.

    It is taken if out_dir exists, else by take().
    """

    def __init__(self, out_dir):
        self.folder = Path(out_dir)
        self.file = None
        if os.path.isdir(out_dir):  # False also for a name that is too long
            self.take()

    def take(self):
        """Makes the folder, and raises UserError if that fails or another run holds the lock."""
        if self.file:
            return
        with writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "run.lock"
            file = open(path, "a+", errors="replace")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                words = f"{file.read(99)}; wait for its end, stop it, or give another --out_dir"
                raise UserError(f"out_dir={self.folder} is in use by a run: {words}") from None
            except OSError as error:  # a file system without locks
                warn(f"{path}: {error.strerror}: a second run is not refused")
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.file:
            self.file.close()


def digest(path):
    """(bytes, SHA-256 as hexadecimal text) of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path, error=UserError, form=lambda value: True):
    """The value in a JSON file; raises `error` unless it is of `form`, see misfits.

    error: a kind of UserError.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{path} is damaged: it is not valid JSON ({problem})") from None
    for wrong in misfits(value, form):
        raise error(f"{path} is damaged: {wrong}")
    return value


# what a value in a JSON file may be, for `form` of read_json


def text(value):
    return isinstance(value, str)


def count(value):
    return type(value) is int and 0 <= value < 1 << 63


def id_count(value):  # of token ids
    return count(value) and 0 < value <= 1 << 31


def number(value):  # finite
    return type(value) in (int, float) and abs(value) < 1e300


def sha256(value):
    return text(value) and re.fullmatch("[0-9a-f]{64}", value)


def plain_name(value):
    """The name of a file in the folder itself."""
    plain = text(value) and re.fullmatch(r"(?!\.{1,2}$)[^/\\\0\ud800-\udfff]+", value)
    return plain and len(value.encode()) < 256


def misfits(value, form, at="it"):
    """Yields the places where a value of JSON is not of `form`, in words.

    form: a test; a value; (form, ...) for alternatives; [form] for a list; {name: form} for an
    object, where names with ? may be absent and others are free; {str: form} for any names.
    """
    if isinstance(form, dict) and isinstance(value, dict):
        if str in form:
            form = dict.fromkeys(value, form[str])
        for key, inner in form.items():
            name = key.removesuffix("?")
            if name in value:
                yield from misfits(value[name], inner, f"{at}.{name}")
            elif name == key:
                yield f"{at} has no {key}"
        return
    if isinstance(form, list) and isinstance(value, list):
        for i, item in enumerate(value):
            yield from misfits(item, form[0], f"{at}[{i}]")
        return
    if isinstance(form, tuple):
        fits = any(not any(misfits(value, one)) for one in form)
    elif callable(form):
        fits = form(value)
    else:
        fits = type(value) is type(form) and value == form
    if not fits:
        yield f"{at} is {reprlib.repr(value)}, which it cannot be"


def patiently(call, *args, **options):
    """Calls huggingface_hub or datasets, up to five times at a server's error or half a file."""
    for wait in (1, 2, 4, 8, None):
        try:
            return call(*args, **options)
        except Exception as error:
            # the cause of a LocalEntryNotFoundError (nothing is cached) is the server's error
            causes = (error, error.__cause__)
            busy = any(
                getattr(getattr(e, "response", None), "status_code", 0) >= 500 for e in causes
            )
            if wait is None or not (busy or "Consistency check failed" in str(error)):
                raise
        time.sleep(wait)
