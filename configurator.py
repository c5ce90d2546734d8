"""Settings for every script: dataclass defaults <- config file(s) <- --key=value.

    python train.py config/gpt2_124m.py --batch_size=32 --lr=3e-4 --no_compile

A config file is plain Python assignments; it may import and compute, and names that start with `_` are its own.
Every mistake is one line that says where it stands and what would be right, with exit code 2.
"""

import ast
import dataclasses
import difflib
import inspect
import io
import os
import re
import sys
import tokenize
import types
import typing
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can mend: printed as one line, without a traceback. Subclasses set `exit_code`."""

    exit_code = 2


def configure(cls, argv=None):
    """Returns an instance of dataclass `cls` filled from its defaults, config files and flags, in the order given.

    argv: words as in sys.argv[1:]; a word without dashes is a config file. Raises UserError.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(describe(cls))
        sys.exit(0)
    settings = {}
    for word in argv:
        settings.update(_flag(cls, word) if word.startswith("--") else _file(cls, word))
    return cls(**settings)


def run(main, cls):
    """Runs main(cfg) as a script; a UserError becomes one line on stderr (from rank 0) and the exit code."""
    try:
        main(configure(cls))
        sys.stdout.flush()
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def too_small(cfg, least):
    """What is wrong, a line each, with settings below their least value, {name: value}; NaN is, None is not."""
    pairs = {name: getattr(cfg, name) for name in least}
    return [f"{k}={v} must be at least {least[k]}" for k, v in pairs.items() if v is not None and not v >= least[k]]


def refuse(found):
    """Raises one UserError of all that was found wrong, a line each; none if nothing was."""
    if found:
        raise UserError("; ".join(found))


def changed(cfg):
    """The settings of `cfg` that differ from the defaults, as a dict."""
    return {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if getattr(cfg, f.name) != f.default}


def convert(cls, name, value, where):
    """`value` (text from a flag, or a Python object from a file) as the type of field `name`, or UserError."""
    hint = typing.get_type_hints(cls)[name]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None or (value == "None" and type(None) in options):
        if type(None) in options:
            return None
    for kind in options:
        found, result = _as(kind, value)
        if found:
            return result
    raise UserError(f"{where}: {name}={value} is not {_type_name(hint)}")


def _as(kind, value):
    """(True, value as `kind`) if it can be read so without loss, else (False, None)."""
    if typing.get_origin(kind) is typing.Literal:
        return (True, value) if value in typing.get_args(kind) else (False, None)
    if kind is str:
        return isinstance(value, str), value
    if kind is bool:
        words = {"true": True, "false": False, "1": True, "0": False}
        value = words.get(value.lower()) if isinstance(value, str) else value
        return isinstance(value, bool), value
    if isinstance(value, str) and kind in (int, float):
        try:
            value = int(value) if re.fullmatch(r"[+-]?[\d_]+", value) else float(value)
        except (ValueError, OverflowError):
            return False, None
    if kind in (int, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        if kind is float or value % 1 == 0:  # 1e6 is a fine int, 0.5 and inf are not
            return True, kind(value)
    return False, None


def _type_name(hint):
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    return {int: "an int", float: "a float", bool: "a bool", str: "a str", type(None): "None"}[hint]


def _flag(cls, word):
    """--key=value, --flag or --no_flag as {name: value}."""
    names = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    key, equals, value = word[2:].partition("=")
    if not equals and key in names and hints[key] is bool:
        return {key: True}
    if not equals and key.startswith("no_") and hints.get(key[3:]) is bool:
        return {key[3:]: False}
    if key not in names:
        raise UserError(f"command line: unknown setting --{key}{_suggest(key, cls)}")
    if not equals:
        raise UserError(f"command line: --{key} needs a value, written --{key}=VALUE (with '=', no space)")
    return {key: convert(cls, key, value, "command line")}


def _file(cls, path):
    """Runs config file `path` and returns its settings."""
    if not os.path.isfile(path):
        recipes = ", ".join(sorted(map(str, Path("config").glob("*.py")))) or "none in config/"
        raise UserError(f"{path}: no such config file; a flag is written --key=value; recipes: {recipes}")
    try:
        source, space = Path(path).read_text(), {}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [] if here in sys.path else [here]  # so that `from config.gpt2_124m import *` works anywhere
    try:
        exec(compile(source, path, "exec"), space)
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        lines = [f.lineno for f in inspect.getinnerframes(error.__traceback__) if f.filename == path]
        raise UserError(f"{path}:{lines[-1] if lines else '?'}: {type(error).__name__}: {error}") from None
    names = {f.name for f in dataclasses.fields(cls)}
    settings = {}
    for key, value in space.items():
        if key.startswith("_") or isinstance(value, types.ModuleType) or callable(value):
            continue
        where = f"{path}:{_line_of(source, key)}"
        if key not in names:
            hint = _suggest(key, cls) or "; a name of the file's own starts with '_'"
            raise UserError(f"{where}: unknown setting {key}{hint}")
        settings[key] = convert(cls, key, value, where)
    return settings


def _line_of(source, name):
    """Line of the last assignment to `name` in `source` (its import where there is none)."""
    lines = [n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and n.id == name]
    return max(lines, default=1)


def _suggest(key, cls):
    """A guess at what was meant: a setting of a like name, else one whose comment has like words (lerning_rate: lr)."""
    meant = {f.name: f.name for f in dataclasses.fields(cls)}
    for name, comment in _all_comments(cls).items():
        words = re.findall(r"\w+", comment.lower())
        for phrase in zip(words, words[1:]):
            meant.setdefault("_".join(phrase), name)
    close = difflib.get_close_matches(key.lower(), meant, n=1, cutoff=0.7)
    return f"; did you mean {meant[close[0]]}?" if close else ""


def describe(cls):
    """The --help text: the class's docstring, then every setting with its type, default and comment."""
    comments, hints = _all_comments(cls), typing.get_type_hints(cls)
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    rows = [doc, "", "Settings:"] if doc else ["Settings:"]
    for f in dataclasses.fields(cls):
        rows.append(f"  --{f.name}={f.default}".ljust(38) + f" {_type_name(hints[f.name])}: {comments.get(f.name, '')}")
    return "\n".join(rows)


def _all_comments(cls):
    """{field: comment} of a dataclass and the ones that it inherits from."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    return {name: comment for base in bases for name, comment in _comments(inspect.getsource(base)).items()}


def _comments(source):
    """{field: its trailing comment} of a dataclass's source."""
    found, name = {}, None
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type == tokenize.NAME and token.start[1] == 4:
            name = token.string
        elif token.type == tokenize.COMMENT and token.line[:4].isspace() and not token.line.strip().startswith("#"):
            found[name] = token.string.lstrip("# ")
    return found
