"""packing.py: every document once, few of them cut, and an order that resumes from the end of any group."""

import itertools
import json

import numpy as np
import pytest

from corpus import packing

KINDS = {
    "articles": lambda rng: rng.lognormal(6, 1.1, 4000),
    "longer than a group": lambda rng: rng.lognormal(7.5, 1.5, 1500),
    "all alike": lambda rng: np.full(3000, 300),
    "all longer": lambda rng: rng.integers(2050, 9000, 500),
    "few": lambda rng: rng.integers(2, 900, 3),
    "tiny": lambda rng: rng.integers(2, 5, 9000),
}
SIZE = 2048


def source(kind):
    lengths = np.maximum(2, KINDS[kind](np.random.default_rng(0)).astype(int))
    numbers = np.cumsum(np.random.default_rng(1).integers(1, 3, len(lengths)))  # some are empty and left out
    return [(int(number), range(length)) for number, length in zip(numbers, lengths)]


def cut(rows):
    """Number of documents that cross a multiple of SIZE, counted one by one."""
    at = found = 0
    for _, row in rows:
        found += at // SIZE != (at + len(row) - 1) // SIZE
        at += len(row)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_once(kind):
    rows = source(kind)
    packed = list(packing.Packer(iter(rows), SIZE))
    assert sorted(packed, key=lambda pair: pair[0]) == rows
    assert packed == list(packing.Packer(iter(rows), SIZE))


def test_hardly_any_is_cut_that_would_fit():
    for kind in ("articles", "longer than a group", "tiny"):
        rows = source(kind)
        longer = sum(len(row) > SIZE for _, row in rows)
        packed, plain = cut(packing.Packer(iter(rows), SIZE)) - longer, cut(rows) - longer
        assert packed <= 0.01 * plain, kind
    rows = source("all alike")  # 6 of 300 to a group and a seventh cut, whatever the order
    assert cut(packing.Packer(iter(rows), SIZE)) == cut(rows)


def test_waits_in_a_bounded_buffer():
    rows = source("articles")
    packer = packing.Packer(iter(rows), SIZE)
    most = max(len(packer.waiting) for _ in packer)
    assert packer.total == len(packer.waiting) == 0 and most == packing.DOCUMENTS - 1


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_from_the_end_of_any_group(kind):
    """A run that resumes from a position kept as JSON gives the rest of the first run's order."""
    rows = source(kind)
    packer = packing.Packer(iter(rows), SIZE)
    stream, at, positions = [], 0, {}
    for number, row in packer:
        for end in range(SIZE - at % SIZE, len(row) + 1, SIZE):  # ends of groups in this document or with it
            done = end if end < len(row) else 0
            if len(positions) < 5 or (at + end) // SIZE % 97 == 0:
                positions[len(stream) + (not done)] = json.dumps(packer.position(number, done))
        stream.append(number)
        at += len(row)
    assert positions or at < SIZE
    for count, position in positions.items():
        first, done, order = json.loads(position)
        left = itertools.dropwhile(lambda pair, first=first: pair[0] < first, rows)
        again = packing.Packer(left, SIZE, done, order)
        assert [number for number, _ in again] == stream[count:]
