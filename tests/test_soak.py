"""tests/soak.py: a short form of it whole, and that its table tells what grows from what fills up."""

import numpy as np
import pytest
import soak


def judged(memory, dt, cpu):
    """{row of the table: whether it holds} of a run of 1,000 steps, each given as a function of the step."""
    steps = np.arange(1, 1001)
    samples = np.stack([steps, np.cumsum(cpu(steps)) / 1e3, memory(steps)], 1)[::20].astype(float)
    log = {"train": {int(step): {"dt_ms": float(ms)} for step, ms in zip(steps, dt(steps))}}
    return {
        what.split(",")[0]: holds for what, _, _, holds in soak.flat(soak.Config(steps=1000), samples, log)
    }


def test_what_grows_is_told():
    same = lambda steps: 100 + steps % 7
    growing = lambda share: lambda steps: same(steps) * (1 + share * steps / 1000)
    filling = lambda steps: (
        same(steps) + 100 * np.minimum(steps, 150)
    )  # a cache, full after a seventh of the run
    names = ["memory of rank 0", "step time", "CPU time a step"]
    assert judged(same, same, same) == judged(filling, same, same) == dict.fromkeys(names, True)
    assert judged(growing(0.05), same, same) == {names[0]: False, names[1]: True, names[2]: True}
    assert judged(growing(0.01), growing(0.3), same) == {names[0]: True, names[1]: False, names[2]: True}
    assert judged(same, growing(0.05), growing(0.3)) == {names[0]: True, names[1]: True, names[2]: False}


@pytest.mark.slow
def test_a_hundred_steps(tmp_path, capsys):
    """What is to be done is done; how memory and time develop takes more steps to see."""
    soak.main(soak.Config(steps=100, out_dir=str(tmp_path), picture=str(tmp_path / "soak.png"), every_s=0.1))
    table = capsys.readouterr().out
    assert all(f"{row}, " in table for row in ("memory of rank 1", "step time", "CPU time a step"))
    first = table.splitlines()[:3]
    assert all(line.endswith("holds") for line in first) and "100 21 21 21" in first[1]
    assert (tmp_path / "soak.png").stat().st_size > 10_000
