"""Measures one rank: its collectives, and the numbers of every window.

The idea: activities are classified once and collectives measured once; windows and phases only select which of these
go into a set, whose numbers are read off by intersecting sets (`timeline`), never by summing over concurrent ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_probe import causes
from overlap_probe.collectives import Classified, classify
from overlap_probe.cpu_timeline import with_cpu_activities
from overlap_probe.intervals import Intervals, covered, union
from overlap_probe.options import Options
from overlap_probe.order import tell_by_order
from overlap_probe.passes import Call, Count, count, leading, number_passes
from overlap_probe.per_collective import measure_collectives
from overlap_probe.pictures import lanes
from overlap_probe.results import OPS, Analysis, Collective, Phase, Totals, Window
from overlap_probe.starvation import find_starved
from overlap_probe.tables import I64, Trace
from overlap_probe.timeline import Timeline
from overlap_probe.windows import Windows, find_windows


def analyze(trace: Trace, options: Options | None = None) -> Analysis:
    """Everything measured on one rank's trace, read by itself (design, section 3)."""
    return measure(trace, options).analysis()


def measure(trace: Trace, options: Options | None = None) -> Measured:
    """One rank's trace, classified and measured, before its collectives are compared with other ranks'."""
    options = options or Options()
    trace = with_cpu_activities(trace)
    classified = classify(trace, options)
    timeline = Timeline.of(trace, classified)
    windows = find_windows(trace, options.window)
    classified, notes = tell_by_order(trace, classified, windows.of_activity)
    trace = replace(trace, notes=(*trace.notes, *notes))
    if options.window and not windows.names:
        missed = f"no range matches the window pattern {options.window.pattern!r}"
        trace = replace(trace, incomplete=(*trace.incomplete, missed))
    collectives = measure_collectives(trace, classified, timeline, options, windows.of_activity[classified.first])
    gathers = sorted((c for c in collectives if c.op == "all_gather"), key=lambda c: c.issued_ns)
    leads = leading((c.index, (c.phase, c.pass_index), c.unit) for c in gathers)
    collectives = causes.explain(trace, classified, timeline.compute_streams, collectives, leads)
    collectives = find_starved(trace, classified.first, timeline.gemm, timeline.compute, collectives, leads)
    return Measured(trace, classified, timeline, windows, tuple(collectives))


@dataclass(frozen=True)
class Measured:
    """A rank's collectives, and the timeline that they were measured on."""

    trace: Trace
    classified: Classified
    timeline: Timeline
    windows: Windows
    collectives: tuple[Collective, ...]
    """In order of start."""

    @property
    def identity(self) -> str | None:
        """What tells it from the run's other ranks: its rank, else its process; None if neither is known."""
        if self.trace.rank is not None:
            return f"rank {self.trace.rank}"
        return None if self.trace.process is None else f"process {self.trace.process}, device {self.trace.device_index}"

    def window_of(self, collective: Collective) -> int:
        """Number of the window in which a collective was launched, -1 for none."""
        return int(self.windows.of_activity[self.classified.first[collective.index]])

    def analysis(self) -> Analysis:
        """The numbers of every window."""
        trace, names = self.trace, self.windows.names
        rows = {"whole": np.arange(len(trace.activities))}
        order = np.argsort(self.windows.of_activity, kind="stable")
        bounds = np.searchsorted(self.windows.of_activity[order], np.arange(len(names) + 1))
        rows |= {name: order[bounds[n] : bounds[n + 1]] for n, name in enumerate(names)}
        members: dict[str, list[Collective]] = {name: [] for name in names} | {"whole": list(self.collectives)}
        for c in self.collectives:
            if self.window_of(c) >= 0:
                members[names[self.window_of(c)]].append(c)
        pictured = names[0] if names else "whole"
        return Analysis(
            path=trace.path,
            format=trace.format,
            rank=trace.rank,
            world_size=trace.world_size,
            windows={
                name: _window(name, members[name], mine, self.classified, self.timeline) for name, mine in rows.items()
            },
            notes=trace.notes,
            incomplete=trace.incomplete,
            process=trace.process,
            device=trace.device_index,
            device_name=trace.device.name,
            lanes=lanes(trace, self.classified, rows[pictured]),
            pictured=pictured,
        )


def _window(name: str, mine: Sequence[Collective], rows: I64, classified: Classified, timeline: Timeline) -> Window:
    """The numbers of one window: its collectives, and the rows of the activities that were launched in it."""
    activities = timeline.trace.activities

    def totals(some: Sequence[Collective]) -> Totals:
        return _totals(some, timeline)

    def of(op: str, phase: str) -> list[Collective]:
        return [c for c in mine if c.op == op and c.phase == phase]

    def counted(some: Sequence[Collective]) -> Count:
        # By its own passes: those of the whole do not end with the steps in it.
        calls = sorted(some, key=lambda c: c.issued_ns)
        numbers = number_passes([Call(c.unit, classified.occasions[c.index]) for c in calls])
        return count((number, c.unit, c.overlapped) for number, c in zip(numbers, calls, strict=True))

    def phase(which: str) -> Phase:
        gathers, reduces = of("all_gather", which), of("reduce_scatter", which)
        gathered, reduced = Count(), Count()
        if not classified.by_order:
            gathered, reduced = counted(gathers), counted(reduces)
        return Phase(
            all_gather=totals(gathers),
            reduce_scatter=totals(reduces),
            children=gathered.children,
            expected=gathered.expected,
            found=gathered.found,
            reduce_expected=reduced.expected,
            reduce_found=reduced.found,
        )

    ops = [op for op in OPS if op in ("all_gather", "reduce_scatter") or any(c.op == op for c in mine)]
    gemm, compute = (
        union(activities.start_ns[some], activities.end_ns[some])
        for some in (rows[classified.is_gemm[rows]], rows[classified.is_compute[rows]])
    )
    return Window(
        name=name,
        communication=totals(mine),
        by_op={op: totals([c for c in mine if c.op == op]) for op in ops},
        compute_ns=compute.total_ns,
        gemm_ns=gemm.total_ns,
        forward=phase("forward"),
        backward=phase("backward"),
        collectives=tuple(mine),
    )


def _totals(some: Sequence[Collective], timeline: Timeline) -> Totals:
    """The numbers of a set of collectives: the length of its union, and how much of that other sets cover."""
    times = timeline.times_of([c.index for c in some])

    def covered_ns(by: Intervals) -> int:
        return int(covered(times.start_ns, times.end_ns, by).sum())

    hidden = covered_ns(timeline.compute)
    slowdown = timeline.yardstick.slowdown_ns(times)
    return Totals(
        count=len(some),
        overlapped_by_gemm=sum(c.overlapped for c in some),
        time_ns=times.total_ns,
        hidden_ns=hidden,
        hidden_by_gemm_ns=covered_ns(timeline.gemm),
        exposed_ns=times.total_ns - hidden,
        stalled_ns=times.total_ns - covered_ns(timeline.busy),
        slowdown_ns=slowdown,
        net_hidden_ns=None if slowdown is None else hidden - slowdown,
    )
