"""What a recorded stretch of a timeline consists of: its activities, and the gates that each of them passed.

The idea: an activity starts when its last gate opens. Its launch and what its stream did before are in the timeline,
what else it waited for is inferred, and what is left between the last gate and its start stays as a delay of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from overlap_probe.overlap import Measured
from overlap_probe.tables import I64


@dataclass(frozen=True)
class Part:
    """One rank's part of a stretch."""

    measured: Measured
    rows: I64
    """Its activities, in order of start."""
    clock_ns: int
    """How far the rank's clock is ahead of the first one's."""
    units: Sequence[str | None]
    """Of every activity of the trace: the unit whose label the host had opened last when it launched it."""


@dataclass(slots=True, eq=False)
class Piece:
    """One activity of one rank, or the meeting before the copies of a collective. Times by the first rank's clock."""

    rank: int
    row: int
    """-1 for a meeting."""
    stream: int
    start_ns: int
    end_ns: int
    ready_ns: int
    """When it could have started, had there been SMs: its start if it did not wait for them."""
    launch_ns: int
    floor_ns: int
    """No change lets it start earlier: the beginning of the stretch, or the end of what its stream did before."""
    collective: int
    is_gather: bool
    is_compute: bool
    is_kernel: bool
    needs_sms: bool
    """It is part of a collective and cannot run without SMs."""
    fills: bool
    """It is compute whose grid fills the device."""
    before: Piece | None
    """The one before it on its stream."""
    after: list[Piece] = field(default_factory=list)
    """What else it waits for."""
    delay_ns: int = 0
    """From the last gate that is known until it is ready."""
    work_ns: int = 0
    """How long it takes once it runs and all ranks have come."""
    alone_ns: int | None = None
    """How long it would take with no collective beside it; None where it ran beside one and the trace does not say."""
    speed: float = 1.0
    """How fast it gets on beside a collective that holds SMs."""
    tail_ns: int = 0
    meets: Hashable = None
    """Shared by the pieces of all ranks that wait for one another."""

    @property
    def is_meeting(self) -> bool:
        return self.row < 0

    @property
    def counts(self) -> bool:
        """It is compute or moves data of a collective: the pass is not over before it is."""
        return self.is_compute or (self.collective >= 0 and not self.is_meeting)

    @property
    def gates_ns(self) -> int:
        """When the last of its gates opened that are known."""
        gates = [self.floor_ns, self.launch_ns, *(p.end_ns for p in self.after)]
        return max(gates if self.before is None else [*gates, self.before.end_ns])
