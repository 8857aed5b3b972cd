"""Reads off a timeline why everything in it started when it did, so that it can be replayed with one thing changed.

The idea: an activity starts when its last gate opens. Its launch and what its stream did before are in the timeline,
what else it waited for is inferred, and what is left between the last gate and its start stays as a delay of its own;
so the replay of an unchanged stretch is the stretch itself.

What is inferred, and assumed:

- Compute needs every gather launched before it, but for the last few: as few as the timeline allows count as gathered
  ahead. A gather needs what was launched before it on streams that neither compute nor communicate, any other collective
  the compute launched before it. What started right at the end of something launched before it was made to wait for that.
  Nothing else limits how far gathers run ahead.
- A collective begins to move data when all of its ranks have come, and then takes as long as it did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from overlap_probe.causes import AT_ONCE_NS, SMALL_QUEUE_NS, needs_sms
from overlap_probe.overlap import Measured
from overlap_probe.peers import Member
from overlap_probe.results import OPS
from overlap_probe.tables import I64, KERNEL, NO_TIME


@dataclass(frozen=True)
class Part:
    """One rank's part of a stretch."""

    measured: Measured
    rows: I64
    """Its activities, in order of start."""
    clock_ns: int
    """How far the rank's clock is ahead of the first one's."""


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


def record(rank: int, part: Part) -> list[Piece]:
    """One rank's pieces, in order of start.

    With whom they shared SMs is for `sharing.share_sms` to fill in, and then for `let_meet` whom they waited for.
    """
    pieces = _pieces(rank, part)
    _infer_dependencies(pieces, part)
    return pieces


def let_meet(ranks: Mapping[int, list[Piece]], parts: Mapping[int, Part], calls: Iterable[Sequence[Member]]) -> None:
    """Let the ranks of each collective wait for one another, as far as their timelines agree that they did.

    ``calls`` are the collectives of which all ranks are in the stretch.
    """
    of_collective: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for pieces in ranks.values():
        for p in pieces:
            of_collective[p.rank, p.collective].append(p)
    for number, members in enumerate(calls):
        pieces_of = [of_collective[m.rank, m.c.index] for m in members]
        firsts = [pieces[0] for pieces in pieces_of]
        if all(p.is_kernel for p in firsts):
            met = max(p.start_ns for p in firsts)
            if all(len(pieces) == 1 and p.end_ns >= met for pieces, p in zip(pieces_of, firsts, strict=True)):
                for p in firsts:
                    p.meets, p.work_ns = number, p.end_ns - met
        elif not any(p.is_kernel for p in firsts):
            waited = [parts[m.rank].measured.collectives[m.c.index].waited_for == "peer" for m in members]
            _meet_before_copies(number, firsts, waited, ranks)


def _meet_before_copies(
    number: int, firsts: Sequence[Piece], waited: Sequence[bool], ranks: Mapping[int, list[Piece]]
) -> None:
    """Copies start when all ranks have come; a rank that did not wait for others came when it started."""
    came = [p.gates_ns if for_peers else p.ready_ns for p, for_peers in zip(firsts, waited, strict=True)]
    started = min(p.start_ns for p in firsts)
    if max(came) > started + SMALL_QUEUE_NS:
        return
    met = min(max(came), started)
    for p, came_ns in zip(firsts, came, strict=True):
        meeting = replace(p, row=-1, start_ns=met, end_ns=met, work_ns=0, needs_sms=False, meets=number)
        meeting.delay_ns = max(min(came_ns, met) - p.gates_ns, 0)
        waits_for_sms = p.ready_ns < p.start_ns
        p.before, p.after, p.delay_ns = meeting, [], 0 if waits_for_sms else p.start_ns - met
        ranks[p.rank].insert(ranks[p.rank].index(p), meeting)


