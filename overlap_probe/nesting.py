"""Finds the innermost range around a moment of a host thread.

The idea: between two neighbouring boundaries of a thread's ranges the innermost one does not change, so one sweep with a
stack turns any number of ranges into a step function of time, and any number of moments are then looked up at once.
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
        starts = sorted((int(start_ns[r]), 1, -int(end_ns[r]), int(r)) for r in rows)
        ends = sorted((int(end_ns[r]), 0, -int(start_ns[r]), int(r)) for r in rows)
        moments, innermost, stack = [], [], [-1]
        for at, opens, _, row in sorted(starts + ends):
            if opens:
                self.parent[row] = stack[-1]
                stack.append(row)
            else:
                stack.remove(row)
            moments.append(at)
            innermost.append(stack[-1])
        return np.array(moments, np.int64), np.array(innermost, np.int64)

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
