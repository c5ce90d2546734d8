"""Settings of every script: dataclass defaults <- config file(s) <- --key=value, in the order given.

    python train.py config/gpt2_124m.py --batch_size=32 --lr=3e-4 --no_compile

`--key value` works too, and `gpt2_124m` names config/gpt2_124m.py. A config file is plain Python: it may
import and compute, and names that start with `_` are not settings. All mistakes are reported at once.
"""

import atexit
import contextlib
import dataclasses
import difflib
import faulthandler
import inspect
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import types
import typing
from pathlib import Path

if sys.platform == "win32":  # which lacks what is imported from here on: resource, fcntl
    print("error: Windows lacks POSIX locks and signals; take WSL2: docs/your_card.md", file=sys.stderr)
    sys.exit(2)
import resource  # noqa: E402

HERE = Path(__file__).absolute().parent


class UserError(Exception):
    """Mistakes that the user can correct, a line each: printed without a traceback."""

    exit_code = 2  # a subclass may have its own
    loud = None  # whether this process prints it; None: rank 0 does

    def __str__(self):
        return "; ".join(map(str, self.args))


def configure(cls, argv, check=lambda cfg: None, complete=dict):
    """An instance of dataclass `cls` for words as in sys.argv[1:]; one UserError names all mistakes.

    A word without dashes is a config file, or goes into `words` of the instance if cls has them.
    complete({name: value}) returns the given settings with others that follow from them. If cls has a
    command_line, that of the instance is argv as one text.
    """
    if "--help" in argv or "-h" in argv:
        print(describe(cls, sys.modules["__main__"].__doc__ or "", columns()), flush=True)
        sys.exit(0)
    hints, argv, settings, words, wrong = typing.get_type_hints(cls), list(argv), {}, [], []
    command_line = shlex.join(argv)
    while argv:
        try:
            if not argv[0].startswith("--") and hasattr(cls, "words"):
                words.append(argv.pop(0))
                continue
            found = _flag(argv, hints) if argv[0].startswith("--") else _file(argv.pop(0), hints)
        except UserError as error:
            wrong += error.args
            continue
        for where, key, value in found:
            try:
                settings[key] = _convert(cls, hints, key, value)
            except UserError as error:
                wrong.append(f"{where}: {error}")
    refuse(wrong)
    cfg = cls(**complete(settings))
    if hasattr(cls, "words"):
        cfg.words = words
    check(cfg)
    if hasattr(cls, "command_line"):
        cfg.command_line = command_line
    return cfg


def _flag(argv, hints):
    """Takes --key=value, --key value, --flag or --no_flag from the front of argv: [(where, key, value)]."""
    key, equals, value = argv.pop(0)[2:].partition("=")
    following = argv[0] if argv and not argv[0].startswith("--") else None
    name = key if key in hints else key.removeprefix("no_")
    if typing.get_origin(hints.get(key)) is tuple and following is not None and not equals:  # --key A B C
        words = itertools.takewhile(lambda word: not word.startswith("--"), argv)
        value = equals = tuple(words)
        del argv[: len(value)]
    if not equals and _is_flag(hints.get(name)):
        given = (following or "").lower() in ("true", "false", *map(str, typing.get_args(hints[name])))
        key, value = name, argv.pop(0) if given else str(key == name)
    elif not equals and following is not None:
        value = argv.pop(0)
    elif not equals and key in hints:
        raise UserError(f"command line: --{key} needs a value, written --{key}=VALUE")
    return [("command line", key, value)]


def _file(word, hints):
    """Runs a config file, whose path may lack its .py and config/: [(where, key, value)] of its settings."""
    parts = itertools.product(("", HERE), ("", "config"), [f"{word.removesuffix('.py')}.py"])
    path = next(filter(os.path.isfile, itertools.starmap(os.path.join, parts)), None)
    if path is None:
        recipes = sorted(path.stem for path in HERE.glob("config/*.py"))
        setting = word.lstrip("-").partition("=")[0] in hints
        hint = f"a setting is written --{word.lstrip('-')}" if setting else f"recipes: {', '.join(recipes)}"
        if os.path.isdir(word) and "checkpoint" in hints:
            hint = f"a run's folder is given as --checkpoint={word}"
        raise UserError(f"{word}: no such config file; {hint}")
    try:
        source, space = Path(path).read_text("utf-8"), {}
        exec(compile(source, path, "exec"), space)
    except SyntaxError as error:
        raise UserError(f"{error.filename or path}:{error.lineno or 1}: {error.msg}") from None
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        raise UserError(f"{path}:{lines[-1] if lines else '?'}: {type(error).__name__}: {error}") from None
    rows = enumerate(source.splitlines(), 1)
    places = {name: n for n, row in rows for name in re.findall(r"\w+", row.rpartition("=")[0])}
    no_settings = types.ModuleType, types.FunctionType, type
    found = {k: v for k, v in space.items() if not k.startswith("_") and not isinstance(v, no_settings)}
    return [(f"{path}:{places.get(k, 1)}", k, v) for k, v in found.items()]  # 1: imported from another one


