"""Schedules: when a unit's all-gather is issued.

The context asks a schedule two things only: how many units to gather ahead of the one that computes, and whether
communication has streams of its own. Everything else (the recorded order, memory, events) is the same for all of
them, so a schedule is data, and a new idea is a new value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import FsdpError

ScheduleName = Literal["auto", "serial", "implicit", "prefetch"]


@dataclass(frozen=True)
class Schedule:
    """What the context needs to know.

    depth: units gathered ahead, in the order recorded in the previous pass; 0 gathers each unit when its turn comes.
    concurrent: communicate on the context's streams, beside the caller's; False gathers on the caller's.
    """

    depth: int = 0
    concurrent: bool = True

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise FsdpError(f"schedule: depth must not be negative, got {self.depth}")


@dataclass(frozen=True)
class Serial(Schedule):
    """Gather, compute, gather, compute: everything on the caller's stream, nothing overlaps. The negative control."""

    depth: int = 0
    concurrent: bool = False


@dataclass(frozen=True)
class Implicit(Schedule):
    """Gather on the all-gather stream when the unit's turn comes.

    It overlaps because the host runs ahead of the device: the gather of unit k + 1 is issued while unit k still
    computes. On a CPU the host is the stream, cannot run ahead of itself, and nothing overlaps.
    """

    depth: int = 0
    concurrent: bool = True


@dataclass(frozen=True)
class Prefetch(Schedule):
    """Before a unit computes, issue the gathers of the next ``depth`` units: overlaps even if the host is late."""

    depth: int = 1
    concurrent: bool = True


_BY_NAME: dict[str, Schedule] = {
    "auto": Prefetch(depth=1),
    "serial": Serial(),
    "implicit": Implicit(),
    "prefetch": Prefetch(depth=1),
}


def resolve_schedule(schedule: Schedule | ScheduleName) -> Schedule:
    """The schedule of that name; a Schedule stays itself. Raises FsdpError for an unknown name."""
    if isinstance(schedule, Schedule):
        return schedule
    if schedule not in _BY_NAME:
        raise FsdpError(f"schedule: expected one of {', '.join(_BY_NAME)} or a Schedule, got {schedule!r}")
    return _BY_NAME[schedule]
