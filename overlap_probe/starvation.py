"""Says which collectives of a CPU missed their overlap because a thread had no core, and what a check makes of it.

The idea: a collective that overlaps no GEMM was over before the next GEMM began, or began when that was over. In the
first case the thread that launched it did not get on with its work, in the second its own thread did not get to start.
A thread that was ready all that time, and waited for a core, was kept from it by the machine; one that was blocked, as
a serial schedule blocks it, by the program. What `run_queue` recorded tells the two apart. A check that fails, but
would hold if the starved collectives had been hidden, cannot be answered on such a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from overlap_probe.intervals import Intervals, covered_between
from overlap_probe.labels import ROOT
from overlap_probe.results import Collective, Totals
from overlap_probe.tables import I64, Trace
from overlap_probe.units import duration

LEAST_SHARE = 0.5
"""Of the time in which a thread should have got on: less, and it was not the machine that kept it. Measured on two
cores that 8 to 18 threads wanted: more for all 5 gathers of dim 1536 that a prefetching schedule missed, for 25
of the 27 of dim 768 (known to be too short), and for 26 of 108 of a serial schedule, which misses all."""


def find_starved(
    trace: Trace, first: I64, gemm: Intervals, compute: Intervals, collectives: Sequence[Collective], leads: set[int]
) -> list[Collective]:
    """The same collectives, with ``starved_ns`` on those that overlap no GEMM because a thread had no core.

    A cause of theirs other than `first` becomes `unknown`: the machine made them late, not the code. ``first`` is the
    row of each collective's first activity; ``gemm`` and ``compute`` are when those ran; ``leads`` are gathers
    that the first compute of their pass waits for: nobody expects them to overlap, nor any of the root.
    """
    if not len(trace.waits):
        return [*collectives]
    excused = []
    hopeless = leads | {c.index for c in collectives if c.unit == ROOT}
    for c in collectives:
        misses = c.mechanism == "cpu" and not c.overlapped and c.launch_ns is not None and c.index not in hopeless
        launcher = int(trace.activities.launch_thread[first[c.index]])
        excused.append(_excuse(c, *_kept_waiting(trace, c, launcher, gemm, compute)) if misses else c)
    return excused


def _kept_waiting(trace: Trace, c: Collective, launcher: int, gemm: Intervals, compute: Intervals) -> tuple[int, int]:
    """How long the thread that kept a collective and a GEMM apart waited for a core, at most, and of how long; ns."""
    assert c.launch_ns is not None

    if covered_between(c.launch_ns, c.start_ns, gemm):
        return max(longest_wait_ns(trace, own, c.launch_ns, c.start_ns) for own in c.streams), c.start_ns - c.launch_ns
    # What the launching thread computes before its GEMM it would have computed on any machine.
    computed = covered_between(c.launch_ns, c.end_ns, compute)
    return longest_wait_ns(trace, launcher, c.launch_ns, c.end_ns), c.end_ns - c.launch_ns - computed


def _excuse(c: Collective, starved_ns: int, of_ns: int) -> Collective:
    if not starved_ns or starved_ns < LEAST_SHARE * of_ns:
        return c
    if c.cause in (None, "first"):
        return replace(c, starved_ns=starved_ns)
    said = (
        f"it was over {duration(c.end_ns - c.issued_ns)} after its launch, and overlaps no GEMM "
        f"because a thread that should have run was without a core for up to {duration(starved_ns)} of that"
    )
    return replace(c, starved_ns=starved_ns, cause="unknown", evidence=said)


def longest_wait_ns(trace: Trace, thread: int, start_ns: int, end_ns: int) -> int:
    """How long a thread can have waited for a core between two moments, at most: nobody knows where in its interval a
    wait was, and on a busy machine the intervals are longer than a short collective."""
    waits = trace.waits
    inside = np.minimum(waits.end_ns, end_ns) - np.maximum(waits.start_ns, start_ns)
    rows = np.flatnonzero((waits.thread == thread) & (inside > 0))
    return min(int(np.minimum(inside[rows], waits.waited_ns[rows]).sum()), end_ns - start_ns)


def value_at_best(metric: str, unit: str, value: float, totals: Totals, starved: Sequence[Collective]) -> float:
    """What a check's value would be had the starved collectives been hidden; unit % is of the time of ``totals``."""
    if metric == "overlaps":
        return value + len(starved)
    cost_ns = sum(c.stalled_ns if metric == "stalled" else c.exposed_ns for c in starved)
    cost = 100 * cost_ns / totals.time_ns if unit == "%" else cost_ns
    return value + {"hidden": cost, "net_hidden": cost, "exposed": -cost, "stalled": -cost}.get(metric, 0)


def too_busy(starved: Sequence[Collective]) -> str:
    """Why a check cannot be answered: the one of the starved collectives whose thread waited longest."""
    c = max(starved, key=lambda c: c.starved_ns or 0)
    since = duration(c.end_ns - c.issued_ns)
    return (
        f"but a thread waited up to {duration(c.starved_ns or 0)} for a core in the {since} from launch to end of the "
        f"{c.op} of {c.unit or 'an unknown unit'}: this machine is too busy to say; run again on idle cores"
    )
