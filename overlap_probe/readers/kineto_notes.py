"""Puts into plain words what makes a Kineto trace less than certain.

The idea: a note says how many of what, and what became of it; a note that means that device rows are missing from the
timeline is also ``incomplete``, so that no check can pass on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from overlap_probe.readers.json_stream import EventStream
from overlap_probe.readers.kineto_columns import Columns
from overlap_probe.readers.kineto_events import ACTIVITY, OPERATION, RANGE, part_of
from overlap_probe.readers.losses import declared_losses, lost_rows

_CATEGORY = re.compile(r'"cat"\s*:\s*"([^"]*)"')


class Notes:
    """The notes of one file; ``incomplete`` are those of ``all`` that say that device rows are missing."""

    def __init__(
        self,
        stream: EventStream[Any],
        left_out: Sequence[int],
        activities: Columns,
        calls: Columns,
        names: Sequence[str],
    ) -> None:
        self.all: tuple[str, ...] = ()
        self.incomplete: tuple[str, ...] = ()
        unread = self._about_text(stream)
        self._about_left_out(left_out)
        if lost := lost_rows(calls, activities, names, left_out[ACTIVITY] + unread):
            self._add(lost, rows_missing=True)
        for text in declared_losses(stream.metadata):
            self._add(text, rows_missing=True)

    def _about_text(self, stream: EventStream[Any]) -> int:
        """Returns how many device rows may be among the events that could not be read."""
        if stream.mended:
            self._add(f"{_count(stream.mended, 'event')} had broken JSON and could be mended")
        device_rows = sum(_may_have_device_rows(text) for _, text in stream.lost)
        if stream.lost:
            where = f"{_count(len(stream.lost), 'place')}, the first at byte {stream.lost[0][0]}"
            self._add(f"broken JSON had to be left out in {where}", rows_missing=device_rows > 0)
        return device_rows

    def _about_left_out(self, left_out: Sequence[int]) -> None:
        # A range may have been a window or named a unit: without it a check would look at something else.
        parts = ((ACTIVITY, "device row", True), (RANGE, "named range", True), (OPERATION, "host row", False))
        for part, where, rows_missing in parts:
            if left_out[part]:
                what = f"{_count(left_out[part], where)} had no usable time (none, or an end before the start)"
                self._add(f"{what} and had to be left out", rows_missing=rows_missing)

    def _add(self, note: str, rows_missing: bool = False) -> None:
        self.all += (note,)
        if rows_missing:
            self.incomplete += (note,)


def _may_have_device_rows(text: str) -> bool:
    categories = _CATEGORY.findall(text)
    return not categories or any(part_of(category) == ACTIVITY for category in categories)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