def parse(cls, check=lambda cfg: None, complete=dict):
    """Raises the limit on open files, then `configure` from the command line; a mistake ends the process."""
    open_closed()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop_imports)  # `run` sets it back
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            console = Console(stream)
            setattr(sys, name, console)
            setattr(sys, f"__{name}__", console)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        leave_with_torchrun()  # whose thread prints
    with _errors_in_one_line():
        soft, hard = (limit % 2**63 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))  # -1: no limit
        if hard < 64:
            raise UserError(f"{hard} files may be open at a time, a run needs 64; try ulimit -n 1024")
        if soft < (most := min(10_000, hard)):  # a shard takes one, its mask another
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        cfg = configure(cls, sys.argv[1:], check, complete)
    if rank := os.environ.get("RANK"):  # for an end that is not by `leave`, which skips atexit's functions
        why = f"rank {rank} has ended by sys.exit or by an error outside the run"
        atexit.register(lambda: (print(f"error: {why}", file=sys.stderr), leave(1, why)))
    return cfg


def open_closed():
    """Opens those of stdin, stdout and stderr that were closed before the start (2>&-) as the null device.

    Else files of the run would get their numbers, and what C code prints would be written into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the closed one
            os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def stop_imports(*_):
    """A handler of SIGINT while code is imported: a KeyboardInterrupt may be lost there."""
    if is_rank_0():
        print("\nstopped by SIGINT", file=sys.stderr)
    leave(130, at_once=True)


def run(main, cfg):
    """Runs main(cfg), which may return an exit code, as a script; cfg: from `parse`, or a class to parse."""
    cfg = parse(cfg) if isinstance(cfg, type) else cfg
    if signal.getsignal(signal.SIGINT) is stop_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # for a SIGBUS, as from a shard cut short under its map
    with _errors_in_one_line():
        code = main(cfg)
    leave(code or 0)


@contextlib.contextmanager
def _errors_in_one_line():
    """Turns a UserError into lines on one rank's stderr, a message in torchrun's report, and an exit code."""
    try:
        yield
    except BrokenPipeError:  # | head
        leave(141)
    except KeyboardInterrupt:
        if is_rank_0():
            print("\nstopped by SIGINT", file=sys.stderr, flush=True)
        leave(130)
    except UserError as error:
        if error.loud is None and not is_rank_0():
            time.sleep(10 * ("TORCHELASTIC_RUN_ID" in os.environ))  # once this ends, torchrun ends rank 0
        elif error.loud is not False:
            print(*(f"error: {problem}" for problem in error.args), sep="\n", file=sys.stderr, flush=True)
        leave(error.exit_code, str(error))


def explain(kind, error, trace):
    """Prints an uncaught error, in one line Ctrl-C and a missing package of requirements.txt."""
    if kind is KeyboardInterrupt:
        stop_imports()
    needed, file = [], HERE / "requirements.txt"
    if kind is ModuleNotFoundError and file.exists():
        needed = re.findall(r"^[\w-]+", file.read_text(), re.MULTILINE)
    if getattr(error, "name", None) not in needed:
        return sys.__excepthook__(kind, error, trace)
    words = f"{sys.executable} has no {error.name}: ./setup.sh, then . .venv/bin/activate"
    print(f"error: {words}", file=sys.stderr)


sys.excepthook = explain


class Rank(typing.NamedTuple):
    """This process among those of a run; without torchrun it is the only one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this machine
    local_size: int = 1


def launched():
    """Whether torchrun started this process, which RANK alone tells: SLURM and containers set WORLD_SIZE."""
    return bool(os.environ.get("RANK"))


def this_rank():
    """The Rank of this process, known before a process group exists. Raises UserError."""
    if not launched():
        return Rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    words = {name: os.environ.get(name) or str(least) for name, least in zip(names, Rank())}
    if wrong := [f"{name}={word}" for name, word in words.items() if not word.isdecimal()]:
        raise UserError(f"environment: {' '.join(wrong)}: expected numbers, as torchrun sets them")
    return Rank(*map(int, words.values()))


