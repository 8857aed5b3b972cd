"""Measures how much longer GEMMs ran because a collective ran beside them.

The idea: overlap costs the GEMM something, and the fair yardstick is the same GEMM running alone in the same trace.
Where the trace has no comparable GEMM the answer is unknown, never zero (design, section 3, ``slowdown_ns``).
"""

from __future__ import annotations

import numpy as np

from overlap_probe.intervals import Intervals, covered
from overlap_probe.tables import I64, Trace

AGREE = 0.25
"""Without shapes, GEMMs that ran alone are comparable only if they agree within this share of their median."""


class Yardstick:
    """The GEMMs of a trace, and what each kind of them takes with no collective beside it."""

    def __init__(self, trace: Trace, gemm_rows: I64, collectives: Intervals) -> None:
        activities, operations = trace.activities, trace.operations
        self.start_ns, self.end_ns = activities.start_ns[gemm_rows], activities.end_ns[gemm_rows]
        self.reach_ns = np.maximum.accumulate(self.end_ns) if len(gemm_rows) else self.end_ns
        """Latest end of a GEMM and all that began before it."""
        operation = activities.operation[gemm_rows]
        shapes = np.full(len(gemm_rows), -1, np.int64)
        if len(operations):
            shapes = np.where(operation >= 0, operations.shapes[operation], -1)
        keys = np.stack((activities.name[gemm_rows].astype(np.int64), activities.blocks[gemm_rows], shapes), axis=1)
        _, self.kind = np.unique(keys, axis=0, return_inverse=True)
        self.kind = self.kind.reshape(-1)
        alone = covered(self.start_ns, self.end_ns, collectives) == 0
        duration = self.end_ns - self.start_ns
        self.alone_ns: dict[int, float] = {}
        for kind in np.unique(self.kind[alone]):
            times = duration[alone & (self.kind == kind)]
            median = float(np.median(times))
            with_shapes = shapes[self.kind == kind][0] >= 0
            if with_shapes or (len(times) > 1 and times.max() - times.min() <= AGREE * median):
                self.alone_ns[int(kind)] = median

    def slowdown_ns(self, beside: Intervals) -> int | None:
        """How much longer the GEMMs beside some collectives ran, summed, at least 0; None where it cannot be known."""
        if not len(beside):
            return 0
        first = np.searchsorted(self.reach_ns, beside.start_ns[0], side="right")
        near = np.arange(first, np.searchsorted(self.start_ns, beside.end_ns[-1]))
        slowed = near[covered(self.start_ns[near], self.end_ns[near], beside) > 0]
        if any(int(kind) not in self.alone_ns for kind in np.unique(self.kind[slowed])):
            return None
        alone = np.array([self.alone_ns[int(kind)] for kind in self.kind[slowed]])
        return max(0, round(float(((self.end_ns - self.start_ns)[slowed] - alone).sum())))
