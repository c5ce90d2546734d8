"""run/source.py: a run and its checkpoints keep the code that trained them, and tell of edits."""

import importlib.util
import sys

import pytest

from run import source
from system.errors import UserError


def test_every_source_of_this_repository_is_digested():
    found = source.digests()
    assert {
        "model.py",
        "kernels.py",
        "train.py",
        "run/source.py",
        "scale/parallel.py",
    } <= found.keys()
    assert not any(name.startswith(("tests/", "config/")) for name in found)
    assert all(len(digest) == 64 for digest in found.values())


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """(a repository of some files, a function by which a process begins in it)."""
    here = tmp_path / "repository"
    for name in (
        "model.py",
        "kernels.py",
        "plot.py",
        "fast/mlp.py",
        "fast/hopper.cu",
        "fast/notes.txt",
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"# {name}\n")

    def begin():
        monkeypatch.setattr(source, "HERE", here)
        monkeypatch.setattr(source, "BEGAN", source.digests())
        monkeypatch.setattr(
            source, "COPIES", {name: (here / name).read_bytes() for name in source.COPIED}
        )
        monkeypatch.setattr(source, "_imported", set())

    begin()
    return here, begin


def test_an_edit_is_named_with_the_way_back(tmp_path, begin):
    (here, begin), run = begin, tmp_path / "out" / "run"
    assert source.warning(run) is None  # a run of before this record
    run.mkdir(parents=True)
    source.record(run)
    assert sorted(path.name for path in run.iterdir()) == ["kernels.py", "model.py", "source.json"]
    assert (run / "model.py").read_text() == "# model.py\n"
    (here / "plot.py").write_text("another")
    begin()
    assert source.warning(run) is None
    (here / "fast/new.cu").write_text("")
    begin()
    assert "fast/new.cu" in source.warning(run)
    (here / "model.py").write_text("edited")
    begin()
    text = source.warning(run)
    assert (
        f"differs (fast/new.cu, model.py) from that of {run}, which keeps" in text
        and "run by this code" in text
        and "\n" not in text
    )
    for text in ("{", "[]", '{"files": 3}'):
        (run / "source.json").write_text(text)
        assert source.warning(run) is None


def load(path, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    monkeypatch.setitem(sys.modules, spec.name, importlib.util.module_from_spec(spec))


@pytest.mark.fault(95)
def test_what_is_recorded_is_what_was_imported(tmp_path, begin, monkeypatch):
    """An edit after the imports changes neither run nor record; one before them is refused."""
    (here, begin), run = begin, tmp_path / "run"
    run.mkdir()
    load(here / "model.py", monkeypatch)
    source.check()
    expected = source.digests()
    (here / "model.py").write_text("edited after its import")
    source.record(run)
    assert (run / "model.py").read_text() == "# model.py\n"
    assert source.files.read_json(run / "source.json")["files"] == expected
    assert source.warning(run) is None
    (here / "fast/mlp.py").write_text("edited before its import")
    load(here / "fast/mlp.py", monkeypatch)
    for look in (source.check, lambda: source.record(run)):
        monkeypatch.setattr(source, "_imported", {"model.py"})
        with pytest.raises(UserError, match="fast/mlp.py: edited while this run began"):
            look()


@pytest.mark.parametrize("name", ["fast/hopper_gemm.cu", "fast/hopper.cuh"])
def test_cuda_that_was_edited_before_its_file_was_imported_is_refused(begin, monkeypatch, name):
    """Whatever Python file compiles it."""
    here, begin = begin
    (here / name).write_text("// CUDA")
    begin()
    (here / name).write_text("// edited")
    load(here / "fast/mlp.py", monkeypatch)
    with pytest.raises(UserError, match=f"{name}: edited while this run began"):
        source.check()
