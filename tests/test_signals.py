"""run/signals.py: a rank's fault is heard, ends all ranks, and leaves a checkpoint to resume."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import saved
import torch
from compare import repeated, slow
from conftest import ROOT, flags, losses, read_log, tell

import train
from configurator import configure, run
from corpus.loader import TokenLoader
from model import GPT
from run import evaluate, signals
from run.checkpoint import folders, read_best, step_of
from settings import Config


def train_with_fault(words, fault, at_rank, at_call):
    """For ranks.attempt: train.py with a fault in one rank's at_call-th batch or forward."""
    place = (GPT, "forward") if fault == "forward" else (TokenLoader, "next")
    function, count = getattr(*place), []

    @functools.wraps(function)
    def next_batch(*arguments, **options):
        count.append(1)
        if len(count) == at_call and os.environ.get("RANK", "0") == str(at_rank):
            FAULTS[fault]()
        return function(*arguments, **options)

    setattr(*place, next_batch)
    if not torch.cuda.is_available():
        torch.cuda.mem_get_info = lambda device: (0, 24 * 2**30)
    run(train.main, configure(Config, words))


def mistake(kind=RuntimeError):
    raise kind("in an edit that uses gloo or NCCL")


def signalled_twice():
    tell(signal.SIGINT)
    time.sleep(1.5)
    tell(signal.SIGINT)
    time.sleep(1e9)


FAULTS = {
    "memory": lambda: mistake(torch.OutOfMemoryError),
    "mistake": mistake,
    "forward": mistake,
    "full": lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda"),
    "leaves": lambda: sys.exit(0),
    "exits": lambda: os._exit(7),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(1e9),
    "interrupt twice": signalled_twice,
} | {number.name: functools.partial(tell, number) for number in signals.SIGNALS}


def attempt(number, fault, rank, call, data_dir, out_dir, grace=20, timeout=90, **settings):
    words = flags(data_dir, out_dir, **{"max_steps": 40, "save_interval": 4, **settings})
    return ranks.attempt(
        number, train_with_fault, words, fault, rank, call, timeout=timeout, grace=grace
    )[0]


def error_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


def check_told(done, code, line):
    """Checks that rank 1 ended with its code, rank 0 too, and that one line tells it, or none."""
    assert done.codes[1] == code and done.codes[0] not in (0, None), (done.codes, done.stderr)
    found = error_lines(done)
    assert len(found) == (line is not None) and all(re.match(line, one) for one in found), found


@pytest.mark.parametrize("fault, code, line", [
    ("memory", 2, "error: rank 1: out of memory: "),
    slow("mistake", 1, "error: rank 1: Traceback"),
    slow("forward", 1, "error: rank 1: Traceback"),
    slow("leaves", 1, "error: rank 1: Traceback"),
    slow("dies", -9, None),  # of which torchrun's report tells
    slow("hangs", -9, r"error: lost another rank: .*Timed out"),
])  # fmt: skip
@pytest.mark.fault(29, 30)
def test_a_fault_of_one_rank_is_told_once_and_ends_all(data_dir, tmp_path, fault, code, line):
    # the first forward is that on meta
    at_call, limit = 2 if fault == "forward" else 6, 6 if fault == "hangs" else 60
    done = attempt(2, fault, 1, at_call, data_dir, tmp_path / "run", grace=3, timeout_s=limit)
    check_told(done, code, line)
    assert fault != "mistake" or "in next_batch" in done.errors[1] and not done.errors[0]


