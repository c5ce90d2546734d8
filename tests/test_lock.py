"""run/lock.py: one run at a time in a folder; the lock of a run that was killed ends with it."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from configurator import UserError
from run.lock import Lock

HOLD = "import sys; from run.lock import Lock; lock = Lock(sys.argv[1]); lock.take(); "
HOLD += "print('held', flush=True); input()"


@pytest.mark.fault(44)
def test_a_living_process_is_refused_and_a_dead_one_is_not(tmp_path):
    run, pipe = tmp_path / "run", subprocess.PIPE
    with Lock(run) as lock:
        assert not run.exists() and lock.file is None
        other = subprocess.Popen([sys.executable, "-c", HOLD, run], cwd=ROOT, stdin=pipe, stdout=pipe)
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match=f"in use by a run: process {other.pid} on .*; wait for its"):
                lock.take()
            with pytest.raises(UserError, match="in use by a run"), Lock(run):
                pass
        finally:
            other.kill()
            other.wait()
        lock.take()
        lock.take()
    with Lock(run) as again:
        assert again.file is not None


@pytest.mark.fault(70)
def test_a_damaged_lock_counts_for_nothing_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "run.lock").write_bytes(b"\xff\x00{")
    with Lock(tmp_path), pytest.raises(UserError, match="in use by a run: process"), Lock(tmp_path):
        pass
    (tmp_path / "run.lock").unlink()
    (tmp_path / "outside").write_text("kept")
    for make in (lambda path: path.symlink_to(tmp_path / "outside"), os.mkfifo):
        make(tmp_path / "run.lock")
        with pytest.raises(UserError, match="run.lock is a link or no file; remove it, or"), Lock(tmp_path):
            pass
        (tmp_path / "run.lock").unlink()
    assert (tmp_path / "outside").read_text() == "kept"
