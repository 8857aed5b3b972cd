"""Simulates devices, the hosts that feed them and the peers that they wait for: what starts when, and what held it up.

The idea: everything that runs is a task on a first-in-first-out queue, and it starts when its gates are open: the queue
is free, what it comes after has ended, its device has room. A host thread is a queue like a stream (a launch is a task
that device work comes after, a synchronisation a host task that comes after device work); SMs and copy engines are
resources that tasks hold while they run; a collective is one task on each rank, of which none gets on before all have
started, so that kernels of it start apart and end together.

Kernels are persistent and their tiles run in waves: an elastic kernel starts with whatever room there is, holds all it
can get, and gives most of it back in its tail, the last wave, which does not fill the device. While it has less than it
wants it runs at ``short_speed``. All times are integer ns on one clock, of the simulation's own.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What a task holds of a resource (the SMs of a device, its copy engines) while it runs."""

    resource: Hashable
    amount: int
    elastic: bool = False
    """It starts with any free part of the amount, and takes more as it comes free; else it waits for all of it."""
    tail_ns: int = 0
    """The last stretch of an elastic task's work, in which it wants no more than ``tail_amount``."""
    tail_amount: int = 0
    short_speed: float = 1.0
    """How fast an elastic task gets on while it has less than it wants, as a share of its full speed."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: a kernel, a copy, a host call. A task is known by its position in the list that is simulated."""

    queue: Hashable
    """Stream or host thread: its tasks run one after another, in the order of the list."""
    work_ns: int
    """How long it takes with all the room that it wants, and once everyone whom it ``meets`` is there."""
    after: tuple[int, ...] = ()
    """Tasks that have to end first, earlier in the list or not."""
    earliest_ns: int = 0
    delay_ns: int = 0
    """From the opening of the gates above to the start, where there is room: what a launch takes to arrive."""
    room: Room | None = None
    meets: Hashable = None
    """Tasks that share it are one collective, one task a rank."""


@dataclass(slots=True)
class Ran:
    """When a task ran, and when each of its gates opened, in ns; ``start_ns`` is the first moment with room."""

    queue_free_ns: int = 0
    """End of the task before it on its queue; 0 for the first."""
    after_ns: int = 0
    """End of the last task that it came after; 0 without any."""
    ready_ns: int = 0
    """All gates but room were open, and the delay was over."""
    start_ns: int = 0
    met_ns: int = 0
    """The last of its collective had started; its own start without peers."""
    end_ns: int = 0


def simulate(tasks: Sequence[Task], amounts: Mapping[Hashable, int]) -> list[Ran]:
    """When each task ran; ``amounts`` says how much there is of each resource that a task holds.

    Raises ValueError if tasks wait for one another in a circle, or for more room than there is.
    """
    return _Simulation(tasks, amounts).run()


_READY, _TURN = range(2)
"""Events: a task's gates have opened; a running task ends or enters its tail."""


@dataclass(slots=True)
class _Running:
    """The state of a task that has started."""

    left: float
    """Work that is left at ``since_ns``."""
    since_ns: int
    held: int = 0
    speed: float = 0.0
    version: int = 0
    """Events of older versions are out of date."""

    def advance(self, now_ns: int) -> None:
        self.left -= (now_ns - self.since_ns) * self.speed
        self.since_ns = now_ns


