"""A mixture of folders of shards, data/a:0.7,data/b:0.3: weights, and the folder of each row."""

import math
import os
import re

from system.errors import UserError

FINEST = 10_000  # weights are rounded to multiples of 1 / FINEST of the whole


def folders(data_dir):
    """[(folder, weight)] that `data_dir` names, the weights as integers without a common divisor.

    What exists as it is written is a folder; else a colon before a number begins a weight. Raises
    UserError.
    """
    parts = [part.strip() for part in data_dir.split(",")]
    if os.path.isdir(data_dir) or (len(parts) == 1 and not weighted(data_dir)):
        return [(data_dir, 1)]
    given = {}
    for part in parts:
        folder, weight = weighted(part) or (part, 0)
        given[folder] = given.get(folder, 0) + weight
    whole = sum(given.values())
    weights = []
    for folder, weight in given.items():
        if weight <= 0 or FINEST * weight < whole:
            raise UserError(
                f"data_dir={data_dir}: {folder!r} has the weight {weight:g}, expected at least "
                f"1/{FINEST} of all; write a mixture as data/a:0.7,data/b:0.3"
            )
        weights.append(round(FINEST * weight / whole))
    divisor = math.gcd(*weights)
    return [(folder, weight // divisor) for folder, weight in zip(given, weights)]


def weighted(part):
    """(folder, weight) of FOLDER:NUMBER, None if it is something else or a folder's own name."""
    found = re.fullmatch(r"(.+):(-?\d*\.?\d+(?:e[+-]?\d+)?)", part, re.IGNORECASE)
    if not found or os.path.isdir(part):
        return None
    return found[1], float(found[2])


def turns(weights):
    """(folder, its rows before) for each row of a period of sum(weights) rows, which then repeats.

    Among the first n rows a folder has its share of n, rounded up or down, since of the folders
    that may come the most urgent one comes first (Liu and Layland, https://doi.org/10.1145/321738.321743).
    """
    period = sum(weights)
    rows_before = [0] * len(weights)
    order = []
    for row in range(period):
        deadlines = {}  # by folder: the row before which its next one must come
        for folder, weight in enumerate(weights):
            if rows_before[folder] * period < (row + 1) * weight:  # else it is ahead of its share
                deadlines[folder] = -(-(rows_before[folder] + 1) * period // weight)
        folder = min(deadlines, key=deadlines.get)
        order.append((folder, rows_before[folder]))
        rows_before[folder] += 1
    return order
