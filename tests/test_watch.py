"""run/watch.py: a fault in one rank is heard, ends all of them, and leaves a checkpoint to go on from.

Those over several ranks run train.py as a script in ranks.py's processes; tests of torchrun itself are marked slow.
"""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import ranks
import torch
from conftest import ROOT, flags, losses, read_log, tell, train_here, write_shard

import hellaswag
import train
from configurator import UserError, configure, run
from corpus.loader import TokenLoader
from run import checkpoint, watch
from run.evaluate import Evaluator
from run.lock import started
from run.watch import Watch
from scale import parallel
from settings import Config


def train_with_fault(words, fault, at_rank, at_micro_step):
    """For ranks.attempt: train.py as a script, with a fault in one rank before a micro-step, counted from 1."""
    take, count = TokenLoader.next, []

    def next_batch(loader):
        count.append(1)
        if len(count) == at_micro_step and os.environ.get("RANK", "0") == str(at_rank):
            FAULTS[fault]()
        time.sleep(0.02 * (fault == "interrupt"))  # longer than the ranks take to agree
        return take(loader)

    TokenLoader.next = next_batch
    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda device: (0, 24 * 2**30)
    run(train.main, configure(Config, words))


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def mistake():
    raise ZeroDivisionError("in an edit of model.py")


def signalled_twice():
    tell(signal.SIGINT)
    time.sleep(1.5)
    tell(signal.SIGINT)
    time.sleep(60)


FAULTS = {
    "memory": out_of_memory,
    "mistake": mistake,
    "full": lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda"),
    "exits": lambda: os._exit(7),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1e9),
    "term": tell,
    "interrupt": lambda: tell(signal.SIGINT),
    "interrupt twice": signalled_twice,
}


def attempt(number, fault, at_rank, at_micro_step, data_dir, out_dir, grace=20, **settings):
    words = flags(data_dir, out_dir, **{"max_steps": 40, "save_interval": 4, **settings})
    return ranks.attempt(
        number, train_with_fault, words, fault, at_rank, at_micro_step, timeout=60, grace=grace
    )[0]


def error_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def check_told(done, fault, codes, line):
    """The ranks' exit codes, and that the fault of rank 1 is told once, in a line that begins as the pattern `line`."""
    assert done.codes == codes
    [found] = error_lines(done)
    assert re.match(line, found), found
    if fault == "hangs":
        assert "stacks of rank 1" in done.errors[1] and "next_batch" in done.errors[1]
    if fault == "mistake":
        assert done.stderr.count("ZeroDivisionError: in an edit") == 1


