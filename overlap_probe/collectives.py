"""Says what each device activity is: part of a collective, a GEMM, other compute, or a copy.

The idea: several witnesses may know that an activity belongs to a collective (a rule of the user's, the operation that
launched it, a range label around its launch, its own name), and the first that speaks is believed (design, section 3).
A label speaks for a whole range, in which a runtime also packs and unpacks; it therefore claims only the strongest
candidates of its range: communication kernels before copies, copies before other kernels, and nothing at all where a
rule or an operation has already named the collective inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from overlap_probe import kernels
from overlap_probe.labels import Label, LabelReader
from overlap_probe.nesting import Nesting
from overlap_probe.options import Options
from overlap_probe.results import OPS
from overlap_probe.tables import CPU_COLLECTIVE, I8, I32, I64, KERNEL, MEMCPY, MEMSET, NO_TIME, OPERATOR, Bool, Trace

BY_RULE, BY_OPERATION, BY_LABEL, BY_NAME = range(4)
FOUND_BY = ("rule", "operation", "label", "name")
UNKNOWN = OPS.index("unknown")


@dataclass(frozen=True)
class Classified:
    """Each activity's part in the analysis. Collectives are numbered in the order of their start."""

    collective: I64
    """Number of the collective that an activity belongs to, -1 for none."""
    is_gemm: Bool
    is_compute: Bool
    """GEMMs included; copies and memsets are neither compute nor collective."""
    op: I64
    """A collective's kind, an index into OPS."""
    found_by: I64
    """Index into FOUND_BY."""
    first: I64
    """Row of a collective's first activity."""
    units: tuple[str | None, ...]
    phases: tuple[str, ...]
    occasions: tuple[int, ...]
    """Row of the label that named the unit, -1 for none: calls under one label belong to one gathering of the unit."""
    by_order: bool = False
    """No label names a unit: a unit is a place in the order of calls, and nobody's child (`order`)."""

    @cached_property
    def count(self) -> int:
        return len(self.op)


