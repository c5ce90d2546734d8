"""How a process ends: with one line and an exit code, on every rank.

The console is here too; it ends no process. Every script calls `start` before its large imports,
through configurator.parse, and then `run`. Imports nothing of this repository.
"""

import atexit
import contextlib
import faulthandler
import io
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

if sys.platform == "win32":  # which lacks what is imported from here on: resource, fcntl
    print(
        "error: Windows lacks POSIX locks and signals; take WSL2: docs/your_card.md",
        file=sys.stderr,
    )
    sys.exit(2)
import resource  # noqa: E402


class UserError(Exception):
    """Mistakes that the user can correct, a line each: printed without a traceback."""

    exit_code = 2  # a subclass may have its own
    loud = None  # whether this process prints it; None: rank 0 does

    def __str__(self):
        return "; ".join(map(str, self.args))


def refuse(problems):
    """Raises one UserError that lists all problems, if there are any."""
    if problems:
        raise UserError(*problems)


def listed(names):
    """The first three of some names, and how many more there are: "a, b, c and 4 more"."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


# -- ranks


class Rank(NamedTuple):
    """This process among those of a run; without torchrun it is the only one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those on this machine
    local_size: int = 1


def launched():
    """Whether torchrun started this process.

    RANK alone tells: SLURM and containers set WORLD_SIZE.
    """
    return bool(os.environ.get("RANK"))


def under_torchrun():
    """Whether torchrun waits for this process, and ends the others after it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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


# -- the console


class Console(io.TextIOWrapper):
    """stdout or stderr, which ends no run: what it cannot write is lost.

    `lost` is its last error. The stream may be closed, on a full disk, or a pipe that nobody reads.
    What its encoding lacks is escaped.
    """

    lost = None

    def __init__(self, stream):
        encoding = stream.encoding
        super().__init__(stream.detach(), encoding, errors="backslashreplace", line_buffering=True)

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


def say(*words, sep=" ", end="\n"):
    """Prints what a script is for.

    The script ends where nobody reads it (`| head`) or it cannot be written.
    """
    print(*words, sep=sep, end=end, flush=True)
    lost = getattr(sys.stdout, "lost", None)
    if isinstance(lost, BrokenPipeError):
        raise lost
    if lost:
        raise UserError(f"stdout cannot be written ({getattr(lost, 'strerror', lost)})")


def warn(words):
    """Prints a warning, if there is one, on rank 0."""
    if words and is_rank_0():
        print(f"warning: {words}", file=sys.stderr)


def open_closed():
    """Opens stdin, stdout and stderr as the null device where they were closed at the start (2>&-).

    Else files of the run would get their numbers, and C code would print into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the closed one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))


# -- the start and the end


def start():
    """Prepares a process for its end.

    That is: its consoles, Ctrl-C in the imports, the death of torchrun, the limit on open files.
    """
    open_closed()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop_imports)  # `run` sets it back
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            console = Console(stream)
            setattr(sys, name, console)
            setattr(sys, f"__{name}__", console)
    if under_torchrun():
        leave_with_torchrun()  # whose thread prints
    with in_one_line():
        allow_open_files()
    if launched():  # for an end that is not by `leave`, which skips atexit's functions
        atexit.register(leave_as_error)


def allow_open_files():
    """Raises the limit on open files; UserError if it cannot be raised to what a run needs."""
    # no limit, which is -1, becomes a large number
    soft, hard = (limit % 2**63 for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if hard < 64:
        raise UserError(f"{hard} files may be open at a time, a run needs 64; try ulimit -n 1024")
    most = min(10_000, hard)  # a shard takes one, its mask another
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(main, cfg):
    """Runs main(cfg), which may return an exit code, and ends the process."""
    if signal.getsignal(signal.SIGINT) is stop_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()  # for a SIGBUS, as from a shard cut short under its map
    with in_one_line():
        code = main(cfg)
    leave(code or 0)


@contextlib.contextmanager
def in_one_line():
    """Turns a UserError into lines on one rank's stderr and an exit code.

    Under torchrun it also becomes a message in torchrun's report.
    """
    try:
        yield
    except BrokenPipeError:  # | head
        leave(141)
    except KeyboardInterrupt:
        say_stopped()
        leave(130)
    except UserError as error:
        loud = is_rank_0() if error.loud is None else error.loud
        if loud:
            print(*(f"error: {problem}" for problem in error.args), sep="\n", file=sys.stderr)
        elif error.loud is None and under_torchrun():
            time.sleep(10)  # once this process ends, torchrun ends rank 0
        leave(error.exit_code, str(error))


def leave(code, message=None, at_once=False):
    """Ends the process, a rank without Python's shutdown; message: what torchrun prints of it."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if message and report:
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # a full disk
            Path(report).write_text(json.dumps({"message": words}))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        # Python's own flush at the end, which would raise, then goes nowhere
        if getattr(stream, "lost", None):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if at_once or launched():
        # in Python's shutdown a DDP model may wait for gloo's threads, which wait for Python
        os._exit(code)
    sys.exit(code)


def leave_as_error():
    """Ends a rank that has ended by itself, so that torchrun ends the others."""
    why = f"rank {this_rank().rank} has ended by sys.exit or by an error outside the run"
    print(f"error: {why}", file=sys.stderr)
    leave(1, why)


def leave_with_torchrun():
    """Ends this process, if it is a rank, within a second after torchrun was killed.

    It does so from the imports on.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):  # Linux alone has /proc
        process = Path(f"/proc/{parent}")  # another one's maps may not be read
        is_python = b"python" in (process / "cmdline").read_bytes()
        is_torchrun = is_python and b"libtorch" in (process / "maps").read_bytes()
        if os.getsid(0) == os.getpid() and not is_torchrun:
            parent = None  # torchrun, which starts a rank in a new session, was killed before

    def wait():
        while os.getppid() == parent:
            time.sleep(1)
        print("torchrun is gone", file=sys.stderr)
        leave(1, "torchrun is gone", at_once=True)

    threading.Thread(target=wait, daemon=True).start()


def say_stopped():
    if is_rank_0():
        print("\nstopped by SIGINT", file=sys.stderr)


def stop_imports(*_):
    """A handler of SIGINT while code is imported: a KeyboardInterrupt may be lost there."""
    say_stopped()
    leave(130, at_once=True)


def explain(kind, error, trace):
    """Prints an uncaught error, in one line Ctrl-C and a missing package of requirements.txt."""
    if kind is KeyboardInterrupt:
        stop_imports()
    if kind is ModuleNotFoundError:
        needed = (Path(__file__).parent.parent / "requirements.txt").read_text()
        if re.search(rf"^{error.name}\b", needed, re.MULTILINE):
            words = f"{sys.executable} has no {error.name}: ./setup.sh, then . .venv/bin/activate"
            print(f"error: {words}", file=sys.stderr)
            return
    sys.__excepthook__(kind, error, trace)


sys.excepthook = explain