def _pieces(rank: int, part: Part) -> list[Piece]:
    trace, classified = part.measured.trace, part.measured.classified
    a, rows, clock, sms = trace.activities, part.rows, part.clock_ns, trace.device.sms
    in_stretch = np.zeros(len(a), np.bool_)
    in_stretch[rows] = True
    counts = classified.is_compute | (classified.collective >= 0)
    begun = int(a.start_ns[rows[counts[rows]]].min()) - clock
    pieces: list[Piece] = []
    last: dict[int, Piece] = {}
    for row in rows.tolist():
        start, end, stream = int(a.start_ns[row]) - clock, int(a.end_ns[row]) - clock, int(a.stream[row])
        launch = start if a.launch_ns[row] == NO_TIME else min(start, int(a.launch_ns[row]) - clock)
        number, is_kernel = int(classified.collective[row]), bool(a.kind[row] == KERNEL)
        is_compute = bool(classified.is_compute[row])
        before = last.get(stream)
        floor = min(begun, start)
        if before is None:
            earlier = a.end_ns[:row][(a.stream[:row] == stream) & ~in_stretch[:row]] - clock
            floor = min(start, max([floor, *earlier[-1:].tolist()]))
        else:  # of kernels of one stream that overlap, the first is over when the second starts
            before.end_ns = min(before.end_ns, start)
        last[stream] = Piece(
            rank=rank,
            row=row,
            stream=stream,
            start_ns=start,
            end_ns=end,
            ready_ns=start,
            launch_ns=launch,
            floor_ns=floor,
            collective=number,
            is_gather=number >= 0 and OPS[classified.op[number]] == "all_gather",
            is_compute=is_compute,
            is_kernel=is_kernel,
            needs_sms=number >= 0 and needs_sms(trace, row),
            fills=is_compute and is_kernel and sms is not None and bool(a.blocks[row] >= sms),
            before=before,
        )
        pieces.append(last[stream])
    for piece in pieces:
        piece.work_ns = piece.end_ns - piece.start_ns
    return pieces


def _infer_dependencies(pieces: list[Piece], part: Part) -> None:
    streams = set(part.measured.timeline.compute_streams.tolist())
    by_launch = sorted(pieces, key=lambda p: p.launch_ns)
    gathers: list[Piece] = []
    """Last piece of each gather, in order of launch."""
    launched: dict[int, int] = {}
    """Gathers launched before a piece of compute, by its row."""
    latest: dict[int, Piece] = {}
    """The piece launched last on each stream, collectives left out; of compute streams only compute."""
    for p in by_launch:
        if p.is_gather and (not gathers or gathers[-1].collective != p.collective):
            gathers.append(p)
        elif p.is_gather:
            gathers[-1] = p
        if p.collective >= 0:
            wanted = (q for s, q in latest.items() if s != p.stream and (s in streams) != p.is_gather)
            p.after += [q for q in wanted if q.end_ns <= p.start_ns]
        elif p.is_compute and p.stream in streams:
            launched[p.row] = len(gathers)
        if p.collective < 0 and (p.is_compute or p.stream not in streams):
            latest[p.stream] = p
    reached = np.maximum.accumulate(np.array([g.end_ns for g in gathers], np.int64))
    compute = [p for p in pieces if p.row in launched]
    ended = np.searchsorted(reached, [p.start_ns for p in compute], side="right").tolist()
    ahead = max((launched[p.row] - n for p, n in zip(compute, ended, strict=True)), default=0)
    for p, n in zip(compute, ended, strict=True):
        needs = min(launched[p.row] - max(ahead, 0), n)
        if needs > 0:
            p.after.append(gathers[needs - 1])
    by_end = sorted(pieces, key=lambda p: p.end_ns)
    for p in pieces:
        if p.start_ns - p.gates_ns > SMALL_QUEUE_NS:
            p.after += _ended_just_before(p, by_end)


def _ended_just_before(p: Piece, by_end: Sequence[Piece]) -> list[Piece]:
    """What ended last on another stream before it started, if that was just before and it was launched earlier."""
    place = bisect_right(by_end, p.start_ns, key=lambda q: q.end_ns) - 1
    while place >= 0 and p.start_ns - by_end[place].end_ns <= AT_ONCE_NS:
        q = by_end[place]
        if q.stream != p.stream and q.launch_ns <= p.launch_ns and q.start_ns < p.start_ns:
            return [q]
        place -= 1
    return []