def classify(trace: Trace, options: Options) -> Classified:
    """The part that every activity of a trace plays."""
    names = _Names(trace, options)
    labels = _Labels(trace, LabelReader(options.unit_labels))
    op, found_by, group = _witnesses(trace, names, labels)
    rows = np.flatnonzero(found_by >= 0)
    _, first, number = np.unique(group[rows], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    collective = np.full(len(trace.activities), -1, np.int64)
    collective[rows] = rank[number]
    first = rows[first[order]]
    is_kernel = np.isin(trace.activities.kind, (KERNEL, OPERATOR))
    is_compute = is_kernel & (collective < 0)
    around = labels.around(trace, first)
    return Classified(
        collective=collective,
        is_gemm=is_compute & names.gemm,
        is_compute=is_compute,
        op=op[first],
        found_by=found_by[first],
        first=first,
        units=tuple(labels.unit[r] if r >= 0 else None for r in around),
        phases=tuple(labels.phase[r] or "unknown" if r >= 0 else "unknown" for r in around),
        occasions=tuple(labels.named_unit[r] if r >= 0 else -1 for r in around),
    )


def launches(trace: Trace, rows: I64) -> tuple[I32, I64]:
    """Host thread and moment of the launch of some activities; their operation's, else NO_TIME, where it is unknown."""
    activities = trace.activities
    at = activities.launch_ns[rows].copy()
    operation = activities.operation[rows]
    by_operation = (at == NO_TIME) & (operation >= 0)
    at[by_operation] = trace.operations.start_ns[operation[by_operation]]
    return activities.launch_thread[rows], at


def _witnesses(trace: Trace, names: _Names, labels: _Labels) -> tuple[I64, I64, I64]:
    """Kind, witness (-1: no collective) and group of each activity; activities of one group are one collective."""
    activities = trace.activities
    everything = np.arange(len(activities))
    around = labels.around(trace, everything)
    call = np.where(around >= 0, labels.call[around], -1) if len(labels.call) else np.full(len(around), -1)
    found_by = np.select(
        [names.rule >= 0, names.by_operation, names.communication], [BY_RULE, BY_OPERATION, BY_NAME], default=-1
    )
    claimed = labels.claims(call, around, activities.kind, found_by, names.gemm)
    found_by[claimed] = BY_LABEL
    label_kind = np.where(call >= 0, labels.op[call], UNKNOWN) if len(labels.op) else np.full(len(call), UNKNOWN)
    # A witness that knows of a collective but not of its kind leaves the kind to the next.
    kinds = np.full(len(activities), UNKNOWN)
    for witness, said in enumerate((names.rule, names.operation_kind, label_kind, names.kind)):
        kinds = np.where((kinds == UNKNOWN) & (found_by <= witness), said, kinds)
    # One launching collective operation, else one innermost collective label, else each activity by itself.
    group = np.select(
        [names.in_operation, (call >= 0) & (found_by != BY_NAME)],
        [activities.operation, len(trace.operations) + call],
        default=len(trace.operations) + len(labels.call) + everything,
    )
    return kinds, found_by, group


class _Names:
    """What names alone say of each activity: a rule's kind, its operation's, the kernel's."""

    def __init__(self, trace: Trace, options: Options) -> None:
        activities, texts = trace.activities, trace.names
        used = np.unique(activities.name)
        gemm, excluded, communication = (np.zeros(len(texts), np.bool_) for _ in range(3))
        kind, rule = np.full(len(texts), UNKNOWN), np.full(len(texts), -1)
        for code in used:
            text = texts[code]
            gemm[code] = kernels.is_gemm_kernel(text) or kernels.is_matmul_operation(text)
            excluded[code] = kernels.is_not_gemm(text)
            communication[code] = kernels.is_communication_kernel(text) or kernels.is_gloo_row(text)
            kind[code] = OPS.index(kernels.kind_of(text)) if communication[code] else UNKNOWN
            rule[code] = next((OPS.index(k) for k, pattern in options.rules if pattern.search(text)), -1)
        self.kind, self.rule = kind[activities.name], rule[activities.name]
        self.communication = communication[activities.name]

        operations = trace.operations
        launched = activities.operation >= 0
        collective, matmul = (np.zeros(len(texts), np.bool_) for _ in range(2))
        said = np.full(len(texts), UNKNOWN)
        for code in np.unique(np.concatenate((operations.name, operations.collective, activities.collective))):
            if code >= 0:
                collective[code] = kernels.is_collective_operation(texts[code])
                matmul[code] = kernels.is_matmul_operation(texts[code])
                said[code] = OPS.index(kernels.kind_of(texts[code]))
        self.in_operation = np.zeros(len(activities), np.bool_)
        by_matmul = np.zeros(len(activities), np.bool_)
        self.operation_kind = np.where(activities.collective >= 0, said[activities.collective], UNKNOWN)
        if len(operations):
            operation = np.where(launched, activities.operation, 0)
            name, call = operations.name[operation], operations.collective[operation]
            self.in_operation = launched & (collective[name] | (call >= 0))
            by_matmul = launched & matmul[name]
            own = np.where(call >= 0, said[call], said[name])
            self.operation_kind = np.where(self.in_operation & (own != UNKNOWN), own, self.operation_kind)
        self.by_operation = self.in_operation | (activities.collective >= 0)
        on_device = np.isin(activities.kind, (KERNEL, OPERATOR))
        self.gemm = on_device & (gemm[activities.name] | by_matmul) & ~excluded[activities.name]


class _Labels:
    """The labels of a trace that some grammar knows, and what each inherits from the labels around it."""

    def __init__(self, trace: Trace, reader: LabelReader) -> None:
        ranges = trace.ranges
        read: dict[int, Label | None] = {int(code): reader.read(trace.names[code]) for code in np.unique(ranges.name)}
        known = np.array([code for code, label in read.items() if label], np.int64)
        rows = np.flatnonzero(np.isin(ranges.name, known))
        kept = ranges.take(rows)
        said = [read[int(code)] or Label() for code in kept.name]
        self.nesting = Nesting(kept.start_ns, kept.end_ns, kept.thread)
        self.op = np.array([OPS.index(label.op) if label.op else -1 for label in said], np.int64)
        self.call = np.full(len(said), -1, np.int64)
        """Row of the innermost label around each one (itself included) that is a call of a collective."""
        self.unit: list[str | None] = [label.unit for label in said]
        self.phase: list[str | None] = [label.phase for label in said]
        self.named_unit: list[int] = [row if label.unit is not None else -1 for row, label in enumerate(said)]
        parents = self.nesting.parent
        for row in np.lexsort((-kept.end_ns, kept.start_ns)):
            parent = parents[row]
            if self.op[row] == UNKNOWN and parent >= 0 and self.call[parent] >= 0:
                self.op[row] = self.op[self.call[parent]]
            self.call[row] = row if self.op[row] >= 0 else self.call[parent] if parent >= 0 else -1
            if parent < 0:
                continue
            if self.unit[row] is None:
                self.unit[row], self.named_unit[row] = self.unit[parent], self.named_unit[parent]
            if self.phase[parent] == "backward" or self.phase[row] is None:
                self.phase[row] = self.phase[parent]

    def around(self, trace: Trace, rows: I64) -> I64:
        """Row of the innermost label around the launch of each activity (its operation, where no launch is known)."""
        return self.nesting.innermost(*launches(trace, rows))

    def claims(self, call: I64, around: I64, kind: I8, found_by: I64, gemm: Bool) -> Bool:
        """Activities that a label makes part of its collective: the strongest candidates of its range."""
        if not len(self.call):
            return np.zeros(len(call), np.bool_)
        strength = np.select(
            [
                np.isin(found_by, (BY_RULE, BY_OPERATION)),
                found_by == BY_NAME,
                np.isin(kind, (MEMCPY, MEMSET)),
                (kind == KERNEL) & ~gemm,
            ],
            [4, 3, 2, 1],
        )
        best = np.zeros(len(self.call), np.int64)
        inside = np.flatnonzero(around >= 0)
        at, what = around[inside], strength[inside]
        while len(at):  # one step outwards a turn: a range holds what the ranges in it hold
            np.maximum.at(best, at, what)
            at = self.nesting.parent[at]
            at, what = at[at >= 0], what[at >= 0]
        claimed = (call >= 0) & (strength > 0) & (strength < 4) & (strength == best[call])
        result: Bool = claimed & (kind != CPU_COLLECTIVE)
        return result
