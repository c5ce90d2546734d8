"""packing.py: every document once, few of them cut, and an order that resumes from any block."""

import numpy as np
import pytest

from corpus import packing

KINDS = {
    "articles": lambda rng: rng.lognormal(6, 1.1, 3000),
    "longer than a group": lambda rng: rng.lognormal(7.5, 1.5, 900),
    "all alike": lambda rng: np.full(3000, 300),
    "all longer": lambda rng: rng.integers(2050, 9000, 500),
    "few": lambda rng: rng.integers(2, 900, 3),
    "tiny": lambda rng: rng.integers(2, 5, 9000),
}
SIZE = 2048


def source(kind):
    lengths = np.maximum(2, KINDS[kind](np.random.default_rng(0)).astype(int))
    # some are empty and left out
    numbers = np.cumsum(np.random.default_rng(1).integers(1, 3, len(lengths)))
    return [(int(number), np.full(length, number)) for number, length in zip(numbers, lengths)]


def cut(tokens):
    """How many documents, each its number over and over, cross a multiple of SIZE."""
    ends = np.append(np.flatnonzero(np.diff(tokens)) + 1, len(tokens))
    return np.count_nonzero(np.append(0, ends[:-1]) // SIZE != (ends - 1) // SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_once_in_bounded_blocks_from_any_of_which_it_resumes(kind):
    rows = source(kind)
    whole, at, most = list(packing.packed(rows, SIZE, 5)), 5, packing.DOCUMENTS
    tokens = np.concatenate([block for _, block in whole])
    found, counts = np.unique(tokens, return_counts=True)
    assert [*zip(found, counts)] == [(number, len(row)) for number, row in rows]
    assert np.count_nonzero(np.diff(tokens)) == len(rows) - 1, "each in one piece"
    assert all(len(np.unique(block)) <= most for _, block in whole)
    plain = np.concatenate([np.zeros(5), *(row for _, row in rows)])
    packed, longer = np.append(np.zeros(5), tokens), sum(len(row) > SIZE for _, row in rows)
    if kind == "all alike":  # 6 of 300 to a group and a seventh cut, whatever the order
        assert cut(packed) == cut(plain)
    elif kind in ("articles", "longer than a group", "tiny"):
        assert cut(packed) - longer <= 0.01 * (cut(plain) - longer)
    for i, (first, block) in enumerate(whole):
        left = ((number, row) for number, row in rows if number >= first)
        again = list(packing.packed(left, SIZE, at))
        assert [number for number, _ in again] == [number for number, _ in whole[i:]]
        assert np.array_equal(np.concatenate([b for _, b in again]), tokens[at - 5 :])
        at += len(block)
