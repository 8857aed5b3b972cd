"""A rank's trace as sets of times: when GEMMs ran, when compute did, when each collective did.

The idea: each class of activities becomes a set of disjoint intervals once, and every number of the analysis is how
much of one set another covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlap_probe.collectives import Classified
from overlap_probe.intervals import Intervals, covered, ranges, union, union_by_group
from overlap_probe.slowdown import Yardstick
from overlap_probe.tables import I64, Bool, Trace


@dataclass(frozen=True)
class Timeline:
    """A trace as sets of times."""

    trace: Trace
    gemm: Intervals
    compute: Intervals
    busy: Intervals
    """Something ran on a compute stream, or compute ran anywhere: outside of it, a collective stalls the rank."""
    compute_streams: I64
    owner: I64
    """Collective that each interval of ``pieces`` belongs to."""
    pieces: Intervals
    """The time of every collective: its activities' union, in the order of collectives."""
    yardstick: Yardstick

    @classmethod
    def of(cls, trace: Trace, classified: Classified) -> Timeline:
        activities = trace.activities

        def times(rows: Bool) -> Intervals:
            return union(activities.start_ns[rows], activities.end_ns[rows])

        is_collective = classified.collective >= 0
        working = classified.is_gemm if classified.is_gemm.any() else classified.is_compute
        streams = np.unique(activities.stream[working])
        on_compute_stream = np.isin(activities.stream, streams) & ~is_collective
        rows = np.flatnonzero(is_collective)
        owner, pieces = union_by_group(classified.collective[rows], activities.start_ns[rows], activities.end_ns[rows])
        return cls(
            trace=trace,
            gemm=times(classified.is_gemm),
            compute=times(classified.is_compute),
            busy=times(on_compute_stream | classified.is_compute),
            compute_streams=streams,
            owner=owner,
            pieces=pieces,
            yardstick=Yardstick(trace, np.flatnonzero(classified.is_gemm), times(is_collective)),
        )

    def times_of(self, collectives: Sequence[int]) -> Intervals:
        """The union of some collectives, by number."""
        numbers = np.asarray(collectives, np.int64)
        first = np.searchsorted(self.owner, numbers)
        pieces = ranges(first, np.searchsorted(self.owner, numbers, side="right") - first)
        return union(self.pieces.start_ns[pieces], self.pieces.end_ns[pieces])

    def per_collective(self, count: int, by: Intervals | None = None) -> I64:
        """Time of each collective, ns, or how much of it a set covers."""
        pieces = self.pieces
        lengths = pieces.end_ns - pieces.start_ns if by is None else covered(pieces.start_ns, pieces.end_ns, by)
        result = np.zeros(count, np.int64)
        np.add.at(result, self.owner, lengths)
        return result
