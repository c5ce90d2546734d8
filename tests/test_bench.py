"""bench.py as a person runs it, on the CPU."""

import re

from conftest import train_ranks


def bench(*words, ranks=0):
    return train_ranks(ranks, words, script="bench.py")


def test_step_is_timed_over_two_ranks():
    done = bench("step", "config/test.py", "--device=cpu", "--steps=3", "--settle=1", "--vocab_size=257", ranks=2)
    assert done.returncode == 0, done.stderr
    line = re.search(r"^step +([\d.]+) ms, median of 3 .* ([\d,]+) tokens/s, MFU n/a$", done.stdout, re.MULTILINE)
    assert line, done.stdout
    assert "first step" in done.stdout


def test_step_of_a_sharded_model_with_sequences_over_two_ranks():
    words = ["--device=cpu", "--steps=2", "--settle=1", "--vocab_size=257", "--parallel=fsdp", "--context_parallel=2"]
    done = bench("step", "config/test.py", *words, ranks=2)
    assert done.returncode == 0 and "median of 2" in done.stdout, done.stderr


def test_collectives_over_two_ranks():
    done = bench("comm", "--device=cpu", "--max_mib=1", ranks=2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1 .*\d+\.\d \( +\d+\)", done.stdout, re.MULTILINE), done.stdout


def test_mistakes_are_one_line():
    for words, expected in [
        (["steps"], "error: bench.py steps: expected one of step, ops, comm"),
        (["ops"], "error: bench.py ops needs an NVIDIA GPU"),
        (["comm"], "error: bench.py comm needs several ranks"),
        (["step", "--stepss=3"], "unknown setting --stepss; did you mean steps?"),
        (["step", "config/test.py", "--precision=fp8", "--device=cpu"], "error: precision=fp8 needs a CUDA device"),
    ]:
        done = bench(*words)
        assert done.returncode != 0 and expected in done.stderr and "Traceback" not in done.stderr, done.stderr
