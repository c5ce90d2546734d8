"""run/source.py: a run keeps the code that it was trained with, says what differs, and never fails for it."""

import json

import pytest

from run import source


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A repository in which the files may be edited."""
    here = tmp_path / "repository"
    for name in (
        "model.py",
        "kernels.py",
        "plot.py",
        "fast/mlp.py",
        "fast/hopper.cu",
        "fast/notes.txt",
        "scale/a.py",
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"# {name}\n")
    for wing in source.WINGS:
        (here / wing).mkdir(exist_ok=True)
    monkeypatch.setattr(source, "HERE", here)
    return here


def test_every_source_of_this_repository_is_digested():
    found = source.digests()
    assert {
        "model.py",
        "kernels.py",
        "train.py",
        "run/source.py",
        "scale/parallel.py",
        "fast/hopper.py",
    } <= found.keys()
    assert not any(name.startswith(("tests/", "config/")) for name in found)
    assert all(len(digest) == 64 for digest in found.values())


def test_a_run_without_an_edit_differs_in_nothing(here, tmp_path):
    run = tmp_path / "out" / "run"
    assert source.differences(run) == [] and source.warning(run) is None  # a run of before this record
    assert source.record(run, 0) is None
    assert sorted(p.name for p in run.iterdir()) == ["kernels.py", "model.py", "source.json"]
    assert (run / "model.py").read_text() == "# model.py\n"
    found = json.loads((run / "source.json").read_text())["files"]
    assert sorted(found) == [
        "fast/hopper.cu",
        "fast/mlp.py",
        "kernels.py",
        "model.py",
        "plot.py",
        "scale/a.py",
    ]
    (here / "plot.py").write_text("another")
    (here / "scale/a.py").unlink()
    assert source.differences(run) == [] and source.warning(run) is None


def test_an_edit_is_named_with_the_way_back(here, tmp_path):
    source.record(tmp_path / "run", 0)
    (here / "model.py").write_text("edited")
    assert source.differences(tmp_path / "run") == ["model.py"]
    text = source.warning(tmp_path / "run")
    assert f"cp {tmp_path}/run/model.py model.py" in text and "model.py differs" in text and "\n" not in text
    (here / "kernels.py").write_text("edited")
    (here / "fast/mlp.py").write_text("edited")
    (here / "fast/new.cu").write_text("")
    assert source.differences(tmp_path / "run") == ["fast/mlp.py", "fast/new.cu", "kernels.py", "model.py"]
    first, second = source.warning(tmp_path / "run").split("\n")
    assert "kernels.py and model.py differ from" in first and "kernels.py kernels.py" in first
    assert "fast forms differ" in second and "fast/mlp.py, fast/new.cu" in second and "cp " not in second


def test_the_code_of_earlier_steps_is_kept_by_a_resumed_run(here, tmp_path):
    run = tmp_path / "run"
    source.record(run, 0)
    source.record(run, 50)  # with the same code
    assert not list(run.glob("source_step_*"))
    (here / "model.py").write_text("second")
    source.record(run, 100)
    (here / "model.py").write_text("third")
    source.record(run, 200)
    aside = {p.name: (p / "model.py").read_text() for p in run.glob("source_step_*")}
    assert aside == {"source_step_00000100": "# model.py\n", "source_step_00000200": "second"}
    assert (run / "model.py").read_text() == "third"
    for step, folder in (
        (50, "source_step_00000100"),
        (100, "source_step_00000100"),
        (150, "source_step_00000200"),
    ):
        assert source.kept(run / f"step_{step:08d}") == run / folder
        assert f"cp {run}/{folder}/model.py model.py" in source.warning(run / f"step_{step:08d}")
    assert source.kept(run / "step_00000250") == source.kept(run) == run and source.warning(run) is None
    source.record(run, 0)  # a new run in the same folder
    assert sorted(p.name for p in run.iterdir()) == ["kernels.py", "model.py", "source.json"]


def test_nothing_here_ends_a_run(here, tmp_path):
    (tmp_path / "file").touch()
    problem = source.record(tmp_path / "file" / "run", 0)
    assert "the code of this run is not kept" in problem and "\n" not in problem
    source.record(tmp_path / "run", 0)
    for text in ("{", "[]", '{"files": 3}', '{"files": {}}'):
        (tmp_path / "run" / "source.json").write_text(text)
        assert source.differences(tmp_path / "run") == [] and source.warning(tmp_path / "run") is None
    source.record(tmp_path / "run", 5)  # over the damaged one, which is set aside
    (here / "model.py").unlink()
    assert source.differences(tmp_path / "run") == ["model.py"]
    assert "not kept" in source.record(tmp_path / "run", 9)
    (here / "scale" / "a.py").unlink()
    (here / "scale").rmdir()
    assert source.differences(tmp_path / "run") == []
