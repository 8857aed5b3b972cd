"""Reads off a timeline why everything in a stretch of it started when it did, so that it can be replayed.

The idea: an activity starts when its last gate opens. Its launch and what its stream did before are in the timeline;
what it waited for on other streams, for SMs and on other ranks is inferred (`dependencies`, `sharing`, and here: a
collective begins to move data when all of its ranks have come, and then takes as long as it did). What is left between
the last gate and its start stays as a delay of its own: the replay of an unchanged stretch is the stretch itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from overlap_probe.dependencies import infer_dependencies
from overlap_probe.peers import Member
from overlap_probe.pieces import Part, Piece
from overlap_probe.results import OPS
from overlap_probe.room import fills_device, needs_sms
from overlap_probe.sharing import compare_speeds, find_waits_for_sms
from overlap_probe.tables import KERNEL, NO_TIME
from overlap_probe.waits import SMALL_QUEUE_NS


def record(rank: int, part: Part) -> list[Piece]:
    """One rank's pieces, in order of start. For which ranks they waited is filled in by `let_meet`."""
    pieces = _pieces(rank, part)
    find_waits_for_sms(pieces, part.measured.trace)
    infer_dependencies(pieces, part)
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
    a, rows, clock = trace.activities, part.rows, part.clock_ns
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
            fills=is_compute and fills_device(trace, row),
            before=before,
        )
        pieces.append(last[stream])
    for piece in pieces:
        piece.work_ns = piece.end_ns - piece.start_ns
    return pieces
