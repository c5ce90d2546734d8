"""tests/attack.py: a seeded few of its attacks."""

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
