"""Settings of every script: dataclass defaults <- config file(s) <- --key=value, in the order given.

    python train.py config/gpt2_124m.py --batch_size=32 --lr=3e-4 --no_compile

`--key value` works too, and a recipe needs neither its folder nor its ending: `python train.py gpt2_124m --lr 3e-4`. A
config file is plain Python: it may import and compute, and names that start with `_` are not settings. All mistakes are
reported together, on a line each that says where it stands and what would be right, with exit code 2.
"""

import ast
import contextlib
import dataclasses
import difflib
import faulthandler
import inspect
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import types
import typing
from pathlib import Path


class UserError(Exception):
    """Mistakes that the user can correct, a line each: printed without a traceback. Subclasses set `exit_code`."""

    exit_code = 2
    loud = None  # whether this process prints it; None: rank 0 does

    def __str__(self):
        return "; ".join(map(str, self.args))


def configure(cls, argv, check=lambda cfg: None, complete=dict):
    """An instance of dataclass `cls` from its defaults, config files and flags; one UserError names all mistakes.

    argv: words as in sys.argv[1:]; one without dashes is a config file, or goes into `words` of the instance if cls has
    such a list. check(cfg) raises UserError. cls.gone: {removed setting: reason}, if any. cls.nanogpt: {nanoGPT's name
    of a setting: ours}, if any.
    complete: given the settings that were set, {name: value}, returns them with more; called where none is mistaken.
    """
    if "--help" in argv or "-h" in argv:
        print(describe(cls, sys.modules["__main__"].__doc__ or ""), flush=True)
        sys.exit(0)
    reader, words, readable = _Reader(cls), list(argv), True
    while words:
        word = words.pop(0)
        try:
            if word.startswith("--"):
                reader.flag(word, words)
            elif hasattr(cls, "words"):
                reader.words.append(word)
            else:
                reader.file(word)
        except UserError as error:
            reader.wrong, readable = [*reader.wrong, str(error)], False
    try:
        cfg = cls(**(reader.settings if reader.wrong else complete(reader.settings)))
        if hasattr(cls, "words"):
            cfg.words = reader.words
        if readable:
            check(cfg)
    except UserError as error:  # without what may follow from a mistake that is named already
        named = set(re.findall(r"\w+", str(reader.wrong))) & set(reader.hints)
        reader.wrong += [text for text in error.args if named.isdisjoint(re.findall(r"\w+", text))]
    refuse(reader.wrong)
    return cfg


def parse(cls, check=lambda cfg: None, complete=dict):
    """`configure` from the command line of a script; a mistake ends the process."""
    leave_with_torchrun()
    with _errors_in_one_line():
        try:
            return configure(cls, sys.argv[1:], check, complete)
        except UserError:
            _leave_the_report_to_local_rank_0()
            raise


def run(main, cfg):
    """Runs main(cfg), which may return an exit code, as a script; a UserError ends the process.

    cfg: from `parse`, or a class to parse now.
    """
    cfg = parse(cfg) if isinstance(cfg, type) else cfg
    faulthandler.enable()  # where the process was when the kernel ended it: a shard cut short under its map, SIGBUS
    with _errors_in_one_line():
        code = main(cfg)
        sys.stdout.flush()
    leave(code or 0)


@contextlib.contextmanager
def _errors_in_one_line():
    """Turns a UserError into lines on one rank's stderr, the last line of torchrun's report, and an exit code."""
    try:
        yield
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:  # train.py saves and stops by itself, see run/signals.py
        if is_rank_0():
            print("\nstopped by SIGINT", file=sys.stderr, flush=True)
        leave(130)
    except UserError as error:
        if is_rank_0() if error.loud is None else error.loud:
            print(
                "".join(f"error: {problem}\n" for problem in error.args), end="", file=sys.stderr, flush=True
            )
        leave(error.exit_code, str(error))


def is_rank_0():
    """Whether this process is rank 0 or no rank, by torchrun's variables: known before a process group exists."""
    return os.environ.get("RANK", "0") == "0"


def leave(code, message=None, at_once=False):
    """Ends the process; a rank, or any process that is to end `at_once`, without Python's shutdown.

    There a rank's DDP model may wait for gloo's threads, which wait for Python. message: what torchrun prints of it.
    """
    if message and (report := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": words}))
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once or "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)


def leave_with_torchrun():
    """Ends this process, if it is a rank, within a second after torchrun was killed, from the imports on."""

    def wait(parent):
        while os.getppid() == parent:
            time.sleep(1)
        print("torchrun is gone", file=sys.stderr)
        leave(1, "torchrun is gone", at_once=True)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=wait, args=[os.getppid()], daemon=True).start()