def is_rank_0():
    """Whether this process is rank 0 or no rank, known before a process group exists."""
    return os.environ.get("RANK") in (None, "", "0")


class Console(io.TextIOWrapper):
    """stdout or stderr, which ends no run: what it cannot write is lost, and its last error is `lost`.

    It may be closed, on a full disk, or a pipe that nobody reads. What its encoding lacks is escaped.
    """

    def __init__(self, stream):
        kept = dict(encoding=stream.encoding, line_buffering=stream.line_buffering)
        kept |= dict(write_through=stream.write_through)
        super().__init__(stream.detach(), errors="backslashreplace", **kept)
        self.lost = None

    def write(self, text):
        with self._losing():
            super().write(text)
        return len(text)

    def flush(self):
        with self._losing():
            super().flush()

    @contextlib.contextmanager
    def _losing(self):
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: it was closed by code
            self.lost = error

    def give_up(self):
        """Lets Python's own flush at the end, which would raise, go nowhere."""
        if self.lost:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def say(*words, sep=" ", end="\n"):
    """Prints what a script is for, which ends where nobody reads it (`| head`) or it cannot be written."""
    print(*words, sep=sep, end=end, flush=True)
    if lost := getattr(sys.stdout, "lost", None):
        if isinstance(lost, BrokenPipeError):
            raise lost
        raise UserError(f"stdout cannot be written ({getattr(lost, 'strerror', lost)})")


def warn(words):
    """Prints a warning, if there is one, on rank 0."""
    if words and is_rank_0():
        print(f"warning: {words}", file=sys.stderr)


def leave(code, message=None, at_once=False):
    """Ends the process, a rank without Python's shutdown; message: what torchrun prints of it."""
    if message and (report := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # a full disk
            Path(report).write_text(json.dumps({"message": words}))
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
        if isinstance(stream, Console):
            stream.give_up()
    if at_once or launched():
        os._exit(code)  # in Python's shutdown a DDP model may wait for gloo's threads, which wait for Python
    sys.exit(code)


def leave_with_torchrun():
    """Ends this process, if it is a rank, within a second after torchrun was killed, from the imports on."""
    parent = os.getppid()
    read = lambda name: Path(f"/proc/{parent}/{name}").read_bytes()
    with contextlib.suppress(OSError):  # Linux alone has it
        if os.getsid(0) == os.getpid() and not (b"python" in read("cmdline") and b"libtorch" in read("maps")):
            parent = None  # torchrun, which starts a rank in a new session, was killed before

    def wait():
        while os.getppid() == parent:
            time.sleep(1)
        print("torchrun is gone", file=sys.stderr)
        leave(1, "torchrun is gone", at_once=True)

    threading.Thread(target=wait, daemon=True).start()


def too_small(cfg, least):
    """Problems, a line each: settings below their least value, {name: value}, or NaN; None passes."""
    pairs = ((name, getattr(cfg, name)) for name in least)
    return [f"{k}={v} must be at least {least[k]}" for k, v in pairs if v is not None and not v >= least[k]]


def changed(cfg):
    """The settings of a dataclass instance that differ from the defaults, {name: value}."""
    return {f.name: v for f in dataclasses.fields(cfg) if (v := getattr(cfg, f.name)) != f.default}


def without_effect(cfg, names, why):
    """Problems, at most one: those settings in `names` that were changed, and why they do nothing."""
    words = [f"{name}={value}" for name, value in changed(cfg).items() if name in names]
    return [f"{' and '.join(words)} {why}"] if words else []


def refuse(problems):
    """Raises one UserError that lists all problems, if there are any."""
    if problems:
        raise UserError(*problems)


def typed(cls, values, names):
    """`values`, an object of a file, with those called `names` in the types of `cls`, or a UserError."""
    if not isinstance(values, dict):
        raise UserError("it holds no settings")
    hints, found = typing.get_type_hints(cls), dict(values)
    for name in sorted(names & values.keys()):
        found[name] = _convert(cls, hints, name, values[name])
        if found[name] != values[name] or isinstance(found[name], str) != isinstance(values[name], str):
            raise _mistyped(name, values[name], hints[name])
    return found


def _is_flag(hint):
    """Whether a setting may be written without a value: a bool, or a Literal with True in it."""
    return hint is bool or any(choice is True for choice in typing.get_args(hint))


def _convert(cls, hints, name, value):
    """`value`, text of a flag or an object of a file, as a setting of this name, without loss."""
    if name not in hints:
        others = {"config": "the file's path alone, without --config="} | getattr(cls, "others_names", {})
        close = difflib.get_close_matches(name.lower(), [*hints, *others], n=1, cutoff=0.7)
        hint = f"; did you mean {others.get(close[0], close[0])}?" if close else ""
        raise UserError(f"unknown setting {name}{hint}")
    hint, text = hints[name], isinstance(value, str)
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)  # the latter if a Literal is in it
    kind, *more = typing.get_args(hint) if union else (hint,)
    if type(None) in more and str(value) == "None":
        return None
    if _is_flag(kind) and str(value).lower() in ("true", "false", *("1", "0") * text):
        return str(value).lower() in ("true", "1")
    if value in itertools.chain(*map(typing.get_args, (kind, *more))) or kind is str and text:
        return value
    if typing.get_origin(kind) is tuple:
        return (value,) if text else tuple(value)
    with contextlib.suppress(ValueError, OverflowError):
        read = int if text and re.fullmatch(r"[+-]?[\d_]+", value) else float
        number = read(value) if text else value
        if kind in (int, float) and isinstance(number, (int, float)) and not isinstance(number, bool):
            if kind is float or number % 1 == 0 and abs(number) < 2**63:  # 1e6 is an int
                return kind(number)
    raise _mistyped(name, value, hint)


