"""From text to tokens to batches; imports system/ alone, and no model."""

import contextlib
import json
from pathlib import Path

from system.errors import UserError, brief

# What a folder may hold in place of a tokenizer.json.
# Each tokenizer class of transformers makes a tokenizer.json of such files in its own way.
VOCABULARIES = (
    "vocab.json merges.txt vocab.txt tokenizer.model spiece.model tiktoken.model tekken.json"
).split()


LONG = 1 << 22  # characters that are encoded at once: libraries return 36 bytes and more a token
AGAIN = "; finished shards are kept: run the same command again"  # advice of fineweb.py


class DataError(UserError):
    """Data that cannot be read or written."""

    exit_code = 3


@contextlib.contextmanager
def as_user_error(what, kind=UserError, advice=""):
    """Turns what a library raises, a Rust panic too, into `kind`: "<what>: <error><advice>"."""
    try:
        yield
    except BaseException as error:
        # a panic is no Exception, and its class cannot be imported
        panic = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or not (panic or isinstance(error, Exception)):
            raise
        error = error.__cause__ or error  # of datasets' errors, the one that says what is wrong
        raise kind(f"{what}: {brief(error)}{advice}") from None


def read_json(path, kind=UserError):
    """The object in a JSON file; `kind` if the file cannot be read or holds anything else."""
    with as_user_error(f"{path} cannot be read", kind):
        value = json.loads(Path(path).read_bytes())
        if not isinstance(value, dict):
            raise TypeError("it holds no object of JSON")
        return value
