"""Files: written atomically, read as JSON of an expected form, hashed. Imports only the standard library."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import reprlib
import time
from collections.abc import Callable
from pathlib import Path

from configurator import UserError


def write_atomic(path, data):
    """Writes bytes, or text as UTF-8; after a crash the file is the old or the new one. Raises OSError."""
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


def sync(path):
    """Flushes a file, or a folder's list of names, to the disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def writable(out_dir):
    """Turns a failure to write in a run's folder into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"out_dir={out_dir}: {error.strerror}; try another --out_dir") from None


def digest(path):
    """(bytes, SHA-256 as hexadecimal text) of a file."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def finite(values):
    """The dict with None for inf and NaN, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path, error=UserError, form=None):
    """The value in a JSON file; raises `error`, a kind of UserError, where it is none or not of `form`."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is damaged: it is not valid JSON ({problem})") from None
    if wrong := form and misfit(value, form):
        raise error(f"{path} is damaged: {wrong}")
    return value


@dataclasses.dataclass(frozen=True)
class Form:
    """What a value of JSON must be: in words, and as a test."""

    words: str
    fits: Callable

    def __call__(self, value):
        return self.fits(value)


text = Form("a text", lambda v: isinstance(v, str))
count = Form("a whole number from 0 to 2**63", lambda v: type(v) is int and 0 <= v < 1 << 63)
id_count = Form("a number of token ids, from 1 to 2**31", lambda v: type(v) is int and 0 < v <= 1 << 31)
number = Form("a finite number", lambda v: type(v) in (int, float) and abs(v) < 1e300)
sha256 = Form("a SHA-256", lambda v: isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v))
plain_name = Form("a file's name", lambda v: text(v) and re.fullmatch(r"(?!\.{1,2}$)[^/\\\0]+", v))


def misfit(value, form, at=""):
    """Where a value of JSON is not of `form`, in words; None if it fits.

    form: a Form or another function of the value; a value; (form, ...) for alternatives; [form] for a list;
    {name: form} for an object, whose names ending in ? may be absent and whose others are free; {str: form}
    for one of any names.
    """
    parts = []
    if isinstance(form, tuple):
        fits = any(misfit(value, one) is None for one in form)
    elif not isinstance(form, list | dict):
        fits = form(value) if callable(form) else type(value) is type(form) and value == form
    elif (fits := type(value) is type(form)) and isinstance(form, list):
        parts = [(f"{at}[{i}]", v, form[0]) for i, v in enumerate(value)]
    elif fits:
        for key, one in dict.fromkeys(value, form[str]).items() if str in form else form.items():
            if (name := key if key in value else key.removesuffix("?")) in value:
                parts.append((f"{at}.{reprlib.repr(name)[1:-1]}".lstrip("."), value[name], one))
            elif name == key:
                return f"{at or 'it'} has no {key}"
    if not fits:
        return f"{at or 'it'} is {reprlib.repr(value)}, expected {_words(form)}"
    return next(filter(None, (misfit(part, one, place) for place, part, one in parts)), None)


def _words(form):
    if isinstance(form, tuple):
        return " or ".join(map(_words, form))
    named = {list: "a list", dict: "an object", Form: getattr(form, "words", None)}
    return named.get(type(form)) or getattr(form, "__name__", json.dumps(form, default=str))


def patiently(call, *args, **options):
    """A call of huggingface_hub or datasets, up to five times at a server's error or half a file."""
    for wait in (1, 2, 4, 8, None):
        try:
            return call(*args, **options)
        except Exception as error:  # LocalEntryNotFoundError: nothing is cached, because of its cause
            causes = (error, error.__cause__)
            busy = any(getattr(getattr(e, "response", None), "status_code", 0) >= 500 for e in causes)
            if wait is None or not (busy or "Consistency check failed" in str(error)):
                raise
        time.sleep(wait)
