"""run/files.py: a file is the old or the new one, JSON is read with a one-line error, a digest is SHA-256."""

import errno
import hashlib
import json
import os

import pytest
from conftest import one_line

from configurator import UserError
from run import files


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    for data in (b"\0\xff", "grüße\n", b""):
        files.write_atomic(tmp_path / "a", data)
        written = data.encode() if isinstance(data, str) else data
        assert (tmp_path / "a").read_bytes() == written
        assert files.digest(tmp_path / "a") == (len(written), hashlib.sha256(written).hexdigest())
    files.write_json(str(tmp_path / "b"), {"x": [1, None]})
    assert files.read_json(tmp_path / "b") == json.loads((tmp_path / "b").read_text()) == {"x": [1, None]}
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
