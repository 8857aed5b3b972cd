"""What an analysis consists of: plain data, rendered by `render` and judged by `checks`.

The idea: one tree of frozen records is the seam between measuring and showing; it can be written as JSON (design,
section 4) and read back, so that everything shown can be shown again without the trace. All times are integer ns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast", "reduce", "unknown")
"""Kinds of collective; the first two are always reported, the others where they occur."""

PHASES = ("forward", "backward")
SEVERITY = ("pass", "inconclusive", "fail")
"""Values of a finding's and a verdict's status, the worst last."""


@dataclass(frozen=True, slots=True)
class Totals:
    """C of the design: a set of collectives of one window. Times are lengths of unions."""

    count: int = 0
    overlapped_by_gemm: int = 0
    time_ns: int = 0
    hidden_ns: int = 0
    hidden_by_gemm_ns: int = 0
    exposed_ns: int = 0
    stalled_ns: int = 0
    slowdown_ns: int | None = None
    net_hidden_ns: int | None = None
    """hidden_ns - slowdown_ns; None where the slowdown is not known."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The forward or the backward of a window. ``expected`` is None with 0 or 1 children."""

    all_gather: Totals
    reduce_scatter: Totals
    children: int = 0
    expected: int | None = None
    found: int = 0
    reduce_expected: int | None = None
    reduce_found: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective. ``exposed_ns`` = time_ns - hidden_ns; ``time_ns`` is the union of its activities."""

    op: str
    unit: str | None
    """FSDP unit by its label; `<root>` is the root, None is unknown."""
    phase: str
    """forward, backward or unknown."""
    mechanism: str
    """sm, copy_engine, mixed or cpu."""
    found_by: str
    """rule, operation, label or name."""
    start_ns: int
    end_ns: int
    launch_ns: int | None
    queue_ns: int | None
    time_ns: int
    hidden_ns: int
    hidden_by_gemm_ns: int
    exposed_ns: int
    stalled_ns: int
    overlapped: bool
    """Its intersection with the GEMMs is longer than --min-overlap."""
    pass_index: int
    """Counts the passes of its kind and phase in the trace: a pass ends when a unit is gathered again, or its window
    does."""
    name: str
    """Name of its first activity."""
    streams: tuple[int, ...]
    cause: str | None = None
    waited_for: str | None = None
    evidence: str | None = None
    wait_ns: int | None = None
    transfer_ns: int | None = None
    group: str | None = None
    """Process group, where the trace names it."""
    sequence: int | None = None
    """Position of the call in its group, where the trace has it."""
    sm_active_percent: float | None = None
    """Mean share of the SMs that had work while it ran; None where the trace has no sample of that time."""
    sm_samples: int | None = None
    """Samples that the mean is of; None where the trace has none of its device."""
    starved_ns: int | None = None
    """How long a thread of it waited for a core, at most, where that is why it overlaps no GEMM (`starvation`)."""
    index: int = 0
    """Position in the rank's list of all collectives, in order of start."""

    @property
    def issued_ns(self) -> int:
        """When it was launched; where the trace does not say, when it started."""
        return self.start_ns if self.launch_ns is None else self.launch_ns


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a phase of a window takes, all passes together, and would take; ns, None where it cannot be known.

    A pass takes from the start of the first of its compute and collectives to the end of the last.
    """

    now_ns: int
    all_hidden_ns: int | None = None
    """All-gathers run ahead, one after another on a stream of their own, and need no SMs to start: all are hidden that
    can be. Compute takes as long as it did."""
    no_waits_ns: int | None = None
    """No rank waits for another in a collective. None without the other ranks."""
    no_slowdown_ns: int | None = None
    """GEMMs beside collectives take what they take alone. None where the trace has no such GEMM to compare with."""
    host_in_time_ns: int | None = None
    """Everything is launched before it could start."""

    def __add__(self, other: WhatIf) -> WhatIf:
        """Both together; what one of them does not know, the sum does not."""

        def add(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        return WhatIf(
            self.now_ns + other.now_ns,
            add(self.all_hidden_ns, other.all_hidden_ns),
            add(self.no_waits_ns, other.no_waits_ns),
            add(self.no_slowdown_ns, other.no_slowdown_ns),
            add(self.host_in_time_ns, other.host_in_time_ns),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """W of the design: one stretch of one rank's timeline."""

    name: str
    communication: Totals
    by_op: dict[str, Totals]
    """all_gather and reduce_scatter always; others where they occur."""
    compute_ns: int
    gemm_ns: int
    forward: Phase
    backward: Phase
    collectives: tuple[Collective, ...]
    what_if: dict[str, WhatIf] = field(default_factory=dict)
    """By phase, where it was asked for."""

    @property
    def all_gather(self) -> Totals:
        return self.by_op["all_gather"]


@dataclass(frozen=True, slots=True)
class Lane:
    """Busy intervals of one row of a timeline picture, in ns: ``kind`` is gemm, compute, memory or an op of OPS."""

    stream: int
    kind: str
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything measured on one rank. ``windows`` holds ``whole`` first, then the steps in order of time."""

    path: str
    format: str
    rank: int | None
    world_size: int | None
    windows: dict[str, Window]
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    process: int | None = None
    device: int | None = None
    device_name: str | None = None
    lanes: tuple[Lane, ...] = ()
    """For pictures, of the window ``pictured``; not part of the JSON."""
    pictured: str = "whole"

    @property
    def quality(self) -> str:
        return "degraded" if self.notes or self.incomplete else "ok"

    @property
    def whole(self) -> Window:
        return self.windows["whole"]

    @property
    def steps(self) -> dict[str, Window]:
        """The windows that checks look at: all but ``whole`` where there are others."""
        others = {k: w for k, w in self.windows.items() if k != "whole"}
        return others or self.windows

    def to_frame(self) -> pd.DataFrame:
        """One row a collective of the step windows (of ``whole``, if there are none), columns as in the JSON."""
        from overlap_probe.render.frame import to_frame

        return to_frame(self)


@dataclass(frozen=True, slots=True)
class RunAnalysis:
    """Every rank of a run, in order of rank, joined."""

    ranks: tuple[Analysis, ...]
    problems: tuple[str, ...] = ()
    """Why no check on this run may pass: ranks that are missing."""
    record: dict[str, Any] = field(default_factory=dict)
    """How the run was made (versions, devices, arguments), where that is known."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check on one rank and window."""

    check: str
    status: str
    """pass, fail or inconclusive."""
    message: str
    """One line: what was found and what was wanted, or why the trace cannot answer."""
    rank: int | None = None
    trace: str = ""
    window: str | None = None
    value: float | int | None = None
    limit: float | int | None = None
    evidence: tuple[str, ...] = ()
    """Collectives that did not hold, one line each with cause."""
    process: int | None = None
    device: int | None = None
    """Which of the processes and devices of one file, as in its Analysis."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst of its findings: fail before inconclusive before pass."""

    status: str
    findings: tuple[Finding, ...]
