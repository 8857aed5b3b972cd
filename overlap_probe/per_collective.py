"""Measures each collective by itself: how much of it hides, how long it queued, how it moves bytes, and its pass.

The idea: a collective is a number, and everything known of it an array over those numbers; the objects that the rest
of the analysis reads are made last, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from overlap_probe.collectives import FOUND_BY, Classified
from overlap_probe.options import Options
from overlap_probe.passes import Call, number_passes
from overlap_probe.results import OPS, Collective
from overlap_probe.sm_activity import activity_of
from overlap_probe.tables import CPU_COLLECTIVE, I64, KERNEL, NO_TIME, Trace
from overlap_probe.timeline import Timeline


def measure_collectives(
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
    stretches: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    for n in np.argsort(issued_ns, kind="stable").tolist():
        some = stretches[ops[n], classified.phases[n]]
        if not some or window_of[some[-1][-1]] != window_of[n]:
            some.append([])
        some[-1].append(n)
    result = [0] * len(ops)
    for some in stretches.values():
        begun = 0
        for stretch in some:
            numbers = number_passes([Call(classified.units[n], classified.occasions[n]) for n in stretch])
            for n, number in zip(stretch, numbers, strict=True):
                result[n] = begun + number
            begun += numbers[-1] + 1
    return result


def _queue_ns(trace: Trace, rows: I64) -> I64:
    """How long each activity waited: from its launch, or the end of what its stream did before, to its start."""
    activities = trace.activities
    order = np.lexsort((activities.start_ns, activities.stream))
    before = np.full(len(activities), NO_TIME)
    _, begins = np.unique(activities.stream[order], return_index=True)
    for mine in np.split(order, begins[1:]):
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
