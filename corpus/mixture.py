"""A mixture of folders of shards, data/a:0.7,data/b:0.3: its weights, and the folder of each row of a run."""

import math
import os
import re

from errors import UserError

FINEST = 10_000  # weights are rounded to multiples of 1 / FINEST, and up to the first


def folders(data_dir):
    """[(folder, share)] that `data_dir` names, the shares as integers without a common divisor.

    A colon before a number begins a weight; without any weight the whole text is one folder.
    """
    parts = [part.strip() for part in data_dir.split(",")]
    found = [re.fullmatch(r"(.+):(-?\d*\.?\d+)", part) for part in parts]
    if not any(found) and (len(parts) == 1 or os.path.isdir(data_dir)):
        return [(data_dir, 1)]
    for part, match in zip(parts, found):
        if not match or not 0 < float(match[2]) < math.inf:
            form = "write a mixture as data/a:0.7,data/b:0.3"
            raise UserError(f"data_dir={data_dir}: {part!r} has no weight over 0; {form}")
    weights = {m[1]: sum(float(n[2]) for n in found if n[1] == m[1]) for m in found}  # added by folder
    shares = [max(1, round(FINEST * weight / sum(weights.values()))) for weight in weights.values()]
    return [(name, share // math.gcd(*shares)) for name, share in zip(weights, shares)]


def schedule(shares):
    """(folder, number of its rows before) for each of the first sum(shares) rows; then the order repeats.

    Among the first n rows a folder has its share of n, rounded up or down, since of the folders that may come
    the most urgent one comes first (Liu and Layland, https://doi.org/10.1145/321738.321743).
    """
    period, counts, order = sum(shares), [0] * len(shares), []
    for row in range(period):
        allowed = [k for k, share in enumerate(shares) if counts[k] * period < (row + 1) * share]
        k = min(allowed, key=lambda k: -(-(counts[k] + 1) * period // shares[k]))
        order.append((k, counts[k]))
        counts[k] += 1
    return order
