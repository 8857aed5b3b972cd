"""Finds the same collective on every rank, and how far the ranks' clocks are apart.

The idea: ranks of a process group make the same calls in the same order, so a call is known by its group and its place
in it. Clocks of different hosts disagree, but all ranks leave a collective together, so clocks are compared on the ends
of collectives, never on raw times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

import numpy as np

from overlap_probe.overlap import Measured
from overlap_probe.results import Collective

_Key: TypeAlias = tuple[object, ...]
_Label: TypeAlias = tuple[str, str | None]
"""Phase and unit."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's part in a collective. Times are by the rank's own clock."""

    rank: int
    """Position in the list of ranks."""
    c: Collective
    arrival_ns: int
    """When the rank came to the collective, or the earliest moment at which it may have."""
    arrived_by_ns: int
    """The latest moment at which it may have come."""


def same_calls(measured: Sequence[Measured]) -> Iterator[list[Member]]:
    """Each collective that all ranks of its group have in their traces, as its members, in order of rank.

    None at all where two traces may be of one rank.
    """
    if len({m.identity for m in measured} - {None}) < len(measured):
        return
    labels: dict[_Key, list[set[_Label]]] = defaultdict(list)
    for m in measured:
        own: dict[_Key, set[_Label]] = defaultdict(set)
        for c in m.collectives:
            own[_series(m, c)].add((c.phase, c.unit))
        for key, some in own.items():
            labels[key].append(some)
    by_key: dict[_Key, list[Member]] = defaultdict(list)
    for rank, m in enumerate(measured):
        place: Counter[_Key] = Counter()
        for c in sorted(m.collectives, key=lambda c: c.issued_ns):
            key = _series(m, c)
            if c.sequence is None:
                # A rank may have recorded more calls than another: each counts for its own unit only, where ranks
                # agree on any.
                key = (*key, c.phase, c.unit) if set.intersection(*labels[key]) else key
            by_key[(*key, place[key] if c.sequence is None else c.sequence)].append(_member(rank, m, c))
            place[key] += 1
    for key, members in by_key.items():
        groups = [measured[m.rank].trace.groups.get(str(key[0])) for m in members]
        wanted = {len(group) if group else measured[0].trace.world_size or len(measured) for group in groups}
        if len(members) > 1 and wanted == {len(members)} and len({m.rank for m in members}) == len(members):
            yield members


def _series(m: Measured, c: Collective) -> _Key:
    """What a collective is counted among: those of its group and kind, and without a number, of its window."""
    ranks = m.trace.groups.get(c.group or "")  # two groups of other ranks may have one name
    if c.sequence is not None:
        return c.group, ranks, c.op
    return c.group, ranks, c.op, m.windows.names[m.window_of(c)] if m.window_of(c) >= 0 else None


def _member(rank: int, m: Measured, c: Collective) -> Member:
    """A kernel waits for its peers while it runs; copies wait in their queue, behind the call that launched them."""
    if c.mechanism != "copy_engine" or c.queue_ns is None or c.waited_for == "dependency":
        return Member(rank, c, c.start_ns, c.start_ns)
    came = c.start_ns - c.queue_ns
    operation = m.trace.activities.operation[m.classified.first[c.index]]
    launched = int(m.trace.operations.end_ns[operation]) if operation >= 0 else came
    return Member(rank, c, came, min(c.start_ns, max(came, launched)))


def clock_offsets(calls: Sequence[Sequence[Member]], ranks: int) -> list[int]:
    """How far each rank's clock is ahead of the first one's, ns; 0 for a rank that did nothing together with others.

    Two ranks are compared by the median over the ends of what they did together, ranks that share no group through a
    third. A copy that waited for SMs after all had come ends later than its peers and says nothing.
    """
    apart: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for members in calls:
        together = [m for m in members if m.c.mechanism != "copy_engine" or m.c.waited_for != "sm"]
        for a, b in permutations(together, 2):
            apart[a.rank][b.rank].append(b.c.end_ns - a.c.end_ns)
    offset: dict[int, int] = {}
    for first in range(ranks):
        offset.setdefault(first, 0)
        reached = [first]
        for rank in reached:
            for other, times in apart[rank].items():
                if other not in offset:
                    offset[other] = offset[rank] + int(np.median(times))
                    reached.append(other)
    return [offset[rank] for rank in range(ranks)]
