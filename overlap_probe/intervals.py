"""Interval arithmetic on half-open integer intervals: the only place that does any.

The idea: a set of times is a sorted list of disjoint intervals, and every question about it comes down to one function,
*how much of the set lies before t*. What a set covers of [a, b) is then the difference of two values of it, so that
thousands of intervals are measured against a set without a loop. All times are int64 nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from overlap_probe.tables import I64


@dataclass(frozen=True)
class Intervals:
    """A set of times: disjoint intervals [start, end) in increasing order, none of them empty, no two touching."""

    start_ns: I64
    end_ns: I64

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def before_ns(self) -> I64:
        """How much of the set lies before each of its intervals, and in all of it, ns."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.end_ns - self.start_ns)))

    @property
    def total_ns(self) -> int:
        """Length of the set, ns."""
        return int((self.end_ns - self.start_ns).sum())


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: I64, end_ns: I64) -> Intervals:
    """The set that any number of intervals cover, in any order, overlapping or not; empty ones cover nothing."""
    kept = end_ns > start_ns
    start_ns, end_ns = start_ns[kept], end_ns[kept]
    if not len(start_ns):
        return EMPTY
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.concatenate(([True], start_ns[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start_ns[first], reach[last])


def union_by_group(group: I64, start_ns: I64, end_ns: I64) -> tuple[I64, Intervals]:
    """The union of each group's intervals: the group of each resulting interval, and the intervals.

    The result is ordered by group and then by time; intervals of different groups may overlap.
    """
    kept = end_ns > start_ns
    group, start_ns, end_ns = group[kept], start_ns[kept], end_ns[kept]
    if not len(group):
        return np.empty(0, np.int64), EMPTY
    # Groups are laid one after another on one axis, a gap apart, so that one union serves them all.
    codes, dense = np.unique(group, return_inverse=True)
    origin, span = int(start_ns.min()), int(end_ns.max() - start_ns.min()) + 1
    shift = dense.astype(np.int64) * span - origin
    merged = union(start_ns + shift, end_ns + shift)
    where = merged.start_ns // span
    back = origin - where * span
    return codes[where], Intervals(merged.start_ns + back, merged.end_ns + back)


def length_before(times: Intervals, at_ns: I64) -> I64:
    """How much of the set lies before each moment, ns."""
    if not len(times):
        return np.zeros(len(at_ns), np.int64)
    row = np.searchsorted(times.start_ns, at_ns, side="right") - 1
    inside = np.where(row >= 0, np.minimum(at_ns, times.end_ns[row]) - times.start_ns[row], 0)
    result: I64 = times.before_ns[np.maximum(row, 0)] + inside
    return result


def covered(start_ns: I64, end_ns: I64, by: Intervals) -> I64:
    """How much of each interval the set covers, ns."""
    return length_before(by, np.maximum(start_ns, end_ns)) - length_before(by, start_ns)


def covered_between(start_ns: int, end_ns: int, by: Intervals) -> int:
    """The same for one interval."""
    return int(covered(np.array([start_ns]), np.array([end_ns]), by)[0])


def ranges(first: I64, count: I64) -> I64:
    """The integers ``first``, ``first + 1`` ... of each of several runs, one run after the other."""
    result: I64 = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    return result


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The times in both sets."""
    if not len(a) or not len(b):
        return EMPTY
    # An interval of a meets those of b from the first that ends after its start to the last that starts before its end.
    first = np.searchsorted(b.end_ns, a.start_ns, side="right")
    count = np.maximum(np.searchsorted(b.start_ns, a.end_ns, side="left") - first, 0)
    in_a, in_b = np.repeat(np.arange(len(a)), count), ranges(first, count)
    return Intervals(np.maximum(a.start_ns[in_a], b.start_ns[in_b]), np.minimum(a.end_ns[in_a], b.end_ns[in_b]))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """The times in a and not in b."""
    if not len(a):
        return EMPTY
    low, high = a.start_ns[0], a.end_ns[-1]
    gaps_start = np.concatenate(([low], b.end_ns))
    gaps_end = np.concatenate((b.start_ns, [high]))
    real = gaps_end > gaps_start
    return intersect(a, Intervals(gaps_start[real], gaps_end[real]))
