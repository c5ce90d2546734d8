"""run/lock.py: one run at a time in a folder; a killed run's lock counts for nothing."""

import json
import os
import subprocess
import sys
import time

import pytest

from configurator import UserError
from run import lock
from run.lock import Lock, in_use, this_process


@pytest.mark.fault(44)
def test_a_living_process_is_refused_and_a_dead_one_is_not(tmp_path):
    held = Lock(tmp_path / "run")
    held.take()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        holder = {**this_process(), "pid": other.pid, "started": lock.started(other.pid)}
        held.path.write_text(json.dumps(holder))
        with pytest.raises(
            UserError, match=f"is in use by a run: process {other.pid} on this machine; wait for"
        ):
            Lock(tmp_path / "run").take()
        assert json.loads(held.path.read_text()) == holder
        assert in_use({**holder, "started": 1}, 0) is None  # another process under the same number
        os.kill(other.pid, 9)
        while lock.started(other.pid) is not None:  # a zombie, until it is waited for
            time.sleep(0.01)
        Lock(tmp_path / "run").take()
        assert json.loads(held.path.read_text()) == this_process()
    finally:
        other.kill()
        other.wait()


def test_another_machine_is_believed_while_it_renews(tmp_path):
    there = {**this_process(), "host": "node7", "machine": "node7", "job": None}
    assert in_use(there, 5) == f"process {os.getpid()} on node7, 5 s ago"
    assert in_use(there, lock.STALE + 1) is None
    job = {**there, "job": "12", "attempt": 0}
    assert in_use(job, 5)
    restarted = {"TORCHELASTIC_RUN_ID": "12", "TORCHELASTIC_RESTART_COUNT": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in restarted.items():
            patch.setenv(name, value)
        assert in_use(job, 5) is None  # torchrun's next attempt, on another node
        assert in_use({**job, "attempt": 1}, 5)
    held = Lock(tmp_path)
    held.path.write_text(json.dumps(there))
    os.utime(held.path, (0, 0))
    held.take()
    os.utime(held.path, (0, 0))
    held.renew()
    assert time.time() - held.path.stat().st_mtime < 60
    held.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_lock_that_is_cut_short_counts_for_nothing(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    Lock(tmp_path).take()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
