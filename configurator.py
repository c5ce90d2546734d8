"""Settings of every script: dataclass defaults <- config files <- --key=value, in the order given.

    python train.py config/gpt2_124m.py --batch_size=32 --lr=3e-4 --no_compile

`--key value` works too, and `gpt2_124m` names config/gpt2_124m.py. A config file is plain Python:
it may import and compute, and names that start with `_` are not settings. `~` at the beginning of
a path is the home. All mistakes are reported at once.
"""

import contextlib
import dataclasses
import difflib
import inspect
import itertools
import operator
import re
import runpy
import shutil
import sys
import textwrap
import types
import typing
from decimal import Decimal
from pathlib import Path

from system import errors
from system.errors import UserError, refuse

HERE = Path(__file__).absolute().parent


def parse(cls, check=lambda cfg: None, complete=dict):
    """`configure` from the command line, before the large imports; a mistake ends the process."""
    errors.start()
    return configure(cls, sys.argv[1:], check, complete)


def run(main, cfg):
    """Runs main(cfg), which may return an exit code, as a script.

    cfg: from `parse`, or a class to parse.
    """
    if isinstance(cfg, type):
        cfg = parse(cfg)
    errors.run(main, cfg)


def configure(cls, argv, check=lambda cfg: None, complete=dict):
    """An instance of dataclass `cls` for words as in sys.argv[1:]; a UserError names all mistakes.

    A word without dashes is a config file, or goes into `words` of the instance if cls has them.
    complete({name: value}) returns the given settings with others that follow from them.
    """
    if "--help" in argv or "-h" in argv:
        print(describe(cls, sys.modules["__main__"].__doc__ or ""))
        errors.leave(0)
    hints = typing.get_type_hints(cls)
    rest = list(argv)
    settings = {}
    words = []
    wrong = []
    while rest:
        word = rest.pop(0)
        try:
            if word.startswith("--"):
                found = [("command line", *_flag(word, rest, hints))]
            elif hasattr(cls, "words"):
                words.append(word)
                continue
            else:
                found = _settings_of(_find_file(word))
        except UserError as error:
            wrong += error.args
            continue
        for where, name, value in found:
            try:
                settings[name] = _convert(cls, hints, name, value)
            except UserError as error:
                wrong.append(f"{where}: {error}")
    refuse(wrong)
    cfg = cls(**complete(settings))
    check(cfg)
    cfg.words = words
    return cfg


def _flag(word, rest, hints):
    """(name, value) of --key=value, --key value, --flag or --no_flag.

    Takes from `rest` the words of the value.
    """
    key, equals, value = word[2:].partition("=")
    if equals:
        return key, value
    flag = key if key in hints else key.removeprefix("no_")
    if hints.get(flag) is bool:
        return flag, key == flag
    following = list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
    if key in hints and not following:
        raise UserError(f"command line: --{key} needs a value, written --{key}=VALUE")
    if typing.get_origin(hints.get(key)) is tuple:  # --key A B C
        del rest[: len(following)]
        return key, following
    return key, rest.pop(0) if following else ""


def _find_file(word):
    """The path of a config file, of which `word` may lack .py and config/."""
    for folder in ("", "config", HERE, HERE / "config"):
        path = Path(folder, f"{word.removesuffix('.py')}.py")
        if path.is_file():
            return str(path)
    recipes = sorted(path.stem for path in HERE.glob("config/*.py"))
    known = f"settings are written --name=value; recipes: {', '.join(recipes)}"
    raise UserError(f"{word}: no such config file; {known}")


def _settings_of(path):
    """Runs a config file: [(path, name, value)] of its settings."""
    found = []
    for name, value in runpy.run_path(path).items():
        is_import = callable(value) or isinstance(value, types.ModuleType)
        if not name.startswith("_") and not is_import:
            found.append((path, name, value))
    return found


# -- values


