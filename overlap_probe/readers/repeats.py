"""Finds rows that a file holds twice, as one does that was put together from overlapping ones.

The idea: two rows that are alike in everything, times and thread or stream included, are one event, because a thread or
a stream does one thing at a time (and a range in its like of the same times tells nothing new). Only rows that share
their times are candidates; in a sound file few do, so that sorting all columns of these costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from overlap_probe.tables import I64, Bool


def first_of_alike(start_ns: I64, end_ns: I64, others: Iterable[I64]) -> Bool:
    """Mask of the rows that no earlier row equals in every column."""
    order = np.argsort(start_ns, kind="stable")
    tied = start_ns[order[1:]] == start_ns[order[:-1]]
    candidates = np.concatenate((tied, [False])) | np.concatenate(([False], tied))
    rows = order[candidates[: len(order)]]
    columns = [column[rows] for column in (*others, end_ns, start_ns)]
    order = np.lexsort(columns)  # stable: of rows that are alike the earliest comes first
    alike = np.ones(max(len(rows) - 1, 0), np.bool_)
    for column in columns:
        alike &= column[order[1:]] == column[order[:-1]]
    first = np.ones(len(start_ns), np.bool_)
    first[rows[order[1:][alike]]] = False
    return first
