"""What holds for ranks on gloo (test_signals.py, test_faults.py) holds on two GPUs and NCCL.

NCCL differs: the host runs ahead of the device, and a rank that waits for a dead one gets no error.
"""

import re

import pytest
import ranks
import torch
from compare import repeated
from conftest import flags, write_shard
from test_signals import attempt, check_restarts, check_told, error_lines

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, {GPUS} found")]
# nothing to compile: starts in seconds
ON_GPUS = dict(device="cuda", precision="bf16", ops="torch")


@pytest.mark.parametrize("fault, code, line", [
    ("mistake", 1, "error: rank 1: Traceback"),
    ("exits", 7, None),  # of which torchrun's report tells
    ("full", 2, r"error: rank 1: out of memory: .*; try "),
])  # fmt: skip
@pytest.mark.fault(29)
def test_a_fault_of_one_rank_on_nccl_is_told_once_and_ends_all(
    data_dir, tmp_path, fault, code, line
):
    """The other may wait for it in C++, until torchrun kills it."""
    done = attempt(2, fault, 1, 6, data_dir, tmp_path / "run", grace=5, **ON_GPUS)
    check_told(done, code, line)


@pytest.mark.fault(30)
def test_a_rank_of_nccl_that_hangs_ends_all(data_dir, tmp_path):
    """NCCL's watchdog ends the one that waits, in words of its own."""
    settings = dict(ON_GPUS, timeout_s=6)
    done = attempt(2, "hangs", 1, 6, data_dir, tmp_path / "run", grace=5, **settings)
    assert done.codes[0] not in (0, None) and done.codes[1] == -9, done.stderr


def test_a_token_out_of_range_on_another_rank_of_nccl_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/py_train_000001.bin", [1] * 4 * 33 + [60_000] + [1] * 4_000)
    done = ranks.run(2, flags(tmp_path / "data", tmp_path / "run", **ON_GPUS), grace=5)
    check_told(done, 3, "error: rank 1: .*token 132 is 60000")


@pytest.mark.fault(47)
@pytest.mark.parametrize("run", [*range(5), *map(repeated, range(5, 20))])
def test_an_error_after_ddp_ends_every_rank_of_nccl(data_dir, tmp_path, run):
    settings = dict(ON_GPUS, lr=1e30, warmup_steps=0, save_interval=0)
    done = ranks.run(2, flags(data_dir, tmp_path / "run", **settings), grace=5)
    assert done.codes == [5, 5] and len(error_lines(done)) == 1, (done.codes, done.stderr)


@pytest.mark.parametrize("settings", [
    dict(parallel="fsdp", remat="block"), dict(context_parallel=2, document_mask=True),
    dict(parallel="zero2", optimizer="muon", remat="selective"),
])  # fmt: skip
def test_the_model_is_proved_on_nccl(data_dir, tmp_path, settings):
    words = flags(data_dir, tmp_path / "run", **ON_GPUS | settings | dict(prove=True, max_steps=2))
    done = ranks.run(2, words)
    assert done.returncode == 0 and re.search(r"\nprove +\d", done.stdout), done.stdout


@pytest.mark.long
@pytest.mark.fault(60)
@pytest.mark.parametrize("run", [0, *map(repeated, range(1, 7))])
def test_restarts_on_nccl(data_dir, tmp_path, run):
    """Each rank is killed once; torchrun gives the other, which waits in NCCL, 30 s to end."""
    check_restarts(data_dir, tmp_path, {10: 1, 160: 0}, steps=300, **ON_GPUS)
