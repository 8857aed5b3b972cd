"""Cuts a trace into the forward and backward passes of its windows.

The idea: a pass is what the host launches from its first collective on, however much later it runs; it is over where
the next pass or the backward begins, or with its window. What comes after the last reduce-scatter is the optimizer's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from overlap_probe import kernels
from overlap_probe.labels import Label, LabelReader
from overlap_probe.overlap import Measured
from overlap_probe.results import Collective
from overlap_probe.tables import CPU_COLLECTIVE, I64, NO_TIME, Operations, Ranges

END_OF_TIME = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Stretch:
    """One pass on one rank."""

    window: str
    """Name of its window, ``whole`` if it is in none."""
    phase: str
    """forward, backward or unknown."""
    number: int
    """Among the passes of its window and phase."""
    rows: I64
    """Its activities, in order of start."""


def find_stretches(m: Measured) -> Iterator[Stretch]:
    """Every pass that gathers or reduce-scatters; none on a CPU-only timeline, where the host is the stream."""
    activities = m.trace.activities
    if (activities.kind == CPU_COLLECTIVE).any():
        return
    at = np.where(activities.launch_ns == NO_TIME, activities.start_ns, activities.launch_ns)
    passes = _passes(m)
    labels = [*_backward_labels(m), END_OF_TIME]
    backward = [labels[bisect_right(labels, calls[-1].issued_ns)] for calls in passes]
    """The first label of a backward after each pass."""
    begins = [calls[0].issued_ns for calls in passes]
    for n, calls in enumerate(passes):
        if n and calls[0].phase == "backward":
            begins[n] = min(begins[n], backward[n - 1])
    numbers: Counter[tuple[str, str]] = Counter()
    for n, calls in enumerate(passes):
        window, phase, last = m.window_of(calls[0]), calls[0].phase, calls[-1]
        end = begins[n + 1] if n + 1 < len(passes) else END_OF_TIME
        if phase == "forward":
            end = min(end, backward[n])
        if last.op == "reduce_scatter":
            end = min(end, last.issued_ns + 1)
        name = m.windows.names[window] if window >= 0 else "whole"
        inside = (at >= begins[n]) & (at < end) & (m.windows.of_activity == window)
        yield Stretch(name, phase, numbers[name, phase], np.flatnonzero(inside))
        numbers[name, phase] += 1


def _passes(m: Measured) -> list[list[Collective]]:
    """The all-gathers and reduce-scatters of each pass, in order of launch; those of no known phase only if all are."""
    calls = sorted((c for c in m.collectives if c.op in ("all_gather", "reduce_scatter")), key=lambda c: c.issued_ns)
    if any(c.phase != "unknown" for c in calls):
        calls = [c for c in calls if c.phase != "unknown"]
    passes: list[list[Collective]] = []
    gathered = -1
    """Number of the pass of the gathers in the last one."""
    for c in calls:
        is_gather = c.op == "all_gather"
        here = passes[-1][0] if passes else None
        same = here and (m.window_of(here), here.phase) == (m.window_of(c), c.phase)
        if not same or (is_gather and gathered not in (-1, c.pass_index)):
            passes.append([])
            gathered = -1
        gathered = c.pass_index if is_gather else gathered
        passes[-1].append(c)
    return passes


def units_of_launches(m: Measured) -> list[str | None]:
    """Of each activity, the unit whose label its host thread had opened last when it launched it.

    Labels of collectives do not count: a unit gathers others ahead while it is its own turn.
    """
    activities, ranges = m.trace.activities, m.trace.ranges
    units: list[str | None] = [None] * len(activities)
    labels = _labels(m)
    said = [labels[code] for code in ranges.name.tolist()]
    rows = np.array([n for n, label in enumerate(said) if label and label.unit and not label.op], np.int64)
    for thread in np.unique(ranges.thread[rows]):
        mine = rows[ranges.thread[rows] == thread]
        mine = mine[np.argsort(ranges.start_ns[mine], kind="stable")]
        launched = np.flatnonzero((activities.launch_thread == thread) & (activities.launch_ns != NO_TIME))
        place = np.searchsorted(ranges.start_ns[mine], activities.launch_ns[launched], side="right") - 1
        for row, last in zip(launched.tolist(), place.tolist(), strict=True):
            label = said[mine[last]] if last >= 0 else None
            units[row] = label.unit if label else None
    return units


def _labels(m: Measured) -> dict[int, Label | None]:
    """What each name of a range says."""
    reader = LabelReader()
    return {code: reader.read(m.trace.names[code]) for code in np.unique(m.trace.ranges.name).tolist()}


def _backward_labels(m: Measured) -> list[int]:
    """When labels of a backward begin, in order; autograd's own operations, where no label says it."""
    codes = [code for code, label in _labels(m).items() if label and label.phase == "backward"]
    rows: Ranges | Operations = m.trace.ranges
    if not codes:
        rows = m.trace.operations
        names = np.unique(rows.name).tolist()
        codes = [code for code in names if kernels.phase_of_operation(m.trace.names[code]) == "backward"]
    starts: list[int] = np.sort(rows.start_ns[np.isin(rows.name, codes)]).tolist()
    return starts
