"""From text to tokens to batches; imports configurator and run/files.py alone, and no model."""

from configurator import UserError


class DataError(UserError):
    """Data that cannot be read or written."""

    exit_code = 3


def brief(error):
    """The type and the text of an exception, in a line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