def _mistyped(name, value, hint):
    huge = type(value) is int and abs(value) >> 63  # of over 4,300 digits str fails
    shown = " ".join((hex(value) if huge else str(value)).split())[:80]
    return UserError(f"{name}={shown} is not {_type_name(hint)}")


def _type_name(hint):
    names = {int: "an int below 2**63", float: "a float", bool: "a bool", str: "a str", type(None): "None"}
    if typing.get_origin(hint) is typing.Literal:
        return "one of " * (len(typing.get_args(hint)) > 1) + ", ".join(map(str, typing.get_args(hint)))
    return names.get(hint) or " or ".join(map(_type_name, typing.get_args(hint)))


def describe(cls, doc="", width=80):
    """The --help text: `doc`, then the settings by section, those of a class before those of its bases."""
    rows, hints, seen, last = [fill(doc, width)], typing.get_type_hints(cls), set(), None
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        section = "Settings"
        for line in inspect.cleandoc(inspect.getsource(base)).splitlines():
            field = re.match(r" {4}(\w+): ", line)
            if heading := re.match(" {4}# (.+)", line):
                section = heading[1]
            elif field and field[1] in hints.keys() - seen:
                if section != last:
                    rows.append("\n" + textwrap.fill(f"{section}:", width))
                rows.append(_option(cls, field[1], hints[field[1]], line, width))
                seen, last = seen | {field[1]}, section
    return "\n".join(rows).strip()


def listed(names):
    """The first three of some names, and how many more there are: "a, b, c and 4 more"."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def columns():
    """The width of the terminal, at most 110; 80 in a pipe."""
    return min(shutil.get_terminal_size().columns, 110)


def fill(doc, width):
    """A docstring in lines of `width`: paragraphs are filled, long commands go on after a backslash."""
    found = []
    form = lambda line: "text" if line[:1].strip() else "command" if line else ""
    for kind, lines in itertools.groupby(inspect.cleandoc(doc).splitlines(), form):
        if kind == "text":
            found.append(textwrap.fill(" ".join(lines), width))
            continue
        for line in lines:
            command, mark, comment = line.partition("  # ")
            if len(line) > width and mark:
                found.append(f"    # {comment}")
                line = command
            parts = textwrap.wrap(line, width - 2, subsequent_indent=" " * 8, break_on_hyphens=False)
            found.append(" \\\n".join(parts))
    return "\n".join(found)


def _option(cls, name, hint, line, width, column=28):
    """A setting with its default and comment, which begins at `column`."""
    default, choices, kind = getattr(cls, name), typing.get_args(hint), ""
    if typing.get_origin(hint) is typing.Literal:
        kind = "|".join(map(str, choices)) + ": "
    elif default is None and choices[0] is not str:
        kind = f"{choices[0].__name__}: "
    shown = repr(default) if re.search(r"\s", str(default)) else default
    shown = "..." if default == () else shown
    option, words = f"  --{name}={shown}", f"{kind}{line.partition('  # ')[2].strip()}"
    below = textwrap.wrap(words, width - column, break_long_words=False, break_on_hyphens=False)
    if len(option) < column and below:
        option = option.ljust(column) + below.pop(0)
    return "\n".join([option, *(" " * column + words for words in below)])