def _convert(cls, hints, name, value):
    """`value`, text of a flag or an object of a file, as a setting of this name, without loss."""
    if name not in hints:
        others = getattr(cls, "others_names", {})
        close = difflib.get_close_matches(name.lower(), [*hints, *others], n=1, cutoff=0.7)
        hint = f"; did you mean {others.get(close[0], close[0])}?" if close else ""
        raise UserError(f"unknown setting {name}{hint}")
    kinds = _alternatives(hints[name])
    if types.NoneType in kinds and str(value) == "None":
        return None
    if isinstance(value, str) and not name.endswith("prompt"):
        # the shell leaves --key=~/x as it is
        value = re.sub("(^|[,:])~(?=/|$)", rf"\1{Path.home()}", value)
    for kind in kinds:
        with contextlib.suppress(ValueError, KeyError, ArithmeticError):  # of Decimal
            return _read(kind, value)
    raise UserError(f"{name}={value} is not {_in_words(hints[name])}")


def _alternatives(hint):
    """The types, and single values, of which a setting may be one."""
    # a union that has a Literal in it is a typing.Union
    if typing.get_origin(hint) in (types.UnionType, typing.Union, typing.Literal):
        return list(itertools.chain(*map(_alternatives, typing.get_args(hint))))
    return [hint]


def _read(kind, value):
    """`value` as one of a kind, a type or a single value; raises ValueError if it is none."""
    if kind in (int, float):
        return _number(kind, value)
    if kind is str and isinstance(value, str):
        return value
    if typing.get_origin(kind) is tuple:
        return (value,) if isinstance(value, str) else tuple(value)
    if kind is bool:
        return {"true": True, "false": False}[str(value).lower()]
    if str(value) != str(kind):
        raise ValueError
    return kind


def _number(kind, value):
    number = Decimal(str(value))
    if not number.is_finite() or kind is int and number % 1:  # 1e6 is an int
        raise ValueError
    return kind(number)


def typed(cls, values):
    """`values`, of a JSON file, in the types of `cls`; UserError for what has another type."""
    hints = typing.get_type_hints(cls)
    return {name: _convert(cls, hints, name, value) for name, value in values.items()}


def _in_words(hint):
    words = [getattr(kind, "__name__", str(kind)) for kind in _alternatives(hint)]
    return "|".join(words).replace("NoneType", "None")


# -- checks


RULES = {
    "at least": operator.ge,
    "over": operator.gt,
    "below": operator.lt,
}


def outside(cfg, rule, bounds):
    """Problems, a line each: settings that break one of RULES, or are NaN; None passes.

    bounds: {name: bound}.
    """
    found = []
    for name, bound in bounds.items():
        value = getattr(cfg, name)
        if value is not None and not RULES[rule](value, bound):
            found.append(f"{name}={value} must be {rule} {bound}")
    return found


def too_small(cfg, least):
    """Problems, a line each: settings below their least, {name: value}; see `outside`."""
    return outside(cfg, "at least", least)


def changed(cfg):
    """The settings of a dataclass instance that differ from the defaults, {name: value}."""
    values = dataclasses.asdict(cfg)
    return {name: value for name, value in values.items() if value != getattr(type(cfg), name)}


def without_effect(cfg, names, why):
    """Problems, at most one: the changed settings in `names`, and why they do nothing."""
    words = [f"{name}={value}" for name, value in changed(cfg).items() if name in names]
    return [f"{' and '.join(words)} {why}"] if words else []


# -- help


def describe(cls, doc):
    """The --help text: `doc`, then settings by section, a class's own before those of its bases."""
    left = typing.get_type_hints(cls)  # to be shown
    sections = {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        section = "Settings"
        for line in inspect.getsource(base).splitlines():
            heading = re.match(r" {4}# (.+)", line)
            field = re.match(r" {4}(\w+): .*?  # (.+)", line)
            if heading:
                section = heading[1]
            elif field and field[1] in left:
                name, comment = field.groups()
                option = _option(name, getattr(cls, name), left.pop(name), comment)
                sections.setdefault(section, []).append(option)
    rows = [doc.strip()]
    for section, options in sections.items():
        rows += ["", f"{section}:", *options]
    return "\n".join(rows)


def _option(name, default, hint, comment):
    """A setting with its default, and beside it, or below, its values and its comment."""
    values = _in_words(hint)
    if "|" in values and values != "str|None":
        comment = f"{values}: {comment}"
    width = min(110, shutil.get_terminal_size().columns)  # longer lines read badly
    column = 28 if width >= 60 else 4
    return textwrap.fill(
        comment,
        width,
        initial_indent=f"  --{name}={default}  ".ljust(column),
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )
