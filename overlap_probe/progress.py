"""What a rank tells its launcher while it works: one JSON line an event, appended to a file.

The idea: a file that only grows survives whatever happens to its writer, and its age is a sign of life. The launcher
follows the file; nothing is ever sent back. A process that no launcher listens to reports to nobody, at no cost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_S = 1.0
"""A heartbeat is written at most this often."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a rank, or in the agent."""

    kind: str
    """pid, state, note, info, wrote, error, failures, beat or end."""
    value: Any
    """Plain JSON."""
    time_ns: int
    """Since the epoch."""


Listener = Callable[[Event], None]


def to_file(path: Path) -> Listener:
    """A listener that appends to ``path``: one short write an event, so a reader sees whole lines or a missing tail."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def listen(event: Event) -> None:
        if event.kind == "beat":
            os.utime(descriptor)
        else:
            os.write(descriptor, json.dumps([event.kind, event.value, event.time_ns]).encode() + b"\n")

    return listen


class Progress:
    """This process's reports. ``listener`` is None where nobody listens."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._next_beat = 0.0

    def report(self, kind: str, value: Any = None) -> None:
        """Tell the launcher that ``kind`` happened."""
        if self.listener is not None:
            self.listener(Event(kind, value, time.time_ns()))

    def beat(self) -> None:
        """Say that this process is alive; cheap enough for every step of a training loop."""
        if self.listener is not None and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self.report("beat")


PROGRESS = Progress()
"""The one of this process: the worker sets its listener, the capture reports to it."""


class Follower:
    """Reads the events that were appended to a file since the last call; a file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_events(self) -> list[Event]:
        """What came since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                tail = file.read()
        except FileNotFoundError:
            return []
        complete = tail[: tail.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [Event(*json.loads(line)) for line in complete.splitlines()]
