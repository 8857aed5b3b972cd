"""Finds gathers that waited for compute because all of their pass did.

The idea: a runtime bounds memory by a rule: a gather waits until the compute of a unit some gathers back has ended and
its buffer is free. One gather that starts right after some compute may have come there by chance; all gathers of a pass
that start right after the compute that was launched equally many gathers back follow a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

import numpy as np

from overlap_probe.compute_streams import ComputeStreams
from overlap_probe.results import Collective
from overlap_probe.tables import I64, KERNEL, NO_TIME
from overlap_probe.waits import SMALL_QUEUE_NS, at_once_ns

MOST_LAG = 4
"""Rules that go further back than this many gathers are not looked for."""
LEAST_GATHERS = 3
"""As many gathers must show a rule."""


def steady_waits(passes: Iterable[Sequence[Collective]], work: ComputeStreams) -> dict[int, int]:
    """Row of the compute that a gather waited for, by the gather's index; only those of passes that follow a rule.

    ``passes`` are the gathers of each pass, in order of start.
    """
    activities = work.trace.activities
    rows = work.rows[(activities.kind[work.rows] == KERNEL) & (activities.launch_ns[work.rows] != NO_TIME)]
    rows = rows[np.argsort(activities.launch_ns[rows], kind="stable")]
    reach = np.maximum.accumulate(activities.end_ns[rows]) if len(rows) else rows
    found: dict[int, int] = {}
    for gathers in passes:
        # A gather that its stream packs for waits with its packing, of which nothing is told here.
        unpacked = [c for c in gathers if work.packed_for(int(work.classified.first[c.index])) is None]
        launched = sorted(((c.launch_ns, c) for c in unpacked if c.launch_ns is not None), key=itemgetter(0))
        calls = [c for _, c in launched]
        # How much compute had been launched when each gather was.
        compute = np.searchsorted(activities.launch_ns[rows], [at for at, _ in launched], side="left").tolist()
        for lag in range(min(MOST_LAG, len(calls))):
            waited = _follow(calls[lag:], compute[: len(calls) - lag], reach, gathers[0].start_ns)
            if len(waited) >= LEAST_GATHERS:
                found |= {index: int(rows[np.searchsorted(reach, end_ns)]) for index, end_ns in waited.items()}
                break
    return found


def _follow(gathers: Sequence[Collective], compute: Sequence[int], reach: I64, began_ns: int) -> dict[int, int]:
    """When the compute had ended that each gather waited for, ns; nothing if one of them did not wait for its own.

    ``compute`` is how much of it each gather waits for, in order of launch, ``reach`` the latest end of that much.
    """
    waited: dict[int, int] = {}
    for c, amount in zip(gathers, compute, strict=True):
        end_ns = int(reach[amount - 1]) if amount else began_ns
        if end_ns <= began_ns or (c.launch_ns or 0) > end_ns - SMALL_QUEUE_NS:
            continue  # there was nothing to wait for
        if not 0 <= c.start_ns - end_ns <= at_once_ns(c):
            return {}
        waited[c.index] = end_ns
    return waited
