"""Makes timelines by hand: a Trace of a few labels, operations and kernels, written down in microseconds.

The idea: a test says what ran when, in the order in which it is easiest to read; the builder turns names into codes,
sorts, and resolves the operation that launched each activity, as a reader would. Where a test does not care, everything
has the usual value: compute on stream 7, gathers on stream 20, all launched by the thread ``main``.

    t = Timeline()
    t.gather("layers.0", 100, 150, launch=90)
    t.gemm(150, 250)
    analysis = analyze(t.trace())
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from overlap_probe.labels import ROOT
from overlap_probe.results import Analysis, Collective
from overlap_probe.tables import (
    KERNEL,
    MEMCPY,
    MEMSET,
    NO_TIME,
    Activities,
    Device,
    Operations,
    Ranges,
    Trace,
)

GEMM = "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
RING = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PEER_COPY, LOCAL_COPY = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"
COMPUTE, GATHERS, REDUCES = 7, 20, 24
"""Streams."""


@dataclass
class Timeline:
    """One rank's timeline in the making. All times of its methods are microseconds."""

    rank: int | None = None
    world_size: int | None = None
    sms: int | None = 132
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    path: str = "trace.json"
    ahead_ns: int = 0
    """How far the clock of this rank's host is ahead: added to every time. (Not us: exact at any size.)"""
    _rows: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"activities": [], "operations": [], "ranges": []}
    )
    _names: dict[str, int] = field(default_factory=dict)

    def label(self, name: str, start: float, end: float, *, thread: str = "main") -> None:
        """A named range of a host thread (record_function, NVTX)."""
        self._add("ranges", start, end, name=self._code(name), thread=self._code(thread))

    def operation(
        self,
        name: str,
        start: float,
        end: float,
        *,
        thread: str = "main",
        collective: str | None = None,
        group: str | None = None,
        sequence: int = -1,
        shapes: str | None = None,
    ) -> int:
        """A host operation; what it returns is what ``operation=`` of an activity takes."""
        return self._add(
            "operations",
            start,
            end,
            name=self._code(name),
            thread=self._code(thread),
            collective=self._code(collective),
            group=self._code(group),
            sequence=sequence,
            shapes=self._code(shapes),
        )

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        stream: int = COMPUTE,
        launch: float | None = None,
        operation: int = -1,
        thread: str = "main",
        collective: str | None = None,
        blocks: int = -1,
        kind: int = KERNEL,
        source: int = -1,
        target: int = -1,
    ) -> None:
        """A kernel; ``collective`` is the ``Collective name`` of its own args."""
        self._add(
            "activities",
            start,
            end,
            name=self._code(name),
            kind=kind,
            stream=stream,
            launch_ns=NO_TIME if launch is None else self._ns(launch),
            launch_thread=self._code(thread),
            operation=operation,
            collective=self._code(collective),
            blocks=blocks,
            source=source,
            target=target,
        )

    def gemm(self, start: float, end: float, **options: Any) -> None:
        """A GEMM by its kernel's name, on the compute stream."""
        self.kernel(options.pop("name", GEMM), start, end, **options)

    def pointwise(self, start: float, end: float, **options: Any) -> None:
        """Compute that is no GEMM."""
        self.kernel(POINTWISE, start, end, **options)

    def copy(self, start: float, end: float, *, name: str = PEER_COPY, **options: Any) -> None:
        """A copy between two devices (LOCAL_COPY: inside one)."""
        options.setdefault("stream", GATHERS)
        self.kernel(name, start, end, kind=MEMCPY, **options)

    def memset(self, start: float, end: float, **options: Any) -> None:
        self.kernel("Memset (Device)", start, end, kind=MEMSET, **options)

    def call(
        self,
        label: str,
        start: float,
        end: float,
        *,
        launch: float | None = None,
        collective: str = "_allgather_base",
        kernel: str = RING,
        copies: Iterable[tuple[float, float]] = (),
        stream: int = GATHERS,
        group: str | None = None,
        sequence: int = -1,
        thread: str = "main",
        blocks: int = 24,
    ) -> None:
        """A collective under a label, launched by its own ``record_param_comms``: one kernel, or ``copies`` instead.

        The label spans the 2 us around the launch, which is 10 us before the start unless it is given.
        """
        launch = start - 10 if launch is None else launch
        self.label(label, launch - 1, launch + 1, thread=thread)
        call = self.operation(
            "record_param_comms",
            launch - 0.5,
            launch + 0.5,
            collective=collective,
            group=group,
            sequence=sequence,
            thread=thread,
        )
        how: dict[str, Any] = {"stream": stream, "launch": launch, "operation": call, "thread": thread}
        if copies:
            for a, b in copies:
                self.copy(a, b, source=0, target=1, **how)
        else:
            self.kernel(kernel, start, end, blocks=blocks, **how)

    def gather(self, unit: str | None, start: float, end: float, *, phase: str = "forward", **options: Any) -> None:
        """An all-gather of a unit (None: the root), labelled as fsdp_runtime does."""
        self.call(f"fsdp_runtime::all_gather {phase} ({unit or ROOT})", start, end, **options)

    def reduce_scatter(self, unit: str | None, start: float, end: float, **options: Any) -> None:
        """A reduce-scatter of a unit's gradients in the backward."""
        how = {"collective": "_reduce_scatter_base", "kernel": REDUCE, "stream": REDUCES} | options
        self.call(f"fsdp_runtime::reduce_scatter backward ({unit or ROOT})", start, end, **how)

    def trace(self) -> Trace:
        """The finished trace: sorted, validated, every operation found by its row."""
        order = sorted(range(len(self._rows["operations"])), key=lambda r: _place(self._rows["operations"][r]))
        row_of = {before: after for after, before in enumerate(order)}
        activities = sorted(self._rows["activities"], key=lambda r: (r["start_ns"], r["end_ns"]))
        activities = [r | {"operation": row_of.get(r["operation"], -1)} for r in activities]
        trace = Trace(
            path=self.path,
            format="kineto",
            names=tuple(self._names) or ("",),
            activities=_table(Activities, activities),
            operations=_table(Operations, [self._rows["operations"][r] for r in order]),
            ranges=_table(Ranges, sorted(self._rows["ranges"], key=_place)),
            rank=self.rank,
            world_size=self.world_size,
            device=Device("a device", self.sms),
            groups=self.groups,
        )
        trace.validate()
        return trace

    def _code(self, text: str | None) -> int:
        return -1 if text is None else self._names.setdefault(text, len(self._names))

    def _add(self, table: str, start: float, end: float, **columns: Any) -> int:
        rows = self._rows[table]
        rows.append({"start_ns": self._ns(start), "end_ns": self._ns(end)} | columns)
        return len(rows) - 1

    def _ns(self, us: float) -> int:
        return round(us * 1000) + self.ahead_ns


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return row["start_ns"], -row["end_ns"]


