"""Batches of items, made ahead in threads for training and for fineweb.py; without torch."""

import collections
import concurrent.futures

from corpus import LONG


def prefetched(items):
    """Yields `items`, which a thread makes at most two ahead; raises its exceptions here."""
    items = iter(items)
    end = object()
    pool = concurrent.futures.ThreadPoolExecutor(1)  # one thread makes them in their order
    try:
        made = collections.deque(pool.submit(next, items, end) for _ in range(2))
        while True:
            item = made.popleft().result()  # waits for it
            if item is end:
                return
            made.append(pool.submit(next, items, end))  # while the caller works with the item
            yield item
    finally:
        pool.shutdown(cancel_futures=True)  # and wait for the item under way, which may read files


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
