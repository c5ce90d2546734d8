"""Files: written atomically, read as JSON of an expected form, hashed. Imports only the standard library."""

import contextlib
import hashlib
import json
import math
import os
import re
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


def finite(values):
    """The dict with None for inf and NaN, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def write_json(path, value):
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path, error=UserError, form=None):
    """The value in the JSON file `path`; raises `error`, a subclass of UserError, where it is none or not of `form`."""
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as problem:
        raise error(f"{path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is damaged: it is not valid JSON ({problem})") from None
    if wrong := form and misfit(value, form):
        raise error(f"{path} is damaged: {wrong}")
    return value


def misfit(value, form, at="it"):
    """Where a value of JSON is not of `form`, in words; None if it fits.

    form: a function, which is called with the value and whose docstring says what it accepts; a tuple of alternatives,
    which may be values; [form] for a list; {name: form} for an object, whose names ending in ? may be absent and whose
    others are free; {str: form} for an object of any names.
    """
    kind = type(form)
    if kind is tuple:
        found = [misfit(value, one, at) for one in form]
        if None in found:
            return None
        same = [wrong for one, wrong in zip(form, found) if type(one) is type(value) in (list, dict)]
        return same[0] if same else _not(value, form, at)
    if kind is list and isinstance(value, list):
        return next(filter(None, (misfit(v, form[0], f"{at}[{i}]") for i, v in enumerate(value))), None)
    if kind is dict and isinstance(value, dict):
        names = {key: form[str] for key in value} if str in form else form
        parts = {key.removesuffix("?") if str not in form else key: one for key, one in names.items()}
        gone = [key for key in parts if key not in value and key in names]
        there = ((key, one) for key, one in parts.items() if key in value)
        wrong = (misfit(value[key], one, f"{at}.{_short(key)[1:-1]}") for key, one in there)
        return f"{at} has no {gone[0]}" if gone else next(filter(None, wrong), None)
    fits = form(value) if callable(form) else type(value) is kind and value == form
    return None if fits else _not(value, form, at)


def _not(value, form, at):
    kinds = {list: "a list", dict: "an object"}
    forms = form if isinstance(form, tuple) else (form,)
    expected = (kinds.get(type(one)) or (one.__doc__ if callable(one) else json.dumps(one)) for one in forms)
    return f"{at.removeprefix('it.')} is {_short(value)}, expected {' or '.join(expected)}"


def _short(value):
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:56]} ..."


def text(value):
    """a text"""
    return isinstance(value, str)


def flag(value):
    """true or false"""
    return isinstance(value, bool)


def count(value):
    """a whole number from 0 to 2**63"""
    return type(value) is int and 0 <= value < 1 << 63


def id_count(value):
    """a number of token ids, from 1 to 2**31"""
    return type(value) is int and 0 < value <= 1 << 31


def number(value):
    """a finite number"""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def sha256(value):
    """a SHA-256"""
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))


def plain_name(value):
    """the plain name of a file in this folder"""
    return isinstance(value, str) and value not in ("", ".", "..") and not re.search(r"[/\\\0]", value)


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
            causes = [
                error,
                error.__cause__,
            ]  # LocalEntryNotFoundError: nothing is cached, because of its cause
            busy = any(getattr(getattr(e, "response", None), "status_code", 0) >= 500 for e in causes)
            if wait is None or not (busy or "Consistency check failed" in str(error)):
                raise
        time.sleep(wait)
