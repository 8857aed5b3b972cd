"""UnshardedStorage: which units of a tree are unsharded, and when the memory of each comes and goes.

A unit that ends is *released* later: it goes into a queue with an event on the stream that consumed it, and when it
leaves the queue the all-gather stream waits for that event before the storage goes back to the allocator. The host
never waits, and no tensor needs ``record_stream``: the storage was allocated on the all-gather stream, so whoever
gets its memory next is ordered behind the consumer.

The queue is also the bound: a unit is gathered ahead only if there is room, which the oldest in the queue makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .labels import Phase, annotate
from .parameter_group import ParameterGroup, State
from .schedule import Schedule
from .streams import CurrentStream, Switched


class UnshardedStorage:
    """Gathers units and releases them, on the all-gather stream (a serial schedule: on the caller's)."""

    def __init__(
        self, device: Any, current_stream: CurrentStream, all_gather_stream: Any, schedule: Schedule, target_length: int
    ) -> None:
        """device: the module that knows the streams. target_length: units that may wait for their release."""
        self._device = device
        self._current_stream = current_stream
        self._all_gather_stream = all_gather_stream
        self._concurrent = schedule.concurrent
        self._target_length = target_length
        # Beside the units that compute. With the one that computes and an outermost unit smaller than it, the peak
        # stays below ``target_length + 1 + max(1, depth)`` units.
        self._most = target_length + max(1, schedule.depth) - 1
        self._pending: deque[ParameterGroup] = deque()  # used; released in this order
        self._ahead: list[ParameterGroup] = []  # gathered before their turn

    @property
    def gather_stream(self) -> Any:
        """The stream that gathers run on, and that storage is allocated and freed on."""
        return self._all_gather_stream if self._concurrent else self._current_stream()

    def use(self, group: ParameterGroup, stream: Any, phase: Phase) -> None:
        """A unit's turn: ``stream``, the current one, goes on when it is gathered, and modules see its parameters."""
        if group.state is State.SHARDED:
            self._gather(group, self.gather_stream, stream, phase)
        elif group.state is State.AHEAD:
            self._ahead.remove(group)
        elif group.state is State.PENDING:
            self._pending.remove(group)
        group.state = State.IN_USE
        group.wait(stream)
        group.expose()

    def gather_ahead(self, groups: Sequence[ParameterGroup], stream: Any, phase: Phase) -> None:
        """Issues the gathers of units whose turn comes next, as far as there is room. stream: the current one."""
        for group in groups:
            if group.state is State.SHARDED and self._make_room(1, phase):
                self._gather(group, stream, stream, phase)
            elif group.state is State.PENDING:
                self._pending.remove(group)
            else:
                continue
            group.state = State.AHEAD
            self._ahead.append(group)

    def retire(self, group: ParameterGroup, stream: Any, phase: Phase) -> None:
        """Ends a unit's use: its storage goes when ``stream``, the current one, has done what was issued on it."""
        group.wait(stream)
        group.conceal()
        group.consumed.record(stream)
        group.state = State.PENDING
        self._pending.append(group)
        self._make_room(0, phase)

    def retire_unused(self, phase: Phase) -> None:
        """The same for what was gathered ahead, and whose turn did not come."""
        while self._ahead:
            self.retire(self._ahead.pop(), self._current_stream(), phase)

    def release_all(self, phase: Phase) -> None:
        """Releases everything that waits for it: back to resting."""
        self._release(0, phase)

    def discard(self, groups: Sequence[ParameterGroup]) -> None:
        """Ends every use and releases all of these units, whatever an aborted pass has left of them."""
        self._ahead.clear()
        self._pending.clear()
        for group in groups:
            if group.state is not State.SHARDED:
                self.retire(group, self._current_stream(), "forward")
        self.release_all("forward")

    def _gather(self, group: ParameterGroup, early: Any, caller: Any, phase: Phase) -> None:
        stream = self.gather_stream
        with Switched(self._device, stream, caller):
            group.gather(stream, early, phase)

    def _make_room(self, count: int, phase: Phase) -> bool:
        """Releases pending groups, oldest first, until ``count`` more may be gathered ahead. False: there is no room.

        That many, and never more than ``target_length``, stay pending.
        """
        room = self._most - len(self._ahead) - count
        self._release(min(self._target_length, max(0, room)), phase)
        return room >= 0

    def _release(self, length: int, phase: Phase) -> None:
        """Releases the oldest until so many are left."""
        while len(self._pending) > length:
            group = self._pending.popleft()
            self.gather_stream.wait_event(group.consumed)
            with annotate("release", phase, group.name):
                group.free()
            group.state = State.SHARDED
