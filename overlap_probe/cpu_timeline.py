"""Turns a CPU-only timeline into device activities, so that the rest of the analysis knows only one kind of timeline.

The idea (design, section 3): gloo runs a collective on a thread of its own and says so in a ``gloo:*`` row; that row is
the collective, the operators of all other threads are the compute, and a thread plays the part of a stream. A row does
not name the call that caused it, but gloo works through its queue in order, so the n-th row of a family of collectives
belongs to the n-th call of that family.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from overlap_probe import kernels
from overlap_probe.nesting import Nesting
from overlap_probe.tables import CPU_COLLECTIVE, I64, OPERATOR, Activities, Trace


def with_cpu_activities(trace: Trace) -> Trace:
    """The trace with activities made of host rows; itself, if anything ran on a device or there is no gloo row."""
    gloo = np.array([kernels.is_gloo_row(n) for n in trace.names], np.bool_)
    rows = np.flatnonzero(gloo[trace.ranges.name]) if len(trace.ranges) else np.empty(0, np.int64)
    if len(trace.activities) or not len(rows):
        return trace
    ranges, operations = trace.ranges, trace.operations
    operators = _compute_rows(trace, rows)
    call, unpaired = _calls_of(trace, rows)
    paired = call >= 0
    activities = Activities.from_columns(
        len(rows) + len(operators),
        start_ns=np.concatenate((ranges.start_ns[rows], operations.start_ns[operators])),
        end_ns=np.concatenate((ranges.end_ns[rows], operations.end_ns[operators])),
        name=np.concatenate((ranges.name[rows], operations.name[operators])),
        kind=np.repeat([CPU_COLLECTIVE, OPERATOR], [len(rows), len(operators)]),
        stream=np.concatenate((ranges.thread[rows], operations.thread[operators])),
        launch_ns=np.concatenate(
            (
                np.where(paired, operations.start_ns[call], np.iinfo(np.int64).min),
                operations.start_ns[operators],
            )
        ),
        launch_thread=np.concatenate((np.where(paired, operations.thread[call], -1), operations.thread[operators])),
        operation=np.concatenate((call, operators)),
    )
    order = np.lexsort((activities.end_ns, activities.start_ns))
    notes = (f"{unpaired} of {len(rows)} gloo rows have no call in the trace",) if unpaired else ()
    return replace(trace, activities=activities.take(order), notes=trace.notes + notes)


def _compute_rows(trace: Trace, gloo_rows: I64) -> I64:
    """Operators that compute: innermost matmuls, and innermost operators of other kinds, outside of gloo's rows."""
    operations = trace.operations
    matmul = np.array([kernels.is_matmul_operation(n) for n in trace.names], np.bool_)[operations.name]
    compute = np.array([kernels.is_compute_operator(n) for n in trace.names], np.bool_)[operations.name]
    kept = np.concatenate([_innermost(trace, np.flatnonzero(matmul)), _innermost(trace, np.flatnonzero(compute))])
    gloo = trace.ranges.take(gloo_rows)
    inside = Nesting(gloo.start_ns, gloo.end_ns, gloo.thread).innermost(
        operations.thread[kept], operations.start_ns[kept]
    )
    return np.unique(kept[inside < 0])


def _innermost(trace: Trace, rows: I64) -> I64:
    """Those of some operations that enclose no other of them."""
    some = trace.operations.take(rows)
    parent = Nesting(some.start_ns, some.end_ns, some.thread).parent
    encloses = np.zeros(len(rows), np.bool_)
    encloses[parent[parent >= 0]] = True
    result: I64 = rows[~encloses]
    return result


def _calls_of(trace: Trace, rows: I64) -> tuple[I64, int]:
    """Row in Operations of the call that caused each gloo row (-1: none), and how many rows have none."""
    operations = trace.operations
    is_call = np.array([kernels.is_c10d_call(name) for name in trace.names], np.bool_)
    calls = _innermost(trace, np.flatnonzero(is_call[operations.name]))  # a functional call makes a c10d call
    owner = np.full(len(rows), -1, np.int64)
    families: dict[str, list[int]] = {}
    for call in calls:
        kind = kernels.kind_of(trace.names[operations.name[call]])
        families.setdefault(kernels.family_of(kind), []).extend([int(call)] * _number_of_rows(trace, call))
    by_family: dict[str, list[int]] = {}
    for place in np.argsort(trace.ranges.start_ns[rows], kind="stable"):
        kind = kernels.kind_of(trace.names[trace.ranges.name[rows[place]]])
        by_family.setdefault(kernels.family_of(kind), []).append(int(place))
    for family, places in by_family.items():
        queue = families.get(family, [])
        # Rows that began before the first call were caused before the trace began.
        places = [p for p in places if queue and trace.ranges.start_ns[rows[p]] >= operations.start_ns[queue[0]]]
        for place, call in zip(places, queue, strict=False):
            owner[place] = call
    return owner, int((owner < 0).sum())


def _number_of_rows(trace: Trace, call: int) -> int:
    """How many rows gloo runs a call as."""
    name = trace.names[trace.operations.name[call]]
    if kernels.runs_once_a_rank(name):
        return _ranks_of(trace, call)
    return _tensors_of(trace, call) if kernels.runs_once_a_tensor(name) else 1


def _tensors_of(trace: Trace, call: int) -> int:
    """Number of tensors in the list that a call takes first; 1 where the trace does not have their shapes."""
    shapes = trace.operations.shapes[call]
    try:
        arguments = json.loads(trace.names[shapes]) if shapes >= 0 else None
    except (ValueError, RecursionError):
        return 1
    first = arguments[0] if isinstance(arguments, list) and arguments else None
    return len(first) if isinstance(first, list) and first else 1


def _ranks_of(trace: Trace, call: int) -> int:
    """Number of ranks in the group of a call; of the world, where the trace does not name the group."""
    group = trace.operations.group[call]
    ranks = trace.groups.get(trace.names[group]) if group >= 0 else None
    return len(ranks) if ranks else trace.world_size or 1
