"""Infers what the activities of one stream waited for on others: a timeline does not show the events between streams.

The idea: a runtime gathers for compute and reduces what compute made, so most of it follows from what was launched
before what; the rest shows where something started right at the end of something else.

- Compute needs the gather of its unit, where labels name both. Else it needs every gather launched before it but for
  the last few: as few as the timeline allows count as gathered ahead.
- A gather needs what was launched before it on streams that neither compute nor communicate; any other collective needs
  the compute launched before it.
- What started right at the end of something launched before it was made to wait for that.

Nothing else limits how far gathers run ahead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from overlap_probe.pieces import Part, Piece
from overlap_probe.waits import AT_ONCE_NS, COPIES_AT_ONCE_NS, SMALL_QUEUE_NS


def infer_dependencies(pieces: Sequence[Piece], part: Part) -> None:
    """Fill in ``after``; the pieces of one rank, in order of start."""
    streams = set(part.measured.timeline.compute_streams.tolist())
    by_launch = sorted(pieces, key=lambda p: p.launch_ns)
    _compute_needs_gathers(by_launch, part, streams)
    _collectives_need_work(by_launch, streams)
    by_end = sorted(pieces, key=lambda p: p.end_ns)
    for p in pieces:
        if p.ready_ns - p.gates_ns > SMALL_QUEUE_NS:
            p.after += _ended_just_before(p, by_end)


def _compute_needs_gathers(by_launch: Sequence[Piece], part: Part, compute_streams: set[int]) -> None:
    unit_of_gather = part.measured.classified.units
    gathers: list[Piece] = []
    """Last piece of each gather, in order of launch."""
    of_unit: dict[str | None, Piece] = {}
    unsaid: list[tuple[Piece, int]] = []
    """Compute of which no label says what it needs, with the number of gathers launched before it."""
    for p in by_launch:
        if p.is_gather:
            if gathers and gathers[-1].collective == p.collective:
                gathers.pop()
            gathers.append(p)
            of_unit[unit_of_gather[p.collective]] = p
        elif p.is_compute and p.stream in compute_streams:
            unit = part.units[p.row]
            own = None if unit is None else of_unit.get(unit)
            if own is not None and own.end_ns <= p.start_ns:
                p.after.append(own)
            else:
                unsaid.append((p, len(gathers)))
    reached = np.maximum.accumulate(np.array([g.end_ns for g in gathers], np.int64))
    ended = np.searchsorted(reached, [p.start_ns for p, _ in unsaid], side="right").tolist()
    ahead = max((launched - n for (_, launched), n in zip(unsaid, ended, strict=True)), default=0)
    for (p, launched), n in zip(unsaid, ended, strict=True):
        needed = min(launched - max(ahead, 0), n)
        if needed > 0:
            p.after.append(gathers[needed - 1])


def _collectives_need_work(by_launch: Sequence[Piece], compute_streams: set[int]) -> None:
    latest: dict[int, Piece] = {}
    """What was launched last on each stream, collectives left out; on compute streams only compute."""
    for p in by_launch:
        on_compute_stream = p.stream in compute_streams
        if p.collective >= 0:
            wanted = (q for s, q in latest.items() if s != p.stream and (s in compute_streams) != p.is_gather)
            p.after += [q for q in wanted if q.end_ns <= p.ready_ns]
        elif p.is_compute or not on_compute_stream:
            latest[p.stream] = p


def _ended_just_before(p: Piece, by_end: Sequence[Piece]) -> list[Piece]:
    """What ended last on another stream before it was ready, if that was just before and it was launched earlier."""
    # Copies may wait for other ranks, too, which came a little later for the same reason.
    just_ns = AT_ONCE_NS if p.is_kernel or p.collective < 0 else COPIES_AT_ONCE_NS
    place = bisect_right(by_end, p.ready_ns, key=lambda q: q.end_ns) - 1
    while place >= 0 and p.ready_ns - by_end[place].end_ns <= just_ns:
        q = by_end[place]
        if q.stream != p.stream and q.launch_ns <= p.launch_ns and q.start_ns < p.start_ns:
            return [q]
        place -= 1
    return []
