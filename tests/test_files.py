"""system/files.py: a file is old or new, bad JSON is told in one line, a lock ends with its run."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, one_line

from system import files
from system.errors import UserError


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    for data in (b"\0\xff", "grüße\n", b""):
        files.write_atomic(tmp_path / "a", data)
        written = data.encode() if isinstance(data, str) else data
        assert (tmp_path / "a").read_bytes() == written
        assert files.digest(tmp_path / "a") == (len(written), hashlib.sha256(written).hexdigest())
    files.write_json(str(tmp_path / "b"), {"x": [1, None]})
    assert (
        files.read_json(tmp_path / "b")
        == json.loads((tmp_path / "b").read_text())
        == {"x": [1, None]}
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


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


def test_json_that_cannot_be_read(tmp_path):
    class Error(UserError):
        exit_code = 3

    (tmp_path / "torn").write_text('{"a": 1, "b')
    (tmp_path / "bytes").write_bytes(b'"\xff"')
    for name, words in (("none", "No such file"), ("torn", "not valid JSON"), ("bytes", "damaged")):
        with pytest.raises(Error, match=words) as error:
            files.read_json(tmp_path / name, Error)
        assert str(tmp_path / name) in one_line(error)


@pytest.mark.fault(102)
def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match=f"{path}: a folder, a pipe or a device; expected a"):
            files.read_json(path)


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


def test_a_damaged_lock_counts_for_nothing_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "run.lock").write_bytes(b"\xff\x00{")
    with (
        files.Lock(tmp_path),
        pytest.raises(UserError, match="in use by a run"),
        files.Lock(tmp_path),
    ):
        pass
    (tmp_path / "run.lock").unlink()
    (tmp_path / "outside").write_text("kept")
    for make in (lambda path: path.symlink_to(tmp_path / "outside"), os.mkfifo):
        make(tmp_path / "run.lock")
        with (
            pytest.raises(UserError, match="out_dir=.*(links|seek.*); try another"),
            files.Lock(tmp_path),
        ):
            pass
        (tmp_path / "run.lock").unlink()
    assert (tmp_path / "outside").read_text() == "kept"
