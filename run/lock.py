"""The lock on a run's folder, out_dir/run.lock, so that one run at a time writes there.

The file names the process that holds it. Another process of the same machine sees whether that one still runs, and
takes over the lock of one that was killed; the lock of another machine counts until it was not renewed for STALE
seconds.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from configurator import UserError
from run import files

STALE = (
    120  # seconds without a renewal after which the lock of another machine is taken over; renewed every 5 s
)


class Lock:
    """take(), renew() now and then, release(). One rank of a run holds it."""

    def __init__(self, out_dir):
        self.path, self.held = Path(out_dir) / "run.lock", False

    def take(self):
        """Raises UserError if another run holds the lock, or the folder cannot be written."""
        with files.writable(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not self.held:
                with open(self.path, "a+") as file:
                    with contextlib.suppress(OSError):  # a file system without flock
                        fcntl.flock(
                            file, fcntl.LOCK_EX
                        )  # for the few lines below; it ends when the file is closed
                    if self._is(file):  # else its holder has just removed it
                        self._replace(file)

    def _is(self, file):
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        return False

    def _replace(self, file):
        file.seek(0)
        text, age = file.read(), time.time() - os.fstat(file.fileno()).st_mtime
        try:
            holder = json.loads(text)
            reason = in_use(holder, age)
        except (ValueError, KeyError, TypeError):  # empty: new, or cut short by a crash
            reason = None
        if reason:
            raise UserError(
                f"out_dir={self.path.parent} is in use by a run: {reason}; wait for its end, stop it, "
                "or give another --out_dir"
            )
        file.truncate(0)
        file.write(json.dumps(this_process()))
        self.held = True

    def renew(self):
        if self.held:
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self):
        if self.held:
            self.held = False
            with contextlib.suppress(OSError):
                self.path.unlink()


def this_process():
    env, pid = os.environ, os.getpid()
    torchrun = {
        "job": env.get("TORCHELASTIC_RUN_ID"),
        "attempt": int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
    }
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "pid": pid,
        "started": started(pid),
        **torchrun,
    }


def in_use(holder, age):
    """Why the lock still counts, in words, or None. age: seconds since it was renewed."""
    own = this_process()
    if holder["machine"] == own["machine"]:
        alive = holder["pid"] != own["pid"] and started(holder["pid"]) == holder["started"]
        return f"process {holder['pid']} on this machine" if alive else None
    if (
        holder["job"] not in (None, "none")
        and holder["job"] == own["job"]
        and own["attempt"] > holder["attempt"]
    ):
        return None  # torchrun has ended that attempt before it began this one
    return f"process {holder['pid']} on {holder['host']}, {age:.0f} s ago" if age < STALE else None


def machine():
    """A name for everything that sees this process under its number: host, its boot, and a container's processes."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        names += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(names)


def started(pid):
    """When a process started, in clock ticks since the boot, so that a number used again is told apart.

    None: there is no such process, or it is a zombie. 0: it exists, on a system without /proc.
    """
    if os.path.exists("/proc/self/stat"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
