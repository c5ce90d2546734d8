"""Batches of items, made ahead in threads for training and for fineweb.py; without torch."""

import collections
import concurrent.futures

from corpus import LONG


def prefetched(items):
    """Yields `items`, which a thread makes at most two ahead; raises its exceptions here."""
    items = iter(items)
    end = object()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # one thread makes them in their order
        made = collections.deque(pool.submit(next, items, end) for _ in range(2))
        while (item := made.popleft().result()) is not end:  # waits for it
            made.append(pool.submit(next, items, end))  # while the caller works with the item
            yield item


def batched(items, size_of, most=256, size=LONG):
    """Yields lists of items that follow one another: at most `most`, of `size` together or one."""
    batch = []
    total = 0
    for item in items:
        total += size_of(item)
        if batch and (len(batch) == most or total > size):
            yield batch
            batch = []
            total = size_of(item)
        batch.append(item)
    if batch:
        yield batch
