"""Finds the innermost range around a moment of a host thread.

The idea: between two neighbouring boundaries of a thread's ranges the innermost one does not change: it is the last to
have begun of those that are still open. So number the ranges in the order in which they begin; each covers a run of
places between boundaries, and the innermost at a place is the largest number that covers it. A run is two overlapping
runs of a power of two, and halving all of these together, the longest first, covers every place in logarithmic depth.
Nothing is done range by range, and ranges that cross each other need no care.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlap_probe.tables import I32, I64


class Nesting:
    """Ranges of host threads, by row: ``parent`` is the row of the range around each one (-1: none)."""

    def __init__(self, start_ns: I64, end_ns: I64, thread: I32) -> None:
        self.parent = np.full(len(start_ns), -1, np.int64)
        self._threads: dict[int, _Thread] = {}
        # Of ranges that start together the longest is the outermost.
        order = np.lexsort((-end_ns, start_ns, thread))
        order = order[end_ns[order] > start_ns[order]]
        threads, first = np.unique(thread[order], return_index=True)
        for one, rows in zip(threads.tolist(), np.split(order, first)[1:], strict=True):
            self._threads[one], self.parent[rows] = _sweep(rows, start_ns[rows], end_ns[rows])

    def innermost(self, thread: I32, at_ns: I64) -> I64:
        """Row of the innermost range around each moment of each thread, -1 where there is none."""
        found = np.full(len(at_ns), -1, np.int64)
        for one, swept in self._threads.items():
            here = np.flatnonzero(thread == one)
            if len(here):
                found[here] = swept.innermost(at_ns[here])
        return found


@dataclass(frozen=True, slots=True)
class _Thread:
    """The boundaries of a thread's ranges, and the innermost range before the first, between any two, and after."""

    start_ns: I64
    end_ns: I64
    """Both sorted by themselves."""
    row: I64

    def innermost(self, at_ns: I64) -> I64:
        # At one moment ranges end before others start, and the last of several boundaries counts.
        passed = np.searchsorted(self.start_ns, at_ns, "right") + np.searchsorted(self.end_ns, at_ns, "right")
        result: I64 = self.row[passed]
        return result


def _sweep(rows: I64, start_ns: I64, end_ns: I64) -> tuple[_Thread, I64]:
    """What covers the places between the boundaries of ranges in the order of (start, -end), and what covers each."""
    count = len(rows)
    order = np.argsort(end_ns, kind="stable")
    ends = end_ns[order]
    # A place is numbered by the boundaries before it: a range covers from the one after its start up to its end.
    number = np.arange(count)
    first = number + 1 + np.searchsorted(ends, start_ns, "right")
    stop = np.empty(count, np.int64)
    stop[order] = number + 1 + np.searchsorted(start_ns, ends, "left")
    covering = _largest_covering(first, stop, 2 * count + 1)
    row = np.append(rows, -1)[covering]  # nothing is -1, which finds the -1 at the end
    return _Thread(start_ns, ends, row), row[first - 1]


def _largest_covering(first: I64, stop: I64, places: int) -> I64:
    """For each place the largest index of a run [first, stop) that covers it, -1 for none. No run is empty."""
    level = np.frexp((stop - first).astype(np.float64))[1] - 1  # 2 ** level is the largest power that fits
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(level.max() + 2))
    covering = np.full(places, -1, np.int64)
    for power in range(len(bounds) - 2, -1, -1):
        # Here an index covers 2 ** power places from where it stands on.
        runs = by_level[bounds[power] : bounds[power + 1]]
        np.maximum.at(covering, first[runs], runs)
        np.maximum.at(covering, stop[runs] - (1 << power), runs)
        if power:
            half = 1 << (power - 1)
            covering[half:] = np.maximum(covering[half:], covering[:-half])
    return covering