def _table(cls: Any, rows: list[dict[str, Any]]) -> Any:
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    return cls.from_columns(len(rows), **columns)


def forward(
    t: Timeline, at: float, children: Iterable[str], *, exposed: Iterable[str] = (), phase: str = "forward"
) -> float:
    """A pass over a root and its children; all children but the first overlap, unless they are named ``exposed``.

    Root and first child are gathered for 20 us each, one after another. Then each child's GEMM takes 100 us; the gather
    of the next child runs from 10 to 30 us into it, or, exposed, for 20 us after it. Returns the end of the last GEMM.
    """
    first, *others = children
    t.gather(None, at, at + 20, phase=phase)
    t.gather(first, at + 20, at + 40, phase=phase)
    at += 40
    for child in others:
        t.gemm(at, at + 100)
        late = child in set(exposed)
        start = at + 100 if late else at + 10
        t.gather(child, start, start + 20, phase=phase)
        at += 120 if late else 100
    t.gemm(at, at + 100)
    return at + 100


def gathers(analysis: Analysis, window: str = "whole") -> dict[str | None, Collective]:
    """The all-gathers of a window by unit; fails if two have the same."""
    found = [c for c in analysis.windows[window].collectives if c.op == "all_gather"]
    by_unit = {c.unit: c for c in found}
    assert len(by_unit) == len(found), "two gathers of one unit"
    return by_unit


def only(analysis: Analysis) -> Collective:
    """The one collective of a timeline."""
    (collective,) = analysis.whole.collectives
    return collective
