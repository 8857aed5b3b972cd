"""Finds the stretches of a trace that are analysed one by one.

The idea: a step is a host range, and device work belongs to the step that launched it, however much later it runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count

import numpy as np

from overlap_probe.tables import I64, NO_TIME, Trace

_PROFILER_STEP = re.compile(r"ProfilerStep#\d+")
_STEP = re.compile(r"step[\s_#:-]*\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Windows:
    """Named windows, in order of time, and the window of each activity (-1: in none of them)."""

    names: tuple[str, ...]
    start_ns: I64
    of_activity: I64


def find_windows(trace: Trace, pattern: re.Pattern[str] | None) -> Windows:
    """The windows of a trace without ``whole`` (design, section 3); the user's pattern, if any, comes first."""
    for grammar in (pattern,) if pattern else (_PROFILER_STEP, _STEP):
        rows = _matching(trace, grammar)
        if len(rows):
            return _windows(trace, rows)
    return Windows((), np.empty(0, np.int64), np.full(len(trace.activities), -1, np.int64))


def _matching(trace: Trace, grammar: re.Pattern[str]) -> I64:
    """Rows of the ranges that are windows; of several that overlap (one a thread, say) the first counts."""
    ranges = trace.ranges
    codes = [c for c in np.unique(ranges.name) if grammar.fullmatch(trace.names[c])]
    kept: list[int] = []
    reach = NO_TIME
    for row in np.flatnonzero(np.isin(ranges.name, codes)):
        if ranges.start_ns[row] >= reach and ranges.end_ns[row] > ranges.start_ns[row]:
            kept.append(int(row))
            reach = int(ranges.end_ns[row])
    return np.array(kept, np.int64)


def _windows(trace: Trace, rows: I64) -> Windows:
    ranges, activities, operations = trace.ranges, trace.activities, trace.operations
    at = activities.launch_ns.copy()
    unknown = (at == NO_TIME) & (activities.operation >= 0)
    at[unknown] = operations.start_ns[activities.operation[unknown]]
    at = np.where(at == NO_TIME, activities.start_ns, at)
    start, end = ranges.start_ns[rows], ranges.end_ns[rows]
    place = np.searchsorted(start, at, side="right") - 1
    inside = (place >= 0) & (at < end[np.maximum(place, 0)])
    return Windows(_distinct([trace.names[c] for c in ranges.name[rows]]), start, np.where(inside, place, -1))


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Names as they are, the second and later of equal ones numbered; ``whole`` is taken."""
    taken = {"whole"}
    result = []
    for name in names:
        numbered = (f"{name} ({number})" for number in count(2))
        own = name if name not in taken else next(n for n in numbered if n not in taken)
        taken.add(own)
        result.append(own)
    return tuple(result)
