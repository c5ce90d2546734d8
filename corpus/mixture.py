"""A mixture of folders of shards, data/a:0.7,data/b:0.3: weights, and the folder of each row."""

import math
import os
import re

from system.errors import UserError

FINEST = 10_000  # weights are rounded to multiples of 1 / FINEST, and up to the first


def folders(data_dir):
    """[(folder, weight)] that `data_dir` names, the weights as integers without a common divisor.

    A colon before a number begins a weight; without any weight the whole text is one folder.
    """
    parts = [part.strip() for part in data_dir.split(",")]
    matches = [re.fullmatch(r"(.+):(-?\d*\.?\d+)", part) for part in parts]
    if not any(matches) and (len(parts) == 1 or os.path.isdir(data_dir)):
        return [(data_dir, 1)]
    given = {}
    for part, match in zip(parts, matches):
        if not match or float(match[2]) <= 0:
            raise UserError(
                f"data_dir={data_dir}: {part!r} has no weight over 0; "
                "write a mixture as data/a:0.7,data/b:0.3"
            )
        folder, weight = match.groups()
        given[folder] = given.get(folder, 0) + float(weight)
    whole = sum(given.values())
    weights = [max(1, round(FINEST * weight / whole)) for weight in given.values()]
    divisor = math.gcd(*weights)
    return [(folder, weight // divisor) for folder, weight in zip(given, weights)]


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
