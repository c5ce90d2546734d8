"""Checkpoints that earlier versions wrote themselves (fixtures/write.py) are resumed and go on.

What goes on is compared with the losses that the earlier version computed in the same steps: by a
relative 1e-5, and with 8-bit moments, whose rounding is drawn, by 1e-4. On the CPU that wrote them
they are equal.
"""

import importlib.util
import json
import math
import tarfile

import pytest
import ranks
import torch
from conftest import ROOT, read_log

from run import checkpoint_folders, reshard

spec = importlib.util.spec_from_file_location("write", ROOT / "tests/fixtures/write.py")
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)
ARCHIVES = sorted((ROOT / "tests/fixtures").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def older(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def goes_on(folder, name, count, **changes):
    """The relative difference of the largest loss after resuming a fixture over so many ranks."""
    out = folder / name
    done = ranks.run(count, write.words(folder, name, out_dir=out, resume="auto", **changes))
    assert done.returncode == 0, done.stderr + done.stdout
    expected = {
        line["step"]: line["loss"] for line in json.loads((folder / f"{name}.json").read_text())
    }
    found = {line["step"]: line["loss"] for line in read_log(out) if line["kind"] == "train"}
    assert found.keys() == {4, 5, 6}
    return max(abs(found[step] / expected[step] - 1) for step in found)


@pytest.mark.parametrize("name", [name for name in write.RUNS if name != "fp8"])
def test_a_checkpoint_of_an_earlier_version_goes_on(older, name):
    count, _ = write.RUNS[name]
    assert not (older / name / "step_00000003/values.json").exists()
    assert goes_on(older, name, count) <= (1e-4 if name == "adamw8bit" else 1e-5)
    tensors, state = reshard.open_merged(checkpoint_folders.find(older / name))
    assert state["step"] == 6 and "values" in state  # written anew, as today


def test_rows_of_two_ranks_go_on_in_one(older):
    for folder in sorted((older / "fsdp").glob("step_00000006")):
        checkpoint_folders.remove(folder)
    (older / "fsdp/log.jsonl").unlink(missing_ok=True)
    assert goes_on(older, "fsdp", 0, parallel="ddp", batch_size=4) <= 1e-5


@pytest.mark.gpu
def test_scales_of_fp8_go_on(older):
    if not (older / "fp8").exists() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a newer GPU")
    assert math.isclose(goes_on(older, "fp8", 0), 0, abs_tol=2e-3)
