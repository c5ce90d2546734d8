"""system/files.py: a file is old or new, a lock ends with its run."""

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


HOLD = "import sys; from system.files import locked\n"
HOLD += "with locked(sys.argv[1]): print('held', flush=True); input()"


@pytest.mark.fault(44)
def test_a_living_process_is_refused_and_a_dead_one_is_not(tmp_path):
    run, pipe = tmp_path / "run", subprocess.PIPE
    words = [sys.executable, "-c", HOLD, run]
    other = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="in use by another run"), files.locked(run):
            pass
    finally:
        other.kill()
        other.wait()
    for _ in range(2):
        with files.locked(run):
            pass
