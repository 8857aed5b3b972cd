"""Says what a forward or backward would take if one thing were different, so that a user knows what is worth doing.

The idea: a pass is replayed on the simulator, on all ranks at once, with one kind of gate or of time taken away. Each
answer is what the phase takes now, less what the change makes the replay shorter. Changes are made one at a time, on
all ranks, and do not add up. What is assumed: the host launches everything when it did, whatever happens on the device;
what is inferred of dependencies and ranks (`recording`) and of SMs (`sharing`) holds after the change, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from overlap_probe.overlap import Measured
from overlap_probe.peers import Member, clock_offsets, same_calls
from overlap_probe.pieces import Part, Piece
from overlap_probe.recording import let_meet, record
from overlap_probe.results import WhatIf
from overlap_probe.simulator import Room, Task, simulate
from overlap_probe.stretches import find_stretches, units_of_launches

WHOLE_DEVICE = 1 << 20
"""What a kernel holds that fills the device; a collective that needs SMs holds 1."""
LARGEST = 50_000
"""Activities of a stretch; larger ones are not replayed."""
FAITHFUL = 0.05
"""A replay of the unchanged stretch that is off by more than this share is not believed."""


class _Change(Enum):
    """What is different in a replay: nothing, or what the field of `WhatIf` of the same name says."""

    NOTHING = auto()
    ALL_HIDDEN = auto()
    NO_WAITS = auto()
    NO_SLOWDOWN = auto()
    HOST_IN_TIME = auto()


def what_if(measured: Sequence[Measured]) -> list[dict[tuple[str, str], WhatIf]]:
    """For each rank: the answer for every (window, phase) that gathers or reduce-scatters, and for the ``whole`` trace.

    ``measured`` are the ranks as `ranks.join` leaves them; unless their numbers are distinct each is by itself. The
    phase is ``unknown`` where no label names one. A CPU-only timeline has no answers.
    """
    calls = list(same_calls(measured))
    clocks = clock_offsets(calls, len(measured))
    parts: dict[tuple[str, str, int], dict[int, Part]] = defaultdict(dict)
    for rank, m in enumerate(measured):
        units = units_of_launches(m)
        for s in find_stretches(m):
            parts[s.window, s.phase, s.number][rank] = Part(m, s.rows, clocks[rank], units)
    results: list[dict[tuple[str, str], WhatIf]] = [{} for _ in measured]
    for (window, phase, _), by_rank in parts.items():
        for rank, answer in _answers(by_rank, calls).items():
            for key in {(window, phase), ("whole", phase)}:
                results[rank][key] = results[rank][key] + answer if key in results[rank] else answer
    return results


def _answers(parts: Mapping[int, Part], calls: Sequence[Sequence[Member]]) -> dict[int, WhatIf]:
    """The answer for each rank of one pass."""
    inside = {(rank, n) for rank, p in parts.items() for n in p.measured.classified.collective[p.rows].tolist()}
    together = [members for members in calls if all((m.rank, m.c.index) in inside for m in members)]
    ranks = {rank: record(rank, part) for rank, part in parts.items()}
    let_meet(ranks, parts, together)
    begins = {rank: min(p.start_ns for p in pieces if p.counts) for rank, pieces in ranks.items()}
    now = {rank: max(p.end_ns for p in pieces if p.counts) - begins[rank] for rank, pieces in ranks.items()}
    answers = {rank: WhatIf(ns) for rank, ns in now.items()}
    if sum(map(len, ranks.values())) > LARGEST:
        return answers
    try:
        replays = {change: _replay(ranks, begins, change) for change in _Change}
    except ValueError:  # the ranks' timelines contradict one another
        return answers
    for rank, pieces in ranks.items():
        base = replays[_Change.NOTHING][rank]
        if abs(base - now[rank]) > FAITHFUL * now[rank]:
            continue
        would = {change: now[rank] + ends[rank] - base for change, ends in replays.items()}
        all_met = {p.collective for p in pieces} - {-1} == {p.collective for p in pieces if p.meets is not None}
        comparable = all(p.alone_ns is not None for p in pieces if p.is_compute)
        answers[rank] = WhatIf(
            now[rank],
            would[_Change.ALL_HIDDEN],
            would[_Change.NO_WAITS] if all_met else None,
            would[_Change.NO_SLOWDOWN] if comparable else None,
            would[_Change.HOST_IN_TIME],
        )
    return answers


def _replay(ranks: Mapping[int, list[Piece]], begins: Mapping[int, int], change: _Change) -> dict[int, int]:
    """How long the pass takes on each rank, ns."""
    pieces = [p for some in ranks.values() for p in some]
    numbers = {id(p): number for number, p in enumerate(pieces)}
    zero = min(p.floor_ns for p in pieces)
    tasks = [_task(p, change, [numbers[id(q)] for q in p.after], zero, begins[p.rank]) for p in pieces]
    ran = simulate(tasks, {("sms", rank): WHOLE_DEVICE for rank in ranks})
    ends: dict[int, int] = defaultdict(int)
    for p, r in zip(pieces, ran, strict=True):
        if p.counts:
            ends[p.rank] = max(ends[p.rank], r.end_ns + zero - begins[p.rank])
    return ends


def _task(p: Piece, change: _Change, after: list[int], zero: int, begin: int) -> Task:
    """A piece as a task that starts, and takes, what it would with a change."""
    ahead, unslowed = change is _Change.ALL_HIDDEN, change is _Change.NO_SLOWDOWN
    if ahead and p.is_gather:
        return Task((p.rank, "gathers"), p.work_ns, earliest_ns=begin - zero, meets=p.meets)
    work = p.work_ns
    if ahead and p.is_compute:
        work = p.end_ns - p.start_ns
    elif unslowed and p.alone_ns is not None:
        work = p.alone_ns
    room = None
    if p.needs_sms and not ahead:
        room = Room(("sms", p.rank), 1)
    elif p.fills and not ahead:
        speed = 1.0 if unslowed else p.speed
        room = Room(("sms", p.rank), WHOLE_DEVICE, elastic=True, tail_ns=p.tail_ns, short_speed=speed)
    return Task(
        queue=(p.rank, p.stream),
        work_ns=work,
        after=tuple(after),
        earliest_ns=(p.floor_ns if change is _Change.HOST_IN_TIME else max(p.floor_ns, p.launch_ns)) - zero,
        delay_ns=p.delay_ns,
        room=room,
        meets=None if change is _Change.NO_WAITS else p.meets,
    )
