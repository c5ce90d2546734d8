"""Items that a thread makes ahead: a rank's batches, the texts of fineweb.py; without torch."""

import collections
import concurrent.futures


def prefetched(items, depth):
    """Yields `items`, which a thread makes at most `depth` ahead; raises its exceptions here."""
    items = iter(items)
    end = object()
    pool = concurrent.futures.ThreadPoolExecutor(1)  # one thread makes them in their order
    try:
        made = collections.deque(pool.submit(next, items, end) for _ in range(depth))
        while True:
            item = made.popleft().result()  # waits for it
            if item is end:
                return
            made.append(pool.submit(next, items, end))  # while the caller works with the item
            yield item
    finally:
        pool.shutdown(cancel_futures=True)  # and wait for the item under way, which may read files
