"""Looks up what ran on the compute streams, and around a gather, at one moment or between two.

The idea: sort once, so that each of these questions is a binary search, however long the trace is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlap_probe.collectives import Classified
from overlap_probe.intervals import Intervals, covered_between, union
from overlap_probe.tables import I64, KERNEL, NO_TIME, OPERATOR, Trace


@dataclass(frozen=True)
class ComputeStreams:
    """The activities of the compute streams that are no collectives, in order of start, and what runs around them."""

    trace: Trace
    classified: Classified
    rows: I64
    start_ns: I64
    end_ns: I64
    reach_ns: I64
    """Latest end among an activity and all before it."""
    compute: Intervals
    """When compute ran on them."""
    streams: frozenset[int]
    by_end: I64
    """Rows of all activities of the trace, in order of end."""
    before: I64
    """Row of what ran before each activity on its stream, -1 for nothing."""

    @classmethod
    def of(cls, trace: Trace, classified: Classified, streams: I64) -> ComputeStreams:
        activities = trace.activities
        on_them = np.isin(activities.stream, streams)
        rows = np.flatnonzero(on_them & (classified.collective < 0))
        compute = on_them & classified.is_compute
        start, end = activities.start_ns[rows], activities.end_ns[rows]
        reach = np.maximum.accumulate(end) if len(end) else end
        times = union(activities.start_ns[compute], activities.end_ns[compute])
        by_end = np.argsort(activities.end_ns, kind="stable")
        by_stream = np.lexsort((activities.start_ns, activities.stream))
        before = np.full(len(activities), -1, np.int64)
        same = activities.stream[by_stream[1:]] == activities.stream[by_stream[:-1]]
        before[by_stream[1:][same]] = by_stream[:-1][same]
        names = frozenset(streams.tolist())
        return cls(trace, classified, rows, start, end, reach, times, names, by_end, before)

    def running_at(self, at_ns: int) -> list[int]:
        """Rows of the activities that began before a moment and had not ended."""
        found = []
        place = int(np.searchsorted(self.start_ns, at_ns, side="left")) - 1
        while place >= 0 and self.reach_ns[place] >= at_ns:
            if self.end_ns[place] >= at_ns:
                found.append(int(self.rows[place]))
            place -= 1
        return found

    def ended_between(self, start_ns: int, end_ns: int) -> I64:
        """Rows of the activities, of any stream, that ended between two moments, the latest first."""
        end = self.trace.activities.end_ns
        first = np.searchsorted(end, start_ns, side="left", sorter=self.by_end)
        last = np.searchsorted(end, end_ns, side="right", sorter=self.by_end)
        rows: I64 = self.by_end[first:last][::-1]
        return rows

    def next_compute(self, at_ns: int) -> int | None:
        """Row of the first compute that began at a moment or later."""
        for row in self.rows[np.searchsorted(self.start_ns, at_ns, side="left") :]:
            if self.trace.activities.kind[row] in (KERNEL, OPERATOR):
                return int(row)
        return None

    def ready_ns(self, row: int) -> int:
        """When an activity was launched and its stream was free; its start, if the trace has no launch."""
        activities, before = self.trace.activities, self.before[row]
        start, launch = int(activities.start_ns[row]), int(activities.launch_ns[row])
        free = int(activities.end_ns[before]) if before >= 0 else launch
        return start if launch == NO_TIME else min(start, max(launch, free))

    def packed_for(self, row: int) -> int | None:
        """Row of what the stream of a collective's first activity did for it just before: it is no collective."""
        before = int(self.before[row])
        return before if before >= 0 and self.classified.collective[before] < 0 else None

    def amount(self, start_ns: int, end_ns: int) -> int:
        """How long compute ran between two moments, ns."""
        return covered_between(start_ns, end_ns, self.compute)