def _leave_the_report_to_local_rank_0():
    """Other local ranks, which find the same mistake, wait for torchrun to end them: it reports each that fails."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(5)


def too_small(cfg, least):
    """Problems, one line each, with settings below their least value, {name: value}. NaN is refused; None passes."""
    pairs = {name: getattr(cfg, name) for name in least}
    return [
        f"{k}={v} must be at least {least[k]}"
        for k, v in pairs.items()
        if v is not None and not v >= least[k]
    ]


def changed(cfg):
    """The settings of a dataclass instance that differ from the defaults, {name: value}."""
    return {
        f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if getattr(cfg, f.name) != f.default
    }


def without_effect(cfg, names, why):
    """Problems, at most one line: those settings in `names` that differ from the defaults, and why they do nothing."""
    given = changed(cfg)
    words = [f"{name}={given[name]}" for name in names if name in given]
    return [f"{' and '.join(words)} {why}"] if words else []


def refuse(problems):
    """Raises one UserError that lists all problems, if there are any."""
    if problems:
        raise UserError(*problems)


class _Reader:
    """Collects `settings` from flags and files, and their mistakes in `wrong`, one line each."""

    def __init__(self, cls):
        self.cls, self.hints, self.gone = cls, typing.get_type_hints(cls), getattr(cls, "gone", {})
        self.nanogpt = getattr(cls, "nanogpt", {})
        self.settings, self.wrong, self.words = {}, [], []

    def flag(self, word, rest):
        """--key=value, --key value, --flag or --no_flag. rest: the words that follow; a value is taken from them."""
        key, equals, value = word[2:].partition("=")
        name = key if key in self.hints else key.removeprefix("no_")
        key = name if name in self.nanogpt else key
        follows = bool(rest) and not rest[0].startswith("--")
        if not equals and (self.hints.get(name) is bool or name in self.gone):
            said = follows and key == name and rest[0].lower() in ("true", "false")
            key, value = name, rest.pop(0) if said else str(key == name)
        elif not equals and follows and (key in self.hints or not _find(rest[0])):
            value = rest.pop(0)
        elif not equals and key in self.hints:
            self.wrong.append(f"command line: --{key} needs a value, written --{key}=VALUE")
            return
        self.put(key, value, "command line", "--")

    def file(self, word):
        """Runs a config file, whose path may lack its .py and config/, and takes its settings."""
        if not (path := _find(word)):
            raise UserError(f"{word}: no such config file; {_instead(word, self.hints)}")
        sys.path[:0] = {str(Path(__file__).absolute().parent)}.difference(
            sys.path
        )  # `from config.gpt2_124m import *`
        try:
            source, space = Path(path).read_text(), {}
            exec(compile(source, path, "exec"), space)
        except SyntaxError as error:
            raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from None
        except Exception as error:
            lines = [f.lineno for f in inspect.getinnerframes(error.__traceback__) if f.filename == path]
            raise UserError(
                f"{path}:{lines[-1] if lines else '?'}: {type(error).__name__}: {error}"
            ) from None
        for key, value in space.items():
            if not (key.startswith("_") or isinstance(value, types.ModuleType) or callable(value)):
                lines = [
                    n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and n.id == key
                ]
                self.put(key, value, f"{path}:{max(lines, default=1)}")  # its last assignment; 1: an import's

    def put(self, key, value, where, dashes=""):
        if key in self.gone:
            self.wrong.append(f"{where}: the setting {dashes}{key} was removed: {self.gone[key]}")
        elif key in self.nanogpt:
            self.wrong.append(f"{where}: nanoGPT's {dashes}{key} is {dashes}{self.nanogpt[key]}")
        elif key not in self.hints:
            hint = self.suggest(key) or ("" if dashes else "; a name that is not a setting starts with '_'")
            self.wrong.append(f"{where}: unknown setting {dashes}{key}{hint}")
        else:
            try:
                self.settings[key] = _convert(self.hints[key], value)
            except ValueError:
                self.wrong.append(f"{where}: {key}={_short(value)} is not {_type_name(self.hints[key])}")
            except OverflowError:
                self.wrong.append(f"{where}: {key}={_short(value)} is too large; an int must be below 2**63")

    def suggest(self, key):
        """A guess at what was meant: a setting of a similar name, else of a similar comment (lerning_rate: lr)."""
        if key == "config":
            return "; a config file's path is given alone, without --config="
        layout = _layout(self.cls)
        meant = {name: name for name in layout}
        for name, (_, comment) in layout.items():
            words = re.findall(r"\w+", comment.lower())
            for phrase in zip(words, words[1:]):
                meant.setdefault("_".join(phrase), name)
        close = difflib.get_close_matches(key.lower(), meant, n=1, cutoff=0.7)
        return f"; did you mean {meant[close[0]]}?" if close else ""


def _find(word):
    """The config file that a word names, with or without config/ and .py, here or beside this file; None if none."""
    parts = itertools.product(("", Path(__file__).parent), ("", "config"), (word, f"{word}.py"))
    return next(filter(os.path.isfile, itertools.starmap(os.path.join, parts)), None)


def _instead(word, hints):
    """What to write instead of a word that names no config file."""
    if word.partition("=")[0].lstrip("-") in hints and "=" in word:
        return f"a setting is written --{word.lstrip('-')}"
    if os.path.isdir(word) and "checkpoint" in hints:
        return f"a run's folder is --checkpoint={word}"
    recipes = sorted(path.stem for path in Path(__file__).parent.glob("config/*.py"))
    close = difflib.get_close_matches(Path(word).stem, recipes, n=1)
    return (
        f"did you mean {close[0]}?"
        if close
        else f"a setting is written --key=value; recipes: {', '.join(recipes)}"
    )


def _convert(hint, value):
    """`value`, text of a flag or an object of a file, as a type of `hint` without loss, else ValueError."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind, text = kinds[0], isinstance(value, str)
    if type(None) in kinds and value in (None, "None"):
        return None
    if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind) or kind is str and text:
        return value
    if kind is bool and str(value).lower() in (("true", "false", "1", "0") if text else ("true", "false")):
        return str(value).lower() in ("true", "1")
    if kind in (int, float) and not isinstance(value, bool):
        number = (int if text and re.fullmatch(r"[+-]?[\d_]+", value) else float)(value) if text else value
        if isinstance(number, (int, float)) and (
            kind is float or number % 1 == 0
        ):  # 1e6 is an int; 0.5, inf are not
            if kind is int and abs(number) >= 2**63:
                raise OverflowError
            return kind(number)
    raise ValueError


