"""tests/attack.py: a seeded few of its attacks, and that it tells what does not hold."""

import random
from collections import Counter

import attack
import pytest


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return attack.Bench(tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    "kind", [attack.kill, attack.change_folder, attack.change_data, attack.differ]
)
@pytest.mark.fault(21, 54, 87, 89, 90)
def test_a_few_attacks(bench, kind, number):
    with bench.folder() as place:
        assert kind(bench, place, random.Random(f"{kind.__name__} {number}"), Counter()) > 0


def test_what_does_not_hold_is_told(bench, tmp_path):
    bench.stop(0, tmp_path / "run")
    done = bench.run(0, bench.words(tmp_path / "run", lr=0.5))
    with pytest.raises(attack.Failure, match="accepted and has other losses"):
        attack.verdict(bench, 0, done, tmp_path / "run", Counter())
    with pytest.raises(attack.Failure, match=r"it resumed from \[6\], although 7 was saved"):
        attack.check_resumed(done, 7)
