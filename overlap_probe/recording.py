"""Reads off a timeline why everything in it started when it did, so that it can be replayed with one thing changed.

The idea: an activity starts when its last gate opens. Its launch and what its stream did before are in the timeline,
what else it waited for is inferred, and what is left between the last gate and its start stays as a delay of its own;
so the replay of an unchanged stretch is the stretch itself.

What is inferred, and assumed:

- Compute needs the gather of its unit, where labels name both. Else it needs every gather launched before it but for the
  last few: as few as the timeline allows count as gathered ahead. A gather needs what was launched before it on streams that neither compute nor communicate, any other
  collective the compute launched before it. What started right at the end of something launched before it was made to
  wait for that. Nothing else limits how far gathers run ahead.
- A collective begins to move data when all of its ranks have come, and then takes as long as it did.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from overlap_probe.causes import AT_ONCE_NS, SMALL_QUEUE_NS, needs_sms
from overlap_probe.peers import Member
from overlap_probe.pieces import Part, Piece
from overlap_probe.results import OPS
from overlap_probe.sharing import compare_speeds, find_waits_for_sms
from overlap_probe.tables import KERNEL, NO_TIME


def record(rank: int, part: Part) -> list[Piece]:
    """One rank's pieces, in order of start. For which ranks they waited is filled in by `let_meet`."""
    pieces = _pieces(rank, part)
    find_waits_for_sms(pieces)
    _infer_dependencies(pieces, part)
    for p in pieces:
        p.delay_ns = p.ready_ns - p.gates_ns
    compare_speeds(pieces, part.measured)
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
    """Its activities as they stand in the timeline."""
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
    """Fill in what pieces of one stream waited for on others."""
    streams = set(part.measured.timeline.compute_streams.tolist())
    by_launch = sorted(pieces, key=lambda p: p.launch_ns)
    gathers: list[Piece] = []
    """Last piece of each gather, in order of launch."""
    launched: dict[int, int] = {}
    """Gathers launched before a piece of compute, by its row."""
    of_unit: dict[str | None, Piece] = {}
    """Last piece of each unit's gather."""
    needed: dict[int, Piece] = {}
    """What a piece of compute needs of its unit's gather, by its row."""
    names = part.measured.classified.units
    latest: dict[int, Piece] = {}
    """The piece launched last on each stream, collectives left out; of compute streams only compute."""
    for p in by_launch:
        if p.is_gather and (not gathers or gathers[-1].collective != p.collective):
            gathers.append(p)
        elif p.is_gather:
            gathers[-1] = p
        if p.is_gather:
            of_unit[names[p.collective]] = p
        if p.collective >= 0:
            wanted = (q for s, q in latest.items() if s != p.stream and (s in streams) != p.is_gather)
            p.after += [q for q in wanted if q.end_ns <= p.ready_ns]
        elif p.is_compute and p.stream in streams:
            launched[p.row] = len(gathers)
            unit = part.units[p.row]
            if unit is not None and unit in of_unit and of_unit[unit].end_ns <= p.start_ns:
                needed[p.row] = of_unit[unit]
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
        if p.ready_ns - p.gates_ns > SMALL_QUEUE_NS:
            p.after += _ended_just_before(p, by_end)


def _ended_just_before(p: Piece, by_end: Sequence[Piece]) -> list[Piece]:
    """What ended last on another stream before it was ready, if that was just before and it was launched earlier."""
    # Copies may wait for other ranks, too, which came a little later for the same reason.
    just_ns = AT_ONCE_NS if p.is_kernel or p.collective < 0 else 2 * SMALL_QUEUE_NS
    place = bisect_right(by_end, p.ready_ns, key=lambda q: q.end_ns) - 1
    while place >= 0 and p.ready_ns - by_end[place].end_ns <= just_ns:
        q = by_end[place]
        if q.stream != p.stream and q.launch_ns <= p.launch_ns and q.start_ns < p.start_ns:
            return [q]
        place -= 1
    return []
