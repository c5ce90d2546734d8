"""run/source.py: a run and its checkpoints keep the code that trained them, and tell of edits."""

import pytest

from run import source
from system.errors import UserError


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """(a repository of some files, a function by which a process begins in it)."""
    here = tmp_path / "repository"
    (here / "fast").mkdir(parents=True)
    for name in ("model.py", "kernels.py", "plot.py", "fast/a.cu", "fast/notes.txt"):
        (here / name).write_text(f"# {name}\n")
    monkeypatch.setattr(source, "HERE", here)

    def begin():
        monkeypatch.setattr(source, "BEGAN", source.digests())

    begin()
    copies = {name: (here / name).read_bytes() for name in source.COPIES}
    monkeypatch.setattr(source, "COPIES", copies)
    return here, begin


def test_an_edit_since_the_run_is_named(tmp_path, begin):
    (here, begin), run = begin, tmp_path / "out" / "run"
    assert source.warning(run) is None  # it keeps no code
    run.mkdir(parents=True)
    source.record(run)
    assert sorted(path.name for path in run.iterdir()) == sorted(["source.json", *source.COPIES])
    assert (run / "model.py").read_text() == "# model.py\n"
    tag = source.tag()
    (here / "plot.py").write_text("another")
    begin()
    assert source.warning(run) is None and source.tag() != tag
    (here / "fast/new.cu").write_text("")
    (here / "model.py").write_text("edited")
    begin()
    assert source.warning(run).startswith("fast/new.cu, model.py: ")
    (run / "source.json").write_text('{"files"')
    assert source.warning(run) is None


@pytest.mark.fault(95)
def test_what_was_edited_while_a_run_began_is_refused(begin):
    here, _ = begin
    source.check()
    for name in ("model.py", "fast/a.cu"):
        (here / name).write_text("edited")
    with pytest.raises(UserError, match="fast/a.cu, model.py"):
        source.check()
