"""tests/soak.py: a whole short run, and that its table tells what grows from what fills up."""

import numpy as np
import pytest
import soak


def judged(memory, dt):
    """[whether each row of the table holds] for 1,000 steps, given as functions of the step."""
    steps = np.arange(1, 1001)
    samples = np.stack([steps, memory(steps)], 1)[::20].astype(float)
    log = [
        dict(kind="train", step=int(step), dt_ms=float(ms)) for step, ms in zip(steps, dt(steps))
    ]
    return [holds for *_, holds in soak.flat(soak.Config(steps=1000), samples, log)]


def test_what_grows_is_told():
    same = lambda steps: 100 + steps % 7
    growing = lambda share: lambda steps: same(steps) * (1 + share * steps / 1000)
    # a cache, full after a seventh
    filling = lambda steps: same(steps) + 100 * np.minimum(steps, 150)
    assert judged(same, same) == judged(filling, growing(0.05)) == [True, True]
    assert judged(growing(0.05), same) == [False, True]
    assert judged(growing(0.01), growing(0.3)) == [True, False]


@pytest.mark.repeated
@pytest.mark.slow
def test_a_hundred_steps(tmp_path, capsys):
    """All that was to be done is done; how memory and step time develop takes more steps to see."""
    soak.main(soak.Config(steps=100, out_dir=str(tmp_path), every_s=0.1))
    table = capsys.readouterr().out
    assert "memory of rank 1 " in table and "step time" in table
    lines = [line for line in table.splitlines() if line.startswith(("lines: ", "checkpoints "))]
    assert len(lines) == 2 and all(line.endswith("holds") for line in lines), table
