"""From text to tokens to batches; imports configurator and run/files.py alone, and no model."""

import contextlib

from configurator import UserError


class DataError(UserError):
    """Data that cannot be read or written."""

    exit_code = 3


def brief(error):
    """The type and the text of an exception, in a line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def told(what):
    """Turns what a library raises at files of others, a panic of Rust's included, into a UserError."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # no Exception; its class cannot be imported
        if isinstance(error, UserError) or not (panic or isinstance(error, Exception)):
            raise
        raise UserError(f"{what}: {brief(error)}") from None
