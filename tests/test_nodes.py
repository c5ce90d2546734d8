"""Several nodes: two torchruns on this machine, and the SLURM script of docs/operations.md."""

import inspect
import os
import re
import signal
import subprocess
import sys

import pytest
import ranks
import saved
import torch
from compare import copied
from conftest import ROOT, flags, losses, read_log, train_here
from test_parallel import SHORT
from test_signals import children, wait_for

# Stand-ins for SLURM's commands: srun runs its command once for each node and notes the process
# ids, for the signal that SLURM would send at the end of the job's time; scontrol notes the job
# that it is to queue again.
SRUN = """
for node in $(seq $SLURM_NNODES); do "$@" & echo $! >> $HERE/pids; done
code=0
for pid in $(cat $HERE/pids); do wait $pid || code=$?; done
exit $code
"""
SCONTROL = """
case "$1" in
show) echo localhost; echo node2 ;;
requeue) echo $2 >> $HERE/requeued ;;
esac
"""


def start_nodes(words, logs, each=1, numbered=False):
    """Starts two torchruns of `each` ranks, which write into `logs`.

    numbered: the commands number the nodes; else a rendezvous does. Each node sees as many GPUs as
    it has ranks, if there are enough.
    """
    port = ranks.free_port()
    meet = [f"--master_addr=localhost --master_port={port} --node_rank={node}" for node in range(2)]
    if not numbered:
        meet = [f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"] * 2
    start = f"-m torch.distributed.run --nnodes=2 --nproc_per_node={each}".split()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    running = []
    for node, log in enumerate(logs):
        env = ranks.environment() | {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[node * each : (node + 1) * each])
        }
        with open(log, "w") as file:
            command = [sys.executable, *start, *meet[node].split(), "train.py", *words]
            running.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file))
    return running


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_nodes_of_a_gpu_each_equal_one_gpu(data_dir, tmp_path):
    on_gpu = SHORT | dict(device="cuda", precision="fp32", ops="torch", sample_interval=0)
    train_here(data_dir, tmp_path / "one", **on_gpu)
    logs = [tmp_path / "node_0", tmp_path / "node_1"]
    words = flags(data_dir, tmp_path / "two", **on_gpu, parallel="hsdp")
    codes = [process.wait(300) for process in start_nodes(words, logs)]
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0] and "2 x NVIDIA" in said, said
    found, expected = losses(read_log(tmp_path / "two")), losses(read_log(tmp_path / "one"))
    assert sorted(found) == [1, 2, 3, 4, 5, 6] and found == pytest.approx(expected, rel=1e-4)


def check_a_lost_node(data_dir, tmp_path, each, rel, loss, **settings):
    """Of two nodes of `each` ranks one is killed: the other ends; then it goes on alone.

    loss: a pattern of the words in which a rank tells that it lost others.
    """
    settings = SHORT | dict(schedule="constant", sample_interval=0, keep_last=10**6) | settings
    both = dict(parallel="hsdp")  # which shards within a node, so that each holds a copy
    one, cut, logs = tmp_path / "one", tmp_path / "cut", [tmp_path / "kept", tmp_path / "lost"]
    train_here(data_dir, one, **settings)
    endless = settings | both | dict(max_steps=10**6, timeout_s=40)
    words = flags(data_dir, cut, **endless)
    kept, lost = running = start_nodes(words, logs, each, numbered=True)
    try:
        wait_for(lambda: any("step      8 " in log.read_text() for log in logs))
        for pid in (lost.pid, *children(lost.pid)):
            os.kill(pid, signal.SIGKILL)
        code, said = kept.wait(120), logs[0].read_text()
    finally:
        for process in running:
            process.kill()
    causes = re.findall(rf"^(?:error: .*{loss}).*$", said, re.M)
    assert code == 1 and causes, said
    expected = losses(read_log(one))
    same = lambda folder, steps: [losses(read_log(folder))[step] for step in steps]
    assert same(cut, expected) == pytest.approx([*expected.values()], rel=rel)
    printed = "".join(log.read_text() for log in logs)
    assert printed.count("step      6 ") == 1  # rank 0 alone prints

    alone = copied(cut, 3, tmp_path / "alone")  # on the node that is left
    assert saved.parts(alone / "step_00000003")["model"] == each
    done = ranks.run(each, flags(data_dir, alone, **settings, parallel="fsdp", resume="auto"))
    assert done.returncode == 0, done.stderr
    assert same(alone, (4, 5, 6)) == pytest.approx(same(one, (4, 5, 6)), rel=rel)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.fault(29)
def test_a_node_that_is_killed_ends_the_other_which_goes_on_alone(data_dir, tmp_path):
    check_a_lost_node(data_dir, tmp_path, each=2, rel=4e-6, loss="lost .*rank")


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.fault(29)
def test_a_node_of_gpus_that_is_killed_ends_the_other(each, data_dir, tmp_path):
    if torch.cuda.device_count() < 2 * each:
        pytest.skip(f"needs {2 * each} GPUs")
    # NCCL on one host gets no error of a lost rank: its watchdog ends the processes after timeout_s
    loss = "lost another rank|.*Watchdog caught collective operation timeout"
    on_gpu = dict(device="cuda", precision="fp32", ops="torch")
    check_a_lost_node(data_dir, tmp_path, each, rel=1e-4, loss=loss, **on_gpu)


def slurm_script():
    """The script of docs/operations.md."""
    text = (ROOT / "docs/operations.md").read_text().partition("    #!/bin/bash\n")[2]
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    return inspect.cleandoc("\n".join(["", *lines[:end]]))


@pytest.mark.long
@pytest.mark.slow
def test_the_script_for_slurm_queues_itself_again_until_the_run_is_done(data_dir, tmp_path):
    settings = dict(max_steps=200, save_interval=200, eval_interval=0, log_interval=20)
    name, *words = flags(data_dir, tmp_path / "run", **settings)
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    for command, lines in dict(srun=SRUN, scontrol=SCONTROL, torchrun=torchrun).items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{lines}")
        (tmp_path / command).chmod(0o755)
    script = slurm_script()
    assert script.count("config/gpt2_124m.py --out_dir=$out --batch_size=16") == 1
    script = script.replace("out=out/gpt2_124m\n", f"out={tmp_path}/run\n")
    script = script.replace(
        "config/gpt2_124m.py --out_dir=$out --batch_size=16", " ".join([name, *words])
    )
    slurm = dict(
        SLURM_NNODES="2", SLURM_GPUS_ON_NODE="1", SLURM_JOB_NODELIST="node[1-2]", HERE=str(tmp_path)
    )
    slurm |= dict(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID=str(ranks.free_port()))

    def job():
        (tmp_path / "pids").unlink(missing_ok=True)
        with open(tmp_path / "log", "a") as log:
            env = ranks.environment() | slurm
            return subprocess.Popen(
                ["bash", "-c", script], cwd=ROOT, env=env, stdout=log, stderr=log
            )

    first = job()
    wait_for(lambda: "step     20  10% |" in (tmp_path / "log").read_text())
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    assert first.wait(300) != 0
    said = (tmp_path / "log").read_text()
    assert (tmp_path / "requeued").read_text() == slurm["SLURM_JOB_ID"] + "\n", said
    assert job().wait(300) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "requeued").read_text().count("\n") == 1
    assert sorted(losses(read_log(tmp_path / "run"))) == list(range(1, 201))
