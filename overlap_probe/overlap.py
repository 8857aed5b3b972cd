"""Measures one rank: which collectives there are, and how much of them hides behind compute.

The idea: classify every activity once, turn each class into a set of times, and read every number off by intersecting
sets; nothing is summed over concurrent collectives. Windows and phases only select which collectives go into a set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_probe import causes
from overlap_probe.collectives import FOUND_BY, Classified, classify
from overlap_probe.cpu_timeline import with_cpu_activities
from overlap_probe.intervals import Intervals, covered, ranges, union, union_by_group
from overlap_probe.options import Options
from overlap_probe.order import tell_by_order
from overlap_probe.passes import Call, Count, count, leading, number_passes
from overlap_probe.pictures import lanes
from overlap_probe.results import OPS, Analysis, Collective, Phase, Totals, Window
from overlap_probe.slowdown import Yardstick
from overlap_probe.sm_activity import activity_of
from overlap_probe.starvation import find_starved
from overlap_probe.tables import CPU_COLLECTIVE, I64, KERNEL, NO_TIME, Bool, Trace
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
    collectives = _collectives(trace, classified, timeline, options, windows.of_activity[classified.first])
    pass_of = [(c.phase, c.pass_index, int(windows.of_activity[classified.first[c.index]])) for c in collectives]
    gathers = sorted((c for c in collectives if c.op == "all_gather"), key=lambda c: c.issued_ns)
    leads = leading((c.index, pass_of[c.index], c.unit) for c in gathers)
    collectives = causes.explain(trace, classified, timeline.compute_streams, collectives, pass_of, leads)
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


def _collectives(
    trace: Trace, classified: Classified, timeline: Timeline, options: Options, window_of: I64
) -> list[Collective]:
    """All collectives of a trace in order of start, without their causes; window_of: window of each collective."""
    activities, total = trace.activities, classified.count
    time, gemm, compute, busy = (
        timeline.per_collective(total, by).tolist() for by in (None, timeline.gemm, timeline.compute, timeline.busy)
    )
    rows = np.flatnonzero(classified.collective >= 0)
    owner = classified.collective[rows]
    end = np.full(total, NO_TIME)
    np.maximum.at(end, owner, activities.end_ns[rows])
    launch = activities.launch_ns[classified.first]
    queue = _queue_ns(trace, classified.first)
    mechanisms = _mechanisms(trace, rows, owner, total)
    streams: list[set[int]] = [set() for _ in range(total)]
    for number, stream in zip(owner.tolist(), activities.stream[rows].tolist(), strict=True):
        streams[number].add(stream)
    ops = [OPS[op] for op in classified.op]
    groups, sequences = _calls(trace, classified.first)
    sm_activity = activity_of(trace.sm_samples, timeline.owner, timeline.pieces, total)
    issued = np.where(launch == NO_TIME, activities.start_ns[classified.first], launch)
    pass_of = _passes(ops, classified, issued, window_of)
    return [
        Collective(
            op=ops[n],
            unit=classified.units[n],
            phase=classified.phases[n],
            mechanism=mechanisms[n],
            found_by=FOUND_BY[classified.found_by[n]],
            start_ns=int(activities.start_ns[row]),
            end_ns=int(end[n]),
            launch_ns=None if launch[n] == NO_TIME else int(launch[n]),
            queue_ns=None if queue[n] == NO_TIME else int(queue[n]),
            time_ns=time[n],
            hidden_ns=compute[n],
            hidden_by_gemm_ns=gemm[n],
            exposed_ns=time[n] - compute[n],
            stalled_ns=time[n] - busy[n],
            overlapped=gemm[n] > options.min_overlap_ns,
            pass_index=pass_of[n],
            name=trace.names[activities.name[row]],
            streams=tuple(sorted(streams[n])),
            group=groups[n],
            sequence=sequences[n],
            sm_active_percent=sm_activity[n][0],
            sm_samples=sm_activity[n][1],
            index=n,
        )
        for n, row in enumerate(classified.first)
    ]


def _calls(trace: Trace, rows: I64) -> tuple[list[str | None], list[int | None]]:
    """Process group and sequence number of the call that launched each activity."""
    operations = trace.operations
    groups: list[str | None] = []
    sequences: list[int | None] = []
    for operation in trace.activities.operation[rows]:
        group = operations.group[operation] if operation >= 0 else -1
        sequence = operations.sequence[operation] if operation >= 0 else -1
        groups.append(trace.names[group] if group >= 0 else None)
        sequences.append(int(sequence) if sequence >= 0 else None)
    return groups, sequences


def _passes(ops: Sequence[str], classified: Classified, issued_ns: I64, window_of: I64) -> list[int]:
    """Number of the pass of each collective, counted for each kind and phase in the order of issue.

    Each window begins a pass of its own: what was gathered before it says nothing about what it gathers again.
    """
    calls: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for n in np.argsort(issued_ns, kind="stable").tolist():
        calls[ops[n], classified.phases[n]][int(window_of[n])].append(n)
    result = [0] * len(ops)
    for by_window in calls.values():
        begun = 0
        for some in by_window.values():
            numbers = number_passes([Call(classified.units[n], classified.occasions[n]) for n in some])
            for n, number in zip(some, numbers, strict=True):
                result[n] = begun + number
            begun += numbers[-1] + 1
    return result


def _queue_ns(trace: Trace, rows: I64) -> I64:
    """How long each activity waited: from its launch, or the end of what its stream did before, to its start."""
    activities = trace.activities
    order = np.lexsort((activities.start_ns, activities.stream))
    before = np.full(len(activities), NO_TIME)
    stream = activities.stream[order]
    for place in np.flatnonzero(np.concatenate(([True], stream[1:] != stream[:-1]))) if len(order) else []:
        until = place + int(np.searchsorted(stream[place:], stream[place], side="right"))
        mine = order[place:until]
        before[mine[1:]] = np.maximum.accumulate(activities.end_ns[mine])[:-1]
    launch = activities.launch_ns[rows]
    waited = activities.start_ns[rows] - np.maximum(launch, before[rows])
    result: I64 = np.where(launch == NO_TIME, NO_TIME, np.maximum(waited, 0))
    return result


def _mechanisms(trace: Trace, rows: I64, owner: I64, total: int) -> list[str]:
    """How each collective moves its bytes: by kernels, by copies, by both, or on the CPU."""
    kind = trace.activities.kind[rows]
    by_kernel, by_copy, by_cpu = (np.zeros(total, np.bool_) for _ in range(3))
    by_kernel[owner[kind == KERNEL]] = True
    by_cpu[owner[kind == CPU_COLLECTIVE]] = True
    by_copy[owner[~np.isin(kind, (KERNEL, CPU_COLLECTIVE))]] = True
    said: list[str] = np.select(
        [by_cpu, by_kernel & by_copy, by_kernel], ["cpu", "mixed", "sm"], "copy_engine"
    ).tolist()
    return said


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
