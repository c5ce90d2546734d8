"""tests/soak.py: its table tells what grows from what fills up."""

import numpy as np
import soak


def judged(memory, dt):
    """[whether each row of the table holds] for 1,000 steps, given as functions of the step."""
    steps = np.arange(1, 1001)
    samples = memory(steps)[::20, None].astype(float)
    log = [dict(kind="train", step=step, dt_ms=ms) for step, ms in zip(steps, dt(steps))]
    return [holds for *_, holds in soak.flat(soak.Config(steps=1000), samples, log)]


def test_what_grows_is_told():
    same = lambda steps: 100 + steps % 7
    growing = lambda share: lambda steps: same(steps) * (1 + share * steps / 1000)
    # a cache, full after a seventh
    filling = lambda steps: same(steps) + 100 * np.minimum(steps, 150)
    assert judged(same, same) == judged(filling, growing(0.05)) == [True, True]
    assert judged(growing(0.05), same) == [False, True]
    assert judged(growing(0.01), growing(0.3)) == [True, False]