@pytest.mark.parametrize("number, name", [(2, "SIGINT"), (0, "SIGHUP"), slow(0, "SIGUSR1")])
@pytest.mark.fault(26)
def test_a_signal_is_obeyed_after_the_step_and_the_resumed_run_is_the_same(
    data_dir, tmp_path, number, name
):
    settings = dict(max_steps=4, batch_size=1, dropout=0.1, shuffle_seed=1, save_interval=9)
    call = 512 // 32 // max(1, number) + 3  # in the second step
    code = 128 + getattr(signal, name)
    done = attempt(number, name, max(0, number - 1), call, data_dir, tmp_path / "cut", **settings)
    found = done.codes, done.stderr
    assert set(done.codes) == {code} and "stopped      step 2" in done.stdout, found
    assert sorted(losses(read_log(tmp_path / "cut"))) == [1, 2]
    ranks.run(number, flags(data_dir, tmp_path / "cut", resume="auto", **settings))
    ranks.run(number, flags(data_dir, tmp_path / "whole", **settings))
    assert losses(read_log(tmp_path / "cut")) == losses(read_log(tmp_path / "whole"))


def train_told_in_evaluation(words, part, at_rank):
    """For ranks.attempt: train.py; a rank gets SIGTERM before step 4's first evaluation batch."""
    add = evaluate.Evaluations.add

    def added(evaluations, name, interval, function, *more, **named):
        def told(model):
            if evaluations.training.state.step == 4 and os.environ.get("RANK", "0") == str(at_rank):
                tell()
            return function(model)

        return add(evaluations, name, interval, told if name == part else function, *more, **named)

    evaluate.Evaluations.add = added
    run(train.main, configure(Config, words))


@pytest.mark.parametrize("part, number", [("val", 0), slow("hellaswag", 2)])
@pytest.mark.fault(27)
def test_a_signal_in_an_evaluation_leaves_it_for_the_resumed_run(data_dir, tmp_path, part, number):
    own = dict(endings=["odd", "even", "red", "big"])
    examples = [own | dict(ctx=f"{i} is", label=i % 4) for i in range(24)]
    (tmp_path / "hellaswag").write_text("\n".join(map(json.dumps, examples)))
    settings = dict(max_steps=6, eval_interval=4, save_interval=4, hellaswag_interval=4)
    words = flags(data_dir, tmp_path / "cut", hellaswag_file=tmp_path / "hellaswag", **settings)
    done, _ = ranks.attempt(number, train_told_in_evaluation, words, part, max(0, number - 1))
    assert set(done.codes) == {143}, done.stderr
    cut = read_log(tmp_path / "cut")
    assert sorted(losses(cut, "val")) == ([0] if part == "val" else [0, 4])
    assert [line["step"] for line in cut if line["kind"] == "hellaswag"] == [0]
    assert read_best(tmp_path / "cut").get("evaluated") != 4
    ranks.run(number, [*words, "--resume=auto"])
    cut = read_log(tmp_path / "cut")
    best = min((4, 6), key=losses(cut, "val").get)
    assert read_best(tmp_path / "cut")["step"] == best
    words[2] = f"--out_dir={tmp_path / 'whole'}"
    ranks.run(number, words)
    whole = read_log(tmp_path / "whole")
    assert losses(cut, "val") == losses(whole, "val") and losses(cut) == losses(whole)
    scores = [
        {s["step"]: s["acc_norm"] for s in log if s["kind"] == "hellaswag"} for log in (cut, whole)
    ]
    assert scores[0] == scores[1] and sorted(scores[0]) == [0, 4, 6]


def train_told_in_save(words, times):
    """For ranks.attempt: train.py as a script gets SIGTERM once or twice as it writes step 8."""
    told = []

    def slowly(path):
        if "step_00000008" in str(path) and not told:
            told.append(path)
            tell()
            time.sleep(signals.TWICE + 0.5)
            if times == 2:
                tell()
                time.sleep(1e9)

    saved.while_writing(before=slowly)
    run(train.main, configure(Config, words))


@pytest.mark.parametrize("times", [1, slow(2)])
@pytest.mark.fault(28)
def test_a_signal_in_an_asynchronous_save_leaves_whole_checkpoints(data_dir, tmp_path, times):
    settings = dict(max_steps=10_000, save_interval=4, async_save=True, keep_last=9)
    words = flags(data_dir, tmp_path, **settings)
    done, _ = ranks.attempt(0, train_told_in_save, words, times, timeout=50)
    assert done.codes == [143], done.stderr
    assert not any(map(saved.problem, tmp_path.glob("step_*")))
    found = [step_of(folder) for folder in folders(tmp_path)]
    if times == 2:  # what was being written is not there
        assert found == [4]
    else:  # it is finished, and where the run stopped is saved too
        [stopped] = re.findall(r"stopped      step (\d+) ", done.stdout)
        assert {4, 8, int(stopped)} <= {*found} and not list(tmp_path.glob(".writing*"))


