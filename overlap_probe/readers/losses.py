"""Tells how many device rows a trace lacks.

The idea: a call that is followed by a device row with its correlation is a launch, so another call of the same name
without one means a lost row. That is only certain for kernel launches (a copy of nothing leaves no row), outside of a
stream capture (which launches nothing), and not at the very end (where the recording may have stopped first).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from overlap_probe.readers.joins import row_of_key
from overlap_probe.readers.kineto_columns import Columns
from overlap_probe.tables import Bool

_KERNEL_LAUNCH = re.compile(r"launch\w*kernel", re.IGNORECASE)
_CAPTURE = re.compile(r"stream(begin|end)capture", re.IGNORECASE)
_DECLARED = re.compile(r"dropped\D{0,20}([1-9]\d*)|([1-9]\d*)\D{0,40}\b(?:were )?dropped", re.IGNORECASE)

_EDGE_LAUNCHES, _EDGE_SHARE = 2, 0.01
"""So many of the last launches, or this share of all, may lack their rows without that being worth a note."""


def lost_rows(calls: Columns, activities: Columns, names: Sequence[str], left_out: int) -> str | None:
    """A sentence on launches whose device rows are missing, or None.

    ``left_out`` device rows are in the file but not among the activities: these are no losses of the profiler.
    """
    called = {code: names[code] for code in np.unique(calls["name"]).tolist()}
    launches = np.isin(calls["name"], [code for code, name in called.items() if _KERNEL_LAUNCH.search(name)])
    launches &= (calls["correlation"] > 0) & ~_captured(calls, called)
    answered = row_of_key(activities["correlation"], calls["correlation"]) >= 0
    proven = np.unique(calls["name"][launches & answered])
    rows = np.flatnonzero(launches & np.isin(calls["name"], proven))
    rows = rows[np.argsort(calls["start_ns"][rows], kind="stable")]
    if not len(rows):
        return None
    lost = ~answered[rows]
    at_end = len(rows) - 1 - int(np.flatnonzero(~lost)[-1])
    if at_end <= max(_EDGE_LAUNCHES, _EDGE_SHARE * len(rows)):
        lost = lost[: len(rows) - at_end]
    unmatched = int((activities["correlation"] <= 0).sum()) + left_out  # these may be the rows that seem to be missing
    missing = int(lost.sum()) - unmatched
    if missing <= 0:
        return None
    return f"{missing} of {len(rows)} kernel launches have no row on the device: the profiler dropped records"


def declared_losses(metadata: dict[str, Any]) -> list[str]:
    """What the profiler itself says about records that it dropped, in the keys beside the events."""
    return [f"the profiler says: {text}" for text in _texts(metadata) if _DECLARED.search(text)]


def _captured(calls: Columns, names: dict[int, str]) -> Bool:
    """Which calls lie inside a stream capture."""
    change = np.zeros(len(calls["name"]), np.int64)
    for code, name in names.items():
        if bound := _CAPTURE.search(name):
            change[calls["name"] == code] = 1 if bound[1].lower() == "begin" else -1
    order = np.argsort(calls["start_ns"], kind="stable")
    inside = np.zeros(len(change), np.bool_)
    inside[order] = np.cumsum(change[order]) > 0
    return inside


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value, nested however deeply, and each number with its key, as a text."""
    still_to_see = [value]
    while still_to_see:
        one = still_to_see.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from (f"{key}: {number}" for key, number in one.items() if isinstance(number, int))
            still_to_see += reversed(one.values())
        elif isinstance(one, list):
            still_to_see += reversed(one)
