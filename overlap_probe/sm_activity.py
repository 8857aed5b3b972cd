"""Says how busy the device's SMs were while each collective ran.

The idea: samples are moments. Those inside a collective's intervals are found by binary search, and their sum is the
difference of two running sums, so any number of collectives costs one pass over the samples.
"""

from __future__ import annotations

import numpy as np

from overlap_probe.intervals import Intervals
from overlap_probe.tables import I64, SmSamples


def activity_of(samples: SmSamples, owner: I64, pieces: Intervals, count: int) -> list[tuple[float | None, int | None]]:
    """Mean percentage of SMs with work inside each of ``count`` collectives, one decimal, and the samples it is of.

    ``pieces`` are the collectives' intervals and ``owner`` whose each is. (None, 0) without a sample inside, and
    (None, None) for all where there is no sample of the device.
    """
    if not len(samples):
        return [(None, None)] * count
    first = np.searchsorted(samples.time_ns, pieces.start_ns)
    stop = np.searchsorted(samples.time_ns, pieces.end_ns)
    running = np.concatenate(([0], np.cumsum(samples.percent)))
    inside, total = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(inside, owner, stop - first)
    np.add.at(total, owner, running[stop] - running[first])
    return [(round(s / n, 1) if n else None, n) for s, n in zip(total.tolist(), inside.tolist(), strict=True)]
