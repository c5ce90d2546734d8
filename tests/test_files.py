"""system/files.py: a file is old or new, bad JSON is told in one line, a lock ends with its run."""

import errno
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from system import files
from system.errors import UserError


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch, name):
    files.write_atomic(tmp_path / "a", "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(OSError, match="No space left"):
            files.write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


HOLD = "import sys; from system.files import Lock; lock = Lock(sys.argv[1]); lock.take(); "
HOLD += "print('held', flush=True); input()"


@pytest.mark.fault(44)
def test_a_living_process_is_refused_and_a_dead_one_is_not(tmp_path):
    run, pipe = tmp_path / "run", subprocess.PIPE
    with files.Lock(run) as lock:
        assert not run.exists() and lock.file is None
        other = subprocess.Popen(
            [sys.executable, "-c", HOLD, run], cwd=ROOT, stdin=pipe, stdout=pipe
        )
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match=f"in use by a run: process {other.pid} on"):
                lock.take()
            with pytest.raises(UserError, match="in use by a run"), files.Lock(run):
                pass
        finally:
            other.kill()
            other.wait()
        lock.take()
        lock.take()
    with files.Lock(run) as again:
        assert again.file is not None
