"""Cuts out of a trace what a picture of one window shows: busy times of each stream, by kind.

The idea: a picture has a few thousand columns, so times that are closer than a column are drawn as one, and a step with
a million kernels costs no more than one with a hundred.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from overlap_probe.collectives import Classified
from overlap_probe.intervals import union
from overlap_probe.results import OPS, Lane
from overlap_probe.tables import I64, Trace

COLUMNS = 4000


def lanes(trace: Trace, classified: Classified, inside: I64) -> tuple[Lane, ...]:
    """One lane a stream and kind of work: all that ran from the first start to the last end of a window's activities.

    A window's gather may hide behind compute that an earlier window launched; the picture has to show it.
    """
    if not len(inside):
        return ()
    everything = trace.activities
    start, end = everything.start_ns[inside].min(), everything.end_ns[inside].max()
    rows = np.flatnonzero((everything.end_ns > start) & (everything.start_ns < end))
    activities = everything.take(rows)
    activities = replace(
        activities, start_ns=np.maximum(activities.start_ns, start), end_ns=np.minimum(activities.end_ns, end)
    )
    collective = classified.collective[rows]
    op = classified.op[collective] if len(classified.op) else np.empty(0, np.int64)
    kind = np.select(
        [collective >= 0, classified.is_gemm[rows], classified.is_compute[rows]],
        [op if len(op) else 0, len(OPS), len(OPS) + 1],
        default=len(OPS) + 2,
    )
    names = (*OPS, "gemm", "compute", "memory")
    column = max(1, int(end - start) // COLUMNS)
    made = []
    for stream in np.unique(activities.stream):
        for code in np.unique(kind[activities.stream == stream]):
            mine = (activities.stream == stream) & (kind == code)
            # Stretched by a column, near neighbours touch and become one; the stretch is taken back afterwards.
            times = union(activities.start_ns[mine], activities.end_ns[mine] + column)
            made.append(
                Lane(int(stream), names[code], tuple(times.start_ns.tolist()), tuple((times.end_ns - column).tolist()))
            )
    return tuple(made)
