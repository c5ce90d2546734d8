"""Reorders documents for fineweb.py --pack, so that few cross a multiple of block_size tokens.

Best fit as in https://arxiv.org/abs/2404.10830, but within blocks and without padding: a document
that is cut at the end of a group of `size` tokens goes on in the next group.
"""

import numpy as np

from corpus.prefetch import batched

DOCUMENTS, TOKENS = 2000, 1 << 24  # bounds of a block: documents, and their tokens together (67 MB)


def packed(documents, size, at):
    """Yields (number of its first document, tokens in packed order) of blocks of `documents`.

    documents: (number, tokens) of each; at: tokens that precede them.
    """
    for block in batched(documents, lambda one: len(one[1]), DOCUMENTS, TOKENS):
        numbers, rows = zip(*block)
        order = packed_order([len(row) for row in rows], size, room=size - at % size)
        tokens = np.concatenate([rows[i] for i in order])
        yield numbers[0], tokens
        at += len(tokens)


def packed_order(lengths, size, room):
    """Yields the indices of documents of these lengths in packed order.

    room: tokens left in the group.
    """
    waiting = dict(enumerate(lengths))
    while waiting:
        first = next(iter(waiting))
        if waiting[first] > size and room == size:
            chosen = [first]  # longer than a group, it is cut wherever it begins
        else:
            chosen = fill(waiting, room)
            others = waiting.keys() - set(chosen)
            if others and sum(waiting[i] for i in chosen) < room:
                # the longest one, of several the first, is cut at the end of the group
                chosen.append(max(others, key=lambda i: (waiting[i], -i)))
        for i in chosen:
            room = (room - waiting.pop(i) - 1) % size + 1
            yield i


def fill(waiting, room):
    """Indices of those documents of `waiting`, {index: length}, that fill the room best.

    A subset sum: bit n of an integer is set if some documents have n tokens together.
    """
    up_to_room = (2 << room) - 1
    sums = 1  # of no document
    steps = []  # (index, length, sums without it) of each document that fits
    for i, length in waiting.items():
        if length <= room:
            steps.append((i, length, sums))
            sums |= (sums << length) & up_to_room
            if sums >> room:  # the room can be filled
                break
    total = sums.bit_length() - 1  # the largest sum
    chosen = []
    for i, length, before in reversed(steps):
        if not before >> total & 1:  # this sum needs the document
            chosen.append(i)
            total -= length
    return chosen