@pytest.mark.parametrize(
    "fault, codes, line",
    [
        ("memory", [2, 2], "error: rank 1: out of memory: .*try --batch_size=4"),
        pytest.param("mistake", [1, 1], r"error: rank 1, step 3 \(data\):", marks=pytest.mark.slow),
        pytest.param(
            "dies", [1, -9], r"error: step 3 \(.*\): lost rank 1, last in step", marks=pytest.mark.slow
        ),
        pytest.param(
            "hangs", [1, 1], r"error: rank 1 hangs in step 3 \(data\); rank 0 has", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.fault(29, 30, 42, 48)
def test_a_fault_of_one_rank_is_told_once_and_ends_all(data_dir, tmp_path, fault, codes, line):
    done = attempt(2, fault, 1, 6, data_dir, tmp_path / "run", timeout_s=6)
    check_told(done, fault, codes, line)
    assert fault != "mistake" or not done.errors[0]


def wait_beside(cfg, at_end):
    """For ranks.attempt: rank 0 waits and gets no error, as NCCL leaves it; rank 1 ends without or with a word."""
    with Watch(cfg, parallel.join(cfg)) as watch:
        time.sleep(0.3)
        if watch.world.rank == 1 and at_end == "lost":
            os._exit(7)
        time.sleep((60 if at_end == "lost" else 1.2) * watch.world.main)


@pytest.mark.fault(29)
@pytest.mark.parametrize("end, codes", [("lost", [1, 7]), ("left", [0, 0])])
def test_a_rank_whose_process_ends_is_missed_by_those_who_get_no_error(tmp_path, end, codes):
    config, *words = flags(tmp_path, tmp_path / "run")
    cfg = configure(Config, [str(ROOT / config), *words])
    done = ranks.attempt(2, wait_beside, cfg, end, grace=5)[0]
    assert done.codes == codes, done.stderr
    lost = ["error: step 0 (start): lost rank 1, last in step 0 (start) (its process has ended)"]
    assert error_lines(done) == (lost if end == "lost" else [])


@pytest.mark.slow
@pytest.mark.fault(6, 48)
def test_a_token_out_of_range_in_the_rows_of_another_rank_is_named(data_dir, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_shard(folder / "py_train_000001.bin", [1] * 4 * 33 + [60_000] + [1] * 4_000)
    done = ranks.run(2, flags(folder, tmp_path / "run"))
    assert done.codes == [3, 3] and len(error_lines(done)) == 1
    assert "error: rank 1: " in done.stderr and "py_train_000001.bin: token 132 is 60000" in done.stderr


@pytest.mark.fault(26, 56)
def test_ranks_stop_together_in_the_middle_of_a_long_step_and_resume_bitwise(data_dir, tmp_path):
    settings = dict(
        max_steps=2, batch_size=1, batch_tokens=4096, dropout=0.1, shuffle_seed=1
    )  # 64 micro-steps a step
    done = attempt(2, "interrupt", 1, 70, data_dir, tmp_path / "cut", **settings)
    assert done.codes == [130, 130], done.stderr
    assert (
        "SIGINT in step 2" in done.stdout and "saved" in done.stdout and "stopped      step 1" in done.stdout
    )
    assert json.loads((tmp_path / "cut/status.json").read_text())["state"] == "stopped"
    assert sorted(losses(read_log(tmp_path / "cut"))) == [1]
    ranks.run(2, flags(data_dir, tmp_path / "cut", resume="auto", **settings))
    ranks.run(2, flags(data_dir, tmp_path / "whole", **settings))
    assert losses(read_log(tmp_path / "cut")) == losses(read_log(tmp_path / "whole"))


def train_told_in_evaluation(words, part, at_rank):
    """For ranks.attempt: train.py as a script; one rank gets SIGTERM as a part of step 4's evaluation begins."""
    evaluate = getattr(Evaluator, part)

    def told(evaluator, step, log):
        if step == 4 and os.environ.get("RANK", "0") == str(at_rank):
            tell()
        return evaluate(evaluator, step, log)

    setattr(Evaluator, part, told)
    if "RANK" in os.environ:  # so that batches are left when the ranks have agreed
        pad = hellaswag.pad
        hellaswag.pad = lambda *rows: time.sleep(0.4) or pad(*rows)
    run(train.main, configure(Config, words))


@pytest.mark.parametrize(
    "part, number",
    [("validation", 0), ("hellaswag", 0), pytest.param("hellaswag", 2, marks=pytest.mark.slow)],
)
@pytest.mark.fault(27, 56)
def test_a_signal_in_an_evaluation_leaves_it_for_the_resumed_run(data_dir, tmp_path, part, number):
    examples = [dict(ctx=f"{i} is", endings=["odd", "even", "red", "big"], label=i % 4) for i in range(200)]
    (tmp_path / "hellaswag").write_text("\n".join(map(json.dumps, examples)))
    settings = dict(max_steps=6, eval_interval=4, save_interval=100, hellaswag_interval=4)
    settings |= dict(hellaswag_file=tmp_path / "hellaswag")
    words = flags(data_dir, tmp_path / "cut", **settings)
    done, _ = ranks.attempt(number, train_told_in_evaluation, words, part, number - 1 if number else 0)
    assert set(done.codes) == {143}, done.stderr
    cut = read_log(tmp_path / "cut")
    assert sorted(losses(cut, "val")) == ([0] if part == "validation" else [0, 4])
    assert [line["step"] for line in cut if line["kind"] == "hellaswag"] == [0]
    assert (tmp_path / "cut/step_00000004").is_dir() and not (tmp_path / "cut/run.lock").exists()
    ranks.run(number, [*words, "--resume=auto"])
    ranks.run(number, flags(data_dir, tmp_path / "whole", **settings))
    cut, whole = read_log(tmp_path / "cut"), read_log(tmp_path / "whole")
    assert losses(cut, "val") == losses(whole, "val") and losses(cut) == losses(whole)
    scores = [{s["step"]: s["acc_norm"] for s in log if s["kind"] == "hellaswag"} for log in (cut, whole)]
    assert scores[0] == scores[1] and sorted(scores[0]) == [0, 4, 6]


@pytest.mark.fault(27)
def test_a_checkpoint_of_a_stopped_validation_gets_its_loss(data_dir, tmp_path):
    """Without it, the checkpoint could not be the best, and would be removed."""
    words = flags(data_dir, tmp_path, max_steps=6, eval_interval=4, save_interval=4)
    done, _ = ranks.attempt(0, train_told_in_evaluation, words, "validation", 0)
    assert done.codes == [143], done.stderr
    state = tmp_path / "step_00000004/state.json"
    assert json.loads(state.read_text())["val_loss"] is None
    ranks.run(0, [*words, "--resume=auto"])
    assert json.loads(state.read_text())["val_loss"] == losses(read_log(tmp_path), "val")[4]
    checkpoint.load(state.parent)


def test_a_step_that_is_given_up_leaves_tensors_as_they_were(tmp_path):
    cfg = configure(Config, ["--device=cpu", f"--out_dir={tmp_path}"])
    tensors, random = [torch.ones(()), torch.arange(3.0)], torch.get_rng_state()
    with Watch(cfg, parallel.World(0, 1, torch.device("cpu"))) as own:
        with own.stoppable(None, tensors):
            tensors[0].zero_(), tensors[1].mul_(torch.rand(3))
            raise watch.Stopped
        with own.stoppable():
            raise watch.Stopped
    assert tensors[0] == 1 and tensors[1].tolist() == [0, 1, 2] and torch.equal(torch.get_rng_state(), random)


def train_told_in_compilation(words, at_rank):
    """For ranks.attempt: train.py as a script; while its compiler, another process, runs, their group gets SIGTERM."""
    told = []

    def backend(graph, inputs):
        if not told and os.environ.get("RANK", "0") == str(at_rank):
            told.append(True)
            compiler = subprocess.Popen(["sleep", "1.5"])
            os.killpg(os.getpgid(0), signal.SIGTERM)
            if compiler.wait():
                raise OSError("the compiler was killed")
        return graph.forward

    torch.compile = functools.partial(torch.compile, backend=backend)
    run(train.main, configure(Config, words))


@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.fault(26, 56)
def test_a_signal_in_a_compilation_is_obeyed_after_it(data_dir, tmp_path, number):
    settings = dict(max_steps=3, compile=True)
    words = flags(data_dir, tmp_path / "cut", **settings)
    done, _ = ranks.attempt(number, train_told_in_compilation, words, number - 1 if number else 0)
    assert set(done.codes) == {143} and not error_lines(done), done.stderr
    assert re.search(r"SIGTERM in step 1 .*\n(.*\n)*stopped      step [01] ", done.stdout)
    ranks.attempt(number, train_told_in_compilation, [*words, "--resume=auto"], "none")
    ranks.attempt(number, train_told_in_compilation, flags(data_dir, tmp_path / "whole", **settings), "none")
    assert losses(read_log(tmp_path / "cut")) == losses(read_log(tmp_path / "whole"))


def train_told_in_save(words, times, at_rank):
    """For ranks.attempt: train.py as a script; while step 8 is written, one rank gets SIGTERM once or twice."""
    write, take = checkpoint._write, TokenLoader.next

    def slow(final, contents):
        if final.name == "step_00000008" and os.environ.get("RANK", "0") == str(at_rank):
            tell()
            time.sleep(watch.TWICE + 0.5)
            if times == 2:
                tell()
                time.sleep(60)
        return write(final, contents)

    def next_batch(loader):
        time.sleep(0.01)  # there are steps left when the ranks have agreed
        return take(loader)

    checkpoint._write, TokenLoader.next = slow, next_batch
    run(train.main, configure(Config, words))


@pytest.mark.parametrize(
    "times, number",
    [(1, 0), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow)],
)
@pytest.mark.fault(28, 56)
def test_a_signal_in_an_asynchronous_save_leaves_whole_checkpoints(data_dir, tmp_path, times, number):
    settings = dict(max_steps=100 if number else 20, save_interval=4, async_save=True, keep_last=9)
    words = flags(data_dir, tmp_path / "cut", **settings)
    began = time.monotonic()
    done, _ = ranks.attempt(number, train_told_in_save, words, times, number - 1 if number else 0)
    assert set(done.codes) == {143}, done.stderr
    found = sorted((tmp_path / "cut").glob("step_*"))
    assert [folder for folder in found if checkpoint.problem(folder)] == []
    if times == 2:  # what was being written is not there
        assert time.monotonic() - began < 30 and [folder.name for folder in found] == ["step_00000004"]
    else:  # it is finished, and where the run stopped is saved too
        [stopped] = re.findall(r"stopped      step (\d+) ", done.stdout)
        assert {f"step_{step:08}" for step in (4, 8, int(stopped))} <= {folder.name for folder in found}
        assert int(stopped) < settings["max_steps"] and not list((tmp_path / "cut").glob(".writing*"))
    ranks.run(number, [*words, "--resume=auto"])
    ranks.run(number, flags(data_dir, tmp_path / "whole", **settings))
    assert losses(read_log(tmp_path / "cut")) == losses(read_log(tmp_path / "whole"))


def test_signals_are_the_processs_again_after_a_run(data_dir, tmp_path):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    train_here(data_dir, tmp_path / "run", max_steps=1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.fault(28, 56, 57)
def test_a_second_signal_ends_at_once_and_no_saving_is_said(data_dir, tmp_path):
    began = time.monotonic()
    done = attempt(0, "interrupt twice", 0, 10, data_dir, tmp_path / "a")
    assert done.codes == [130] and time.monotonic() - began < 30
    assert "a second signal" in done.stderr
    done = attempt(0, "term", 0, 10, data_dir, tmp_path / "b", save_interval=0)
    assert done.codes == [143] and "none: nothing was saved (save_interval=0)" in done.stdout


def test_status_says_where_a_run_is(data_dir, tmp_path):
    log = train_here(data_dir, tmp_path / "run", max_steps=4)
    found = json.loads((tmp_path / "run/status.json").read_text())
    assert (
        found["state"] == "done" and found["step"] == found["max_steps"] == 4 and found["pid"] == os.getpid()
    )
    assert found["loss"] == losses(log)[4] and found["last_checkpoint"].endswith("step_00000004")


@pytest.mark.slow  # imports the compiler
@pytest.mark.fault(41)
def test_a_compiler_that_fails_is_one_line(data_dir, tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda f: torch._dynamo.optimize(broken)(f))
    with pytest.raises(
        UserError, match="torch.compile failed .*OSError: no C.. compiler.*; try --compile=False"
    ):
        train_here(data_dir, tmp_path / "run", compile=True)


# -- torchrun: each run imports torch twice


def start_torchrun(words, log, *options):
    """A process group of torchrun and two ranks, for the tests that kill some of them."""
    options = [
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=127.0.0.1:0",
        "--rdzv_id=1",
        *options,
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", *words]
    return subprocess.Popen(command, cwd=ROOT, env=ranks.environment(), stdout=log, stderr=log)


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid):
    return [
        int(p)
        for p in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.fault(60)
def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(data_dir, tmp_path, killed):
    check_restarts(data_dir, tmp_path, {10: killed})


def check_restarts(data_dir, tmp_path, kills, steps=60, **settings):
    """Kills a rank of a run under torchrun at each step of {step: rank}; it ends with every step. -> its output."""
    words = flags(data_dir, tmp_path / "run", max_steps=steps, save_interval=5, resume="auto", **settings)
    with open(tmp_path / "log", "w") as log:
        process = start_torchrun(words, log, "--max-restarts=3")
        for step, rank in kills.items():
            wait_for(lambda step=step: re.search(rf"step +{step}/", (tmp_path / "log").read_text()))
            os.kill(children(process.pid)[rank], signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert len(re.findall("^ *resumed ", text, re.M)) == len(kills), text
    assert sorted(losses(read_log(tmp_path / "run"))) == list(range(1, steps + 1))
    return text


@pytest.mark.slow
@pytest.mark.fault(44, 49, 50)
def test_a_live_run_is_protected_and_its_orphans_leave(data_dir, tmp_path):
    words = flags(data_dir, tmp_path / "run", max_steps=100_000, save_interval=100, log_interval=100)
    with open(tmp_path / "log", "w") as log:
        process = start_torchrun(words, log)
        wait_for(lambda: "saved" in (tmp_path / "log").read_text())
        for how in ("--overwrite", "--resume=auto"):
            done = ranks.run(2, [*words, how])
            assert (
                done.codes == [2, 2] and len(error_lines(done)) == 1 and "is in use by a run" in done.stderr
            )
        orphans = children(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not any(started(pid) is not None for pid in orphans), 5)
    assert "torchrun is gone" in (tmp_path / "log").read_text()
    assert ranks.run(2, [*words, "--resume=auto", "--dry_run"]).returncode == 0
