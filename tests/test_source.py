"""run/source.py: a run and its checkpoints keep the code that they were trained with, and tell of edits."""

from run import source


def test_every_source_of_this_repository_is_digested():
    found = source.digests()
    assert {"model.py", "kernels.py", "train.py", "run/source.py", "scale/parallel.py"} <= found.keys()
    assert not any(name.startswith(("tests/", "config/")) for name in found)
    assert all(len(digest) == 64 for digest in found.values())


def test_an_edit_is_named_with_the_way_back(tmp_path, monkeypatch):
    here, run = tmp_path / "repository", tmp_path / "out" / "run"
    for name in ("model.py", "kernels.py", "plot.py", "fast/mlp.py", "fast/hopper.cu", "fast/notes.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"# {name}\n")
    monkeypatch.setattr(source, "HERE", here)
    assert source.warning(run) is None  # a run of before this record
    run.mkdir(parents=True)
    source.record(run)
    assert sorted(path.name for path in run.iterdir()) == ["kernels.py", "model.py", "source.json"]
    assert (run / "model.py").read_text() == "# model.py\n"
    (here / "plot.py").write_text("another")
    assert source.warning(run) is None
    (here / "fast/new.cu").write_text("")
    assert "fast/new.cu" in source.warning(run)
    (here / "model.py").write_text("edited")
    text = source.warning(run)
    assert f"differs (fast/new.cu, model.py) from that of {run}, which keeps" in text and "\n" not in text
    for text in ("{", "[]", '{"files": 3}'):
        (run / "source.json").write_text(text)
        assert source.warning(run) is None
