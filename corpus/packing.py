"""Reorders documents for fineweb.py --pack, so that few cross a multiple of block_size tokens.

Best fit as in https://arxiv.org/abs/2404.10830, but within blocks and without padding: a document
that is cut at the end of a group of `size` tokens goes on in the next group.
"""

import numpy as np

DOCUMENTS, TOKENS = 2000, 1 << 24  # bounds of a block: documents, and their tokens together (67 MB)


def packed(documents, size, at):
    """Yields (number of its first document, tokens in packed order) of blocks of `documents`.

    documents: (number, tokens) of each; at: tokens that precede them.
    """
    for block in blocks(documents):
        numbers, rows = zip(*block)
        row = np.concatenate([rows[i] for i in order([*map(len, rows)], size, size - at % size)])
        yield numbers[0], row
        at += len(row)


def blocks(documents):
    """Yields lists of documents that follow one another."""
    block, total = [], 0
    for document in documents:
        block.append(document)
        total += len(document[-1])
        if len(block) == DOCUMENTS or total >= TOKENS:
            yield block
            block, total = [], 0
    if block:
        yield block


def order(lengths, size, room):
    """Yields the indices of documents of these lengths in packed order.

    room: tokens left in the group.
    """
    waiting = dict(enumerate(lengths))
    while waiting:
        i = next(iter(waiting))  # one that is longer than a group is cut wherever it begins
        found, left = ([i], 0) if waiting[i] > size == room else fill(waiting, room)
        if left and len(found) < len(waiting):
            found.append(max(waiting.keys() - set(found), key=lambda i: (waiting[i], -i)))
        for i in found:
            room = (room - waiting.pop(i) - 1) % size + 1
            yield i


def fill(waiting, room):
    """(the documents that fill the room best, tokens of room that they leave)."""
    found, steps, within = [], [], (2 << room) - 1
    sums = 1  # bit n is set if some documents have n tokens together
    for i, length in waiting.items():
        if length <= room:
            steps.append((i, length, sums))
            sums |= sums << length & within
            if sums >> room:
                break
    full = at = sums.bit_length() - 1
    for i, length, before in reversed(steps):
        if not before >> at & 1:  # this sum needs the document
            found.append(i)
            at -= length
    return found, room - full