class _Simulation:
    def __init__(self, tasks: Sequence[Task], amounts: Mapping[Hashable, int]) -> None:
        self.tasks = tasks
        self.ran = [Ran() for _ in tasks]
        self.free = dict(amounts)
        self.running: dict[int, _Running] = {}
        self.holders: dict[Hashable, list[int]] = defaultdict(list)
        self.waiting: dict[Hashable, list[int]] = defaultdict(list)
        self.events: list[tuple[int, int, int, int]] = []
        self.missing: dict[Hashable, int] = defaultdict(int)
        self.closed = [len(set(task.after)) for task in tasks]
        self.comes_after: list[list[int]] = [[] for _ in tasks]
        self.next_in_queue: dict[int, int] = {}
        last: dict[Hashable, int] = {}
        for number, task in enumerate(tasks):
            for other in set(task.after):
                self.comes_after[other].append(number)
            if task.queue in last:
                self.next_in_queue[last[task.queue]] = number
                self.closed[number] += 1
            last[task.queue] = number
            if task.meets is not None:
                self.missing[task.meets] += 1
        self.members: dict[Hashable, list[int]] = defaultdict(list)

    def run(self) -> list[Ran]:
        left = len(self.tasks)
        for number, closed in enumerate(self.closed):
            if not closed:
                self._gates_open(number, 0)
        while self.events:
            now, kind, number, version = heapq.heappop(self.events)
            if kind == _READY:
                self.ran[number].ready_ns = now
                self._arrive(number, now)
            elif number in self.running and self.running[number].version == version:
                left -= self._turn(number, now)
        if left:
            raise ValueError(f"{left} of {len(self.tasks)} tasks wait for one another, or for more room than there is")
        return self.ran

    def _gates_open(self, number: int, now: int) -> None:
        task = self.tasks[number]
        heapq.heappush(self.events, (max(now, task.earliest_ns) + task.delay_ns, _READY, number, 0))

    def _arrive(self, number: int, now: int) -> None:
        room = self.tasks[number].room
        if room is None:
            self._start(number, now)
        else:
            self.waiting[room.resource].append(number)
            self._settle(room.resource, now)

    def _start(self, number: int, now: int) -> None:
        task, ran = self.tasks[number], self.ran[number]
        ran.start_ns = ran.met_ns = now
        self.running[number] = _Running(float(task.work_ns), now)
        if task.meets is None:
            self._set_speed(number, now)
            return
        members = self.members[task.meets]
        members.append(number)
        if len(members) == self.missing[task.meets]:
            for member in members:
                self.ran[member].met_ns = now
                self._set_speed(member, now)

    def _turn(self, number: int, now: int) -> int:
        """End a task, or let it enter its tail; how many tasks ended."""
        running, room = self.running[number], self.tasks[number].room
        running.advance(now)
        if room is not None and running.left >= 0.5:
            self._settle(room.resource, now)
            return 0
        self.ran[number].end_ns = now
        del self.running[number]
        if room is not None:
            self.holders[room.resource].remove(number)
            self.free[room.resource] += running.held
            self._settle(room.resource, now)
        if number in self.next_in_queue:
            self.ran[self.next_in_queue[number]].queue_free_ns = now
            self._open_gate(self.next_in_queue[number], now)
        for other in self.comes_after[number]:
            self.ran[other].after_ns = now
            self._open_gate(other, now)
        return 1

    def _open_gate(self, number: int, now: int) -> None:
        self.closed[number] -= 1
        if not self.closed[number]:
            self._gates_open(number, now)

    def _settle(self, resource: Hashable, now: int) -> None:
        """Share a resource out again: tails give back, those that have too little take more, those that wait start."""
        holders, tasks = self.holders[resource], self.tasks
        for number in holders:
            running = self.running[number]
            running.advance(now)
            self._hold(number, min(running.held, self._wanted(number)))
        for number in holders:
            running = self.running[number]
            self._hold(number, min(running.held + self.free[resource], self._wanted(number)))
            self._set_speed(number, now)
        for number in list(self.waiting[resource]):
            room = tasks[number].room
            assert room is not None
            held = min(room.amount, self.free[resource])
            if held and (room.elastic or held == room.amount):
                self.waiting[resource].remove(number)
                holders.append(number)
                self._start(number, now)
                self._hold(number, held)
                self._set_speed(number, now)

    def _hold(self, number: int, amount: int) -> None:
        room, running = self.tasks[number].room, self.running[number]
        assert room is not None
        self.free[room.resource] += running.held - amount
        running.held = amount

    def _in_tail(self, number: int) -> bool:
        room = self.tasks[number].room
        return room is not None and self.running[number].left < room.tail_ns + 0.5

    def _wanted(self, number: int) -> int:
        """How much room a running task wants."""
        room = self.tasks[number].room
        assert room is not None
        return min(room.tail_amount, room.amount) if room.tail_ns and self._in_tail(number) else room.amount

    def _set_speed(self, number: int, now: int) -> None:
        """Bring a task's speed up to date, and with it the time of its next turn."""
        task, running, room = self.tasks[number], self.running[number], self.tasks[number].room
        if task.meets is not None and len(self.members[task.meets]) < self.missing[task.meets]:
            return
        running.advance(now)
        running.speed, left = 1.0, running.left
        if room is not None and running.held < self._wanted(number):
            running.speed = room.short_speed
        if room is not None and not self._in_tail(number):
            left -= room.tail_ns
        running.version += 1
        turn = now + max(round(left / running.speed), 1 if left >= 0.5 else 0)
        heapq.heappush(self.events, (turn, _TURN, number, running.version))
