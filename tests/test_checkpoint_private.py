"""Private parts of run/checkpoint.py, checkpoint_folders.py and reshard.py: they go with these."""

import json
import os
from types import SimpleNamespace

import pytest
import ranks
import torch
from safetensors.torch import save_file
from test_checkpoint import save

from run import checkpoint, checkpoint_folders, reshard
from run.resume import Start
from scale import parallel


def positions_of_two():
    """For ranks.call: of the error where a loader's state is each rank's own; of none where not."""
    world = parallel.start("cpu", 60)
    same = checkpoint.position_of_ranks(SimpleNamespace(state_dict=lambda: {"rows": 3}))
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.position_of_ranks(SimpleNamespace(state_dict=lambda: {"rows": world.rank}))
    parallel.stop()
    return same, str(error.value)


def test_a_loader_has_one_state_on_all_ranks():
    words = "must be the same on all ranks: rank 1 has {'rows': 1}, rank 0 has {'rows': 0}"
    assert ranks.call(2, positions_of_two) == [({"rows": 3}, f"the loader's state {words}")] * 2


def test_rows_of_parts_of_which_none_may_be_missing(tmp_path):
    whole = torch.arange(30.0).view(10, 3)
    ends = [0, 4, 8, 10, 10]  # fewer rows than ranks: the last has none
    paths = [tmp_path / f"model.rank{rank:05d}.safetensors" for rank in range(4)]
    for path, first, last in zip(paths, ends, ends[1:]):
        save_file(
            {"w": whole[first:last].clone()}, path, {"shards": json.dumps({"w": [first, 10]})}
        )
    stored = reshard.open_merged(tmp_path)[0]["model"]["w"]
    assert stored.shape == (10, 3) and stored.dtype == torch.float32
    assert torch.equal(stored[...], whole)
    for a in range(10):
        for b in range(a + 1, 11):
            assert torch.equal(stored[a:b], whole[a:b])
    for path in paths[:3]:
        aside = path.rename(tmp_path / "aside")
        with pytest.raises(
            checkpoint.CheckpointError, match="w: not each of 10 rows is there once"
        ):
            reshard.open_merged(tmp_path)
        aside.rename(path)


def killed_between(monkeypatch, number):
    """Ends a save at its `number`th rename, as a kill does."""
    count, rename = [], os.rename

    def stop(*paths):
        count.append(paths)
        if len(count) == number:
            raise KeyboardInterrupt
        rename(*paths)

    monkeypatch.setattr(os, "rename", stop)


@pytest.mark.fault(86)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_kill_between_the_renames_of_a_step_saved_again_hides_nothing(
    tmp_path, monkeypatch, damaged, capsys
):
    save(tmp_path, 4, 1.0, keep_last=1)
    (tmp_path / "log.jsonl").write_text('{"kind": "train"}\n{"kind": "saved", "step": 4}\n')
    (tmp_path / "source.json").write_text("{}")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_between(patch, 2)
        save(tmp_path, 4, 2.0, keep_last=1)
    assert not checkpoint_folders.folders(tmp_path)
    if damaged:  # the new one: the old one is taken
        os.truncate(tmp_path / ".writing_step_00000004/model.safetensors", 10)
    start = Start(tmp_path, "auto")
    assert start.folder == tmp_path / "step_00000004" and "it is back" in capsys.readouterr().err
    assert (start.weights["w"][...] == (1.0 if damaged else 2.0)).all()
    save(tmp_path, 8, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step_00000008"]
