"""Joins rows of a trace by the identifiers that the profiler gave them.

The idea: every join is one sort and one binary search over whole columns. An identifier of 0 (or less) is none.
"""

from __future__ import annotations

import numpy as np

from overlap_probe.tables import I64, Bool


def row_of_key(keys: I64, wanted: I64, preferred: Bool | None = None) -> I64:
    """For each wanted key the row that has it, -1 where there is none.

    Of several rows with one key the first counts, but a ``preferred`` one before the others.
    """
    order = np.argsort(keys, kind="stable") if preferred is None else np.lexsort((~preferred, keys))
    ordered = keys[order]
    place = np.searchsorted(ordered, wanted)
    found = (wanted > 0) & (place < len(keys))
    found[found] = ordered[place[found]] == wanted[found]
    rows = np.full(len(wanted), -1, np.int64)
    rows[found] = order[place[found]]
    return rows


def latest_with_key(keys: I64, times_ns: I64, wanted: I64, before_ns: I64) -> I64:
    """For each wanted key the row that has it with the latest time up to ``before_ns``, else with the earliest; or -1.

    An identifier may occur twice (it wraps around); a launch precedes what it launches, unless clocks disagree.
    """
    order = np.lexsort((times_ns, keys))
    ordered = keys[order]
    first = np.searchsorted(ordered, wanted, side="left")
    stop = np.searchsorted(ordered, wanted, side="right")
    found = (wanted > 0) & (first < stop)
    rows = np.where(found, order[np.minimum(first, len(order) - 1)], -1) if len(order) else np.full(len(wanted), -1)
    for several in np.flatnonzero(found & (stop - first > 1)):
        candidates = order[first[several] : stop[several]]
        place = np.searchsorted(times_ns[candidates], before_ns[several], side="right") - 1
        rows[several] = candidates[max(place, 0)]
    return rows.astype(np.int64)
