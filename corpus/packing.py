"""Reorders documents for fineweb.py --pack, so that few of them cross a multiple of block_size tokens.

Best fit as in https://arxiv.org/abs/2404.10830, but within a bounded buffer and without padding: a document
that crosses the end of a group of `size` tokens goes on in the next group.
"""

from configurator import UserError

DOCUMENTS, TOKENS = 1000, 1 << 24  # bounds of the buffer: documents, and their tokens together (67 MB)
SPARE = 32  # documents of average length that fit the end of a group, which is filled exactly


class Packer:
    """Iterates over `rows`, pairs of a document's number (ascending) and its tokens, in packed order.

    To resume from a `position`, pass its `done` and `order`, and `rows` from `first` on.
    """

    def __init__(self, rows, size, done=0, order=()):
        self.rows, self.size, self.room, self.done = rows, size, size, done  # room: tokens left in the group
        self.cut, self.written = next(iter(order), None), set(order[1:])  # the one to continue; written ones
        self.waiting, self.total, self.read = {}, 0, 0  # {number: tokens} in order; their sum; next number

    def __iter__(self):
        if self.cut is not None:
            while self.cut not in self.waiting:
                if not self._read():
                    raise UserError(f"document {self.cut + 1}, which a shard cuts, is gone from the source")
            yield self._take(self.cut, self.done)
        while True:
            while len(self.waiting) < DOCUMENTS and self.total < TOKENS and self._read():
                pass
            if not self.waiting:
                return
            for number in self._choose():
                yield self._take(number)

    def _read(self):
        """Adds the next document to the waiting ones; False if there is none."""
        number, row = next(self.rows, (None, None))
        if row is None:
            return False
        self.read = number + 1
        if number not in self.written:
            self.waiting[number] = row
            self.total += len(row)
        return True

    def _take(self, number, done=0):
        row = self.waiting.pop(number)
        self.total -= len(row)
        self.written.add(number)
        self.room = (self.room - len(row) + done - 1) % self.size + 1
        return number, row

    def _choose(self):
        """Numbers of the documents to write next: one, or all that end the group."""
        if self.room == self.size:  # the one that has waited longest
            return [next(iter(self.waiting))]
        spare = SPARE * self.total // len(self.waiting)
        for number, row in self.waiting.items():
            if len(row) <= self.room - spare:
                return [number]
        chosen, left = self._fill()
        if left and len(chosen) < len(self.waiting):
            chosen.append(max(self.waiting.keys() - set(chosen), key=lambda n: (len(self.waiting[n]), -n)))
        return chosen

    def _fill(self):
        """(numbers of the documents that fill the room best, tokens of room that they leave)."""
        chosen, steps, within = [], [], (2 << self.room) - 1
        sums = 1  # bit n is set if some documents have n tokens together
        for number, row in self.waiting.items():
            if len(row) <= self.room and not sums >> self.room:  # not yet filled exactly
                steps.append((number, len(row), sums))
                sums |= sums << len(row) & within
        full = at = sums.bit_length() - 1
        for number, length, before in reversed(steps):
            if not before >> at & 1:  # this sum needs the document
                chosen.append(number)
                at -= length
        return chosen, self.room - full

    def position(self, number, done):
        """(first, done, order) to resume from after document `number`, cut after `done` tokens (0: whole)."""
        first = min(next(iter(self.waiting), self.read), number if done else self.read)
        self.written = {n for n in self.written if n > first}
        order = [number, *sorted(self.written - {number})] if done else [None, *sorted(self.written)]
        return first, done, order
