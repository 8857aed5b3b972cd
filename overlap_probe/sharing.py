"""Finds out how compute and collectives of a recorded stretch shared the SMs: who waited for them, who ran with fewer.

The idea: a kernel whose grid fills the device has a body, in which no collective that needs SMs can start, and a tail,
in which one can. Where one started inside the kernel, the tail had begun; a GEMM that ran longer than the one alone ran
so much slower while the collective was beside it. What no kernel shows is taken from the others: their usual tail (none
where nothing was seen to wait for SMs), their usual speed (full where nothing can be compared).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from overlap_probe.intervals import covered, union
from overlap_probe.overlap import Measured
from overlap_probe.pieces import Piece
from overlap_probe.room import tail_share
from overlap_probe.tables import I64, Trace
from overlap_probe.waits import AT_ONCE_NS

LEAST_SPEED = 0.3
"""A GEMM that seems to have run slower than this beside a collective cannot be compared with the one that ran alone."""


def find_waits_for_sms(pieces: Sequence[Piece], trace: Trace) -> None:
    """Fill in the tails, and when pieces were ready that waited for SMs; the pieces of one rank, in order of start."""
    for p, q in pairwise([p for p in pieces if p.fills]):
        if q.start_ns < p.end_ns:  # two that ran at once did not fill the device
            p.fills = q.fills = False
    filling = [p for p in pieces if p.fills]
    starts = [p.start_ns for p in filling]
    seen: dict[int, int] = {}
    """The longest tail that each filling kernel shows, by its place."""
    waited: list[float] = []
    """Shares of the kernels' time that were left when a collective that had waited for it could start."""
    for p in pieces:
        place = bisect_left(starts, p.start_ns) - 1
        if not p.needs_sms or place < 0 or p.start_ns > filling[place].end_ns:
            continue
        kernel = filling[place]
        left = kernel.end_ns - p.start_ns
        seen[place] = max(left, seen.get(place, 0))
        ready = max(kernel.start_ns, p.gates_ns)
        if p.start_ns - ready > AT_ONCE_NS and left <= tail_share(trace, kernel.row) * kernel.work_ns:
            p.ready_ns = ready
            waited.append(left / kernel.work_ns)
    usual = median(waited) if waited else 0.0
    for place, kernel in enumerate(filling):
        kernel.tail_ns = seen.get(place, round(usual * kernel.work_ns))


def compare_speeds(pieces: Sequence[Piece], measured: Measured) -> None:
    """Fill in how long each kernel of compute takes alone, and its speed beside a collective that holds SMs."""
    compute, holders = [p for p in pieces if p.is_compute], [p for p in pieces if p.needs_sms]
    beside = union(_times([p.start_ns for p in holders]), _times([p.end_ns for p in holders]))
    bodies = _times([p.start_ns for p in compute]), _times([p.end_ns - p.tail_ns for p in compute])
    shared = covered(*bodies, beside).tolist()
    speeds = []
    for p, alone, shared_ns in zip(compute, _alone_ns(compute, measured), shared, strict=True):
        p.alone_ns = alone
        if not p.fills or not shared_ns:
            continue
        p.speed = 1.0
        if alone is not None and LEAST_SPEED <= (speed := 1 - (p.work_ns - alone) / shared_ns) <= 1:
            p.speed, p.work_ns = speed, alone
            speeds.append(speed)
    usual = median(speeds) if speeds else 1.0
    for p, shared_ns in zip(compute, shared, strict=True):
        p.speed = p.speed if shared_ns else usual


def _alone_ns(compute: Sequence[Piece], measured: Measured) -> list[int | None]:
    """How long each would take with no collective beside it; None for a GEMM for which the trace has no yardstick."""
    timeline, classified = measured.timeline, measured.classified
    activities, gemms = measured.trace.activities, np.flatnonzero(classified.is_gemm)
    rows = np.array([p.row for p in compute], np.int64)
    beside = union(timeline.pieces.start_ns, timeline.pieces.end_ns)
    had_company = (covered(activities.start_ns[rows], activities.end_ns[rows], beside) > 0) & classified.is_gemm[rows]
    result: list[int | None] = [p.work_ns for p in compute]
    for n in np.flatnonzero(had_company).tolist():
        kind = int(timeline.yardstick.kind[np.searchsorted(gemms, rows[n])])
        known = timeline.yardstick.alone_ns.get(kind)
        result[n] = None if known is None else round(known)
    return result


def _times(ns: list[int]) -> I64:
    return np.array(ns, np.int64)