@pytest.mark.fault(28)
def test_a_second_signal_ends_at_once(data_dir, tmp_path):
    done = attempt(0, "interrupt twice", 0, 10, data_dir, tmp_path, timeout=50)
    assert done.codes == [130] and not folders(tmp_path), done.stderr


def start_torchrun(words, log, *options):
    """Starts torchrun with two ranks, which writes into `log`, for tests that kill some of them."""
    meet = "--nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:0 --rdzv_id=1".split()
    command = [sys.executable, "-m", "torch.distributed.run", *meet, *options, "train.py", *words]
    with open(log, "w") as file:
        options = dict(cwd=ROOT, env=ranks.environment(), stdout=file, stderr=file)
        return subprocess.Popen(command, **options)


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid):
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def alive(pid):
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # between open and read
        return False


def kill_and_see_orphans_leave(torchrun, seconds):
    orphans = children(torchrun.pid)
    torchrun.kill()
    torchrun.wait()
    wait_for(lambda: not any(map(alive, orphans)), seconds)


@pytest.mark.parametrize("time", [slow(0), *map(repeated, range(1, 20))])
@pytest.mark.fault(60)
def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(data_dir, tmp_path, time):
    check_restarts(data_dir, tmp_path, {10: time % 2})


def check_restarts(data_dir, tmp_path, kills, steps=60, **settings):
    """Kills a rank under torchrun at each step of {step: rank}; the run ends with every step."""
    settings |= dict(max_steps=steps, save_interval=5, resume="auto")
    words = flags(data_dir, tmp_path / "run", **settings)
    process = start_torchrun(words, tmp_path / "log", "--max-restarts=3")
    text = (tmp_path / "log").read_text
    for step, rank in kills.items():
        wait_for(lambda step=step: re.search(rf"step +{step} ", text()))
        os.kill(children(process.pid)[rank], signal.SIGKILL)
    assert process.wait(300) == 0, text()
    assert len(re.findall("^ *resumed ", text(), re.M)) == len(kills), text()
    assert sorted(losses(read_log(tmp_path / "run"))) == list(range(1, steps + 1))


@pytest.mark.parametrize("seconds", [slow(0), *(repeated(s / 2) for s in range(2, 24))])
@pytest.mark.fault(49)
def test_ranks_leave_when_torchrun_is_killed(data_dir, tmp_path, seconds):
    """So long after they look: in the imports, in the rendezvous, while they train."""
    process = start_torchrun(flags(data_dir, tmp_path / "run", max_steps=10**6), tmp_path / "log")
    threads = lambda pid: len(list(Path(f"/proc/{pid}/task").iterdir()))
    wait_for(lambda: len([pid for pid in children(process.pid) if threads(pid) > 1]) == 2)
    time.sleep(seconds)
    kill_and_see_orphans_leave(process, 10)


@pytest.mark.slow
@pytest.mark.fault(44, 49)
def test_a_live_run_is_protected_and_its_orphans_leave(data_dir, tmp_path):
    settings = dict(max_steps=100_000, save_interval=100, log_interval=100)
    words = flags(data_dir, tmp_path / "run", **settings)
    process = start_torchrun(words, tmp_path / "log")
    wait_for(lambda: "saved" in (tmp_path / "log").read_text())
    for how in ("--overwrite", "--resume=auto"):
        done = ranks.run(2, [*words, how])
        assert 2 in done.codes and len(error_lines(done)) == 1, done.stderr
        assert "is in use by another run" in done.stderr
    kill_and_see_orphans_leave(process, 5)
    assert ranks.run(2, [*words, "--resume=auto", "--dry_run"]).returncode == 0
