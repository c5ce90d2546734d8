"""How a process ends: with one line and an exit code, on every rank.

Every script calls `start` (configurator.parse does) before its large imports, and then `run`.
Imports nothing of this repository.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from typing import NamedTuple

if sys.platform == "win32":  # which lacks what is imported from here on: resource, fcntl
    print(
        "error: Windows lacks POSIX locks and signals; take WSL2: docs/your_card.md",
        file=sys.stderr,
    )
    sys.exit(2)
import resource  # noqa: E402

WAIT = 5  # s that an error waits for another rank to tell the same one, or its cause


class UserError(Exception):
    """Mistakes that the user can correct, a line each: printed without a traceback."""

    exit_code = 2  # a subclass may have its own
    follows = False  # whether another rank has ended before, which tells the cause

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


def brief(error):
    """An error's type and text in one line, cut off where that is long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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


def this_rank():
    """The Rank of this process, known before a process group exists."""
    if not launched():
        return Rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Rank(*(int(os.environ[name]) for name in names))


def is_rank_0():
    """Whether this process is rank 0 or no rank, known before a process group exists."""
    return this_rank().rank == 0


# -- the console


def say(*words, **options):
    """Prints what a script is for, on rank 0; options: as print's."""
    if is_rank_0():
        print(*words, **options, flush=True)


def warn(words):
    """Prints a warning, if there is one, on rank 0."""
    if words and is_rank_0():
        print(f"warning: {words}", file=sys.stderr)


# -- the start and the end


def start():
    """Prepares a process: how it ends, its consoles and its open files."""
    sys.excepthook = explain
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # a shard takes one file, its mask another; macOS allows no more
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_000)), hard))
    faulthandler.enable()  # for a SIGBUS, as from a shard cut short under its map
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=leave_with, args=[os.getppid()], daemon=True).start()


def leave_with(torchrun):
    """Ends this process within a second after its parent, also where it waits for other ranks."""
    while os.getppid() == torchrun:
        time.sleep(1)
    os._exit(1)


def run(main, cfg):
    """Runs main(cfg), which may return an exit code, and ends the process."""
    try:
        code = main(cfg) or 0
    except BaseException as error:
        if isinstance(error, SystemExit) and not launched():
            raise
        # not left to sys.excepthook: torch.distributed's captures what an older hook prints
        explain(*sys.exc_info())
    leave(code)


def explain(kind, error, trace):
    """Ends the process at an uncaught error; a mistake of the user's is told in one line."""
    if isinstance(error, UserError):
        fail(error.args, error.exit_code, error.follows)
    if kind is BrokenPipeError:  # | head
        os._exit(141)
    if kind is KeyboardInterrupt:
        fail(["stopped by SIGINT"], 130)
    fail(["".join(traceback.format_exception(error))], 1)


def fail(problems, code, follows=False):
    """Prints problems and ends the process.

    Rank 0 does so at once. Another rank waits first, as does one whose error `follows` from the
    end of another. So an error that all ranks have is told once: torchrun ends those that wait.
    """
    rank, _, local_rank, _ = this_rank()
    if launched() and (rank or follows):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(WAIT + local_rank / 4)  # torchrun looks every 0.1 s
    for problem in problems:
        print("error:", f"rank {rank}: {problem}" if rank else problem, file=sys.stderr)
    leave(code)


def leave(code):
    """Ends the process, a rank without Python's shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    if launched():  # there a DDP model may wait for gloo's threads, which wait for Python
        os._exit(code)
    sys.exit(code)