def _short(value):
    text = " ".join(str(value).split())  # of an int, at most 4,300 digits: Python reads no more
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def typed(cls, values, names):
    """`values`, an object read from a file, with those called `names` in the types of `cls`. Raises UserError."""
    if not isinstance(values, dict):
        raise UserError("it holds no settings")
    hints, found = typing.get_type_hints(cls), dict(values)
    for name in sorted(names & values.keys()):
        try:
            found[name] = _convert(hints[name], values[name])
            same = found[name] == values[name] and isinstance(found[name], str) == isinstance(
                values[name], str
            )
        except (ValueError, OverflowError):
            same = False
        if not same:
            raise UserError(f"{name}={_short(values[name])} is not {_type_name(hints[name])}")
    return found


def _type_name(hint):
    names = {int: "an int", float: "a float", bool: "a bool", str: "a str", type(None): "None"}
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    return names.get(hint) or " or ".join(map(_type_name, typing.get_args(hint)))


def describe(cls, doc=""):
    """The --help text: `doc`, then the settings in sections, a line each: its default, its choices, its comment."""
    rows, hints, layout = [inspect.cleandoc(doc)], typing.get_type_hints(cls), _layout(cls)
    for section, names in itertools.groupby(layout, lambda name: layout[name][0]):
        rows += [f"\n{section}:"]
        for name in names:
            default = getattr(cls, name)
            shown = repr(default) if re.search(r"\s", str(default)) else default
            rows += [f"  --{name}={shown}".ljust(33) + f" {_kind(hints[name], default)}{layout[name][1]}"]
    return "\n".join(rows).strip()


def _kind(hint, default):
    """What --help says of a type that the default does not show: the choices, or the number that replaces None."""
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, typing.get_args(hint))) + ": "
    kind = typing.get_args(hint)[0] if default is None else str
    return "" if kind is str else f"{kind.__name__}: "


def _layout(cls):
    """{field: (section, comment)} in source order, a class before its bases; a comment line begins a section."""
    names, found = typing.get_type_hints(cls), {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        section, name = "Settings", None
        for line in inspect.cleandoc(inspect.getsource(base)).splitlines():
            comment = line.partition("  # ")[2]
            if heading := re.match(" {4}# (.+)", line):
                section, name = heading[1], None
            elif field := re.match(r" {4}\w+", line):
                name = field[0].strip()
            if name in names and not found.get(name, ("", ""))[1]:
                found[name] = found.get(name, (section,))[0], comment.strip()
    return found
