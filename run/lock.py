"""The lock on out_dir/run.lock (flock, which ends with the process): one run at a time writes there."""

import fcntl
import os
import socket
import sys
from pathlib import Path

from configurator import UserError
from run import files


class Lock:
    """`with Lock(out_dir) as lock`: taken at once if the folder exists, else by take(), which makes it."""

    def __init__(self, out_dir):
        self.path, self.file = Path(out_dir) / "run.lock", None

    def __enter__(self):
        if os.path.isdir(self.path.parent):  # False also for a name that is too long
            self.take()
        return self

    def __exit__(self, *_):
        if self.file:
            self.file.close()
            self.file = None

    def take(self):
        """Raises UserError if another run holds the lock, or the folder cannot be written."""
        if self.file:
            return
        with files.writable(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink() or self.path.exists() and not self.path.is_file():
                raise UserError(f"{self.path} is a link or no file; remove it, or give another --out_dir")
            file = open(self.path, "a+", errors="replace")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = " ".join(file.read(200).split()) or "another process"
                file.close()
                words = f"is in use by a run: {holder}; wait for its end, stop it, or give another --out_dir"
                raise UserError(f"out_dir={self.path.parent} {words}") from None
            except OSError as error:
                print(f"warning: {self.path}: {error.strerror}: a second run is not refused", file=sys.stderr)
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        self.file = file
