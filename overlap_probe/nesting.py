"""Finds the innermost range around a moment of a host thread.

The idea: between two neighbouring boundaries of a thread's ranges the innermost one does not change, so one sweep with
a stack turns any number of ranges into a step function of time, and any number of moments are looked up at once.
"""

from __future__ import annotations

import numpy as np

from overlap_probe.tables import I32, I64


class Nesting:
    """Ranges of host threads, by row: ``parent`` is the row of the range around each one (-1: none)."""

    def __init__(self, start_ns: I64, end_ns: I64, thread: I32) -> None:
        self.parent = np.full(len(start_ns), -1, np.int64)
        self._steps: dict[int, tuple[I64, I64]] = {}
        for one in np.unique(thread):
            rows = np.flatnonzero((thread == one) & (end_ns > start_ns))
            self._steps[int(one)] = self._sweep(rows, start_ns, end_ns)

    def _sweep(self, rows: I64, start_ns: I64, end_ns: I64) -> tuple[I64, I64]:
        """Moments at which the innermost range of a thread changes, and its row from then on."""
        # At one moment ranges end before others start; of those that start together the longest is the outermost.
        start, end = start_ns[rows], end_ns[rows]
        moments = np.concatenate((end, start))
        opens = np.repeat((False, True), len(rows))
        order = np.lexsort((np.concatenate((-start, -end)), opens, moments))
        parent: dict[int, int] = {}
        innermost, stack = [], [-1]
        for row, opening in zip(np.tile(rows, 2)[order].tolist(), opens[order].tolist(), strict=True):
            if opening:
                parent[row] = stack[-1]
                stack.append(row)
            elif stack[-1] == row:
                stack.pop()
            else:
                stack.remove(row)  # ranges that are not nested in each other
            innermost.append(stack[-1])
        self.parent[list(parent)] = list(parent.values())
        return moments[order], np.array(innermost, np.int64)

    def innermost(self, thread: I32, at_ns: I64) -> I64:
        """Row of the innermost range around each moment of each thread, -1 where there is none."""
        found = np.full(len(at_ns), -1, np.int64)
        for one, (moments, rows) in self._steps.items():
            here = np.flatnonzero(thread == one)
            if not len(moments) or not len(here):
                continue
            # The last of several boundaries at one moment counts.
            step = np.searchsorted(moments, at_ns[here], side="right") - 1
            found[here] = np.where(step >= 0, rows[np.maximum(step, 0)], -1)
        return found
