"""Turns decoded events into columns, one piece of the trace at a time.

The idea: an event lives only until the numbers in it have been appended to packed arrays, so the memory needed is that
of the columns, not of the events. Texts become codes, and so do host threads; nothing is joined here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from overlap_probe.readers.kineto_events import CALL, OPERATION, RANGE, Event, part_of
from overlap_probe.readers.repeats import first_of_alike
from overlap_probe.readers.times import TimeColumn
from overlap_probe.tables import KERNEL, MEMCPY, MEMSET, NO_TIME

Columns = dict[str, npt.NDArray[np.int64]]
Key = TypeVar("Key")
Value = TypeVar("Value")

_IGNORED = RANGE + 1

_FAR, _SPAN_NS = 100, 1_000_000
"""Far from 0: so many times as far as the trace spans, or as this."""

_OF_COLLECTIVES = ("collective", "group", "sequence", "bytes")

_ELEMENT_BYTES = {
    "ComplexDouble": 16,
    **dict.fromkeys(("Double", "Long", "ComplexFloat", "UInt64"), 8),
    **dict.fromkeys(("Float", "Int", "ComplexHalf", "UInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz", "Float8_e5m2fnuz", "Float8_e8m0fnu"), 1),
}
"""Bytes of an element, by the name that c10 gives the type."""


class Codes(dict[Any, int]):
    """Numbers things in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code

    def of(self, text: str) -> int:
        """Code of a text, -1 for none."""
        return self[text] if text else -1


class Memo(dict[Key, Value], Generic[Key, Value]):
    """Computes the answer for a key once."""

    def __init__(self, compute: Callable[[Key], Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: Key) -> Value:
        self[key] = value = self._compute(key)
        return value


class ColumnBuilder:
    """Collects the rows of a trace, by the part that they play.

    ``names`` and ``threads`` hold the codes of texts and of (process, thread) pairs.
    """

    def __init__(self) -> None:
        self.names = Codes()
        self.threads = Codes()
        self._part_of: Memo[str, int] = Memo(lambda category: _IGNORED if (part := part_of(category)) is None else part)
        self._kind_of: Memo[str, int] = Memo(_kind_of)
        self._size_of: Memo[tuple[int, ...], int] = Memo(lambda sizes: min(prod(sizes), 2**31 - 1) if sizes else -1)
        self._operations_before = 0
        self._collectives: list[tuple[int, int, int, int, int]] = []
        self._parts = [_Part(columns) for columns in (self._activities, self._calls, self._operations, self._ranges)]

    def add(self, events: Sequence[Event]) -> None:
        """Append the rows of one piece."""
        part_of_category = self._part_of
        groups: tuple[list[Event], ...] = ([], [], [], [], [])
        for event in events:
            groups[part_of_category[event.cat]].append(event)
        for part, group in zip(self._parts, groups, strict=False):
            if group:
                part.append(group)

    def rows(self) -> tuple[list[Columns], list[int]]:
        """The columns of each part, in the order of the file, and the number of rows that were left out.

        Left out are rows that lack a time, end before they start, or are at time 0 although all others are far from 0
        and near each other: profilers write 0 for a time that they do not know.
        """
        tables = [part.columns() for part in self._parts]
        tables[OPERATION] |= self._columns_of_collectives()
        tables[CALL]["returned_ns"] = np.maximum(tables[CALL]["start_ns"], tables[CALL]["end_ns"])
        tables[CALL]["end_ns"] = tables[CALL]["start_ns"]  # a call is of use even if it does not say how long it took
        usable = [(t["start_ns"] != NO_TIME) & (t["end_ns"] >= t["start_ns"]) for t in tables]
        elsewhere = [ok & (t["start_ns"] != 0) for t, ok in zip(tables, usable, strict=True)]
        start, end = (
            np.concatenate([t[column][rows] for t, rows in zip(tables, elsewhere, strict=True)])
            for column in ("start_ns", "end_ns")
        )
        if len(start) and int(start.min()) > _FAR * max(int(end.max()) - int(start.min()), _SPAN_NS):
            usable = elsewhere
        kept = [t if ok.all() else take(t, ok) for t, ok in zip(tables, usable, strict=True)]
        return kept, [int((~ok).sum()) for ok in usable]

    def _activities(self, events: list[Event]) -> dict[str, list[int]]:
        args, names, kind_of, size_of = [event.args for event in events], self.names, self._kind_of, self._size_of
        return {
            "name": [names[event.name] for event in events],
            "kind": [kind_of[event.cat] for event in events],
            "device": [_first_known(e.args.device, e.args.in_device, _number(e.pid)) for e in events],
            "stream": [e.args.stream if e.args.stream >= 0 else _number(e.tid) for e in events],
            "correlation": [a.correlation for a in args],
            "external_id": [a.external_id or a.older_external_id for a in args],
            "collective": [names.of(a.collective) for a in args],
            "blocks": [size_of[a.grid] for a in args],
            "threads": [size_of[a.block] for a in args],
            "registers": [a.registers for a in args],
            "shared_bytes": [a.shared_bytes for a in args],
            "bytes": [a.bytes for a in args],
            "source": [a.from_device for a in args],
            "target": [a.to_device for a in args],
        }

    def _calls(self, events: list[Event]) -> dict[str, list[int]]:
        return self._ranges(events) | {
            "correlation": [event.args.correlation for event in events],
            "external_id": [event.args.external_id or event.args.older_external_id for event in events],
        }

    def _operations(self, events: list[Event]) -> dict[str, list[int]]:
        args, names = [event.args for event in events], self.names
        for row, a in enumerate(args, self._operations_before):
            if a.collective or a.group:
                moved = a.elements * _ELEMENT_BYTES.get(a.dtype, -1) if a.elements >= 0 else -1
                self._collectives.append((row, names.of(a.collective), names.of(a.group), a.sequence, max(moved, -1)))
        self._operations_before += len(events)
        return self._ranges(events) | {
            "external_id": [a.external_id or a.older_external_id for a in args],
            "shapes": [names[bytes(a.shapes).decode()] if a.shapes else -1 for a in args],
        }

    def _columns_of_collectives(self) -> Columns:
        """What only those few operations have that are collectives; -1 in all other rows."""
        row, *values = np.array(self._collectives, np.int64).reshape(-1, 5).T
        columns = {name: np.full(self._operations_before, -1, np.int64) for name in _OF_COLLECTIVES}
        for column, known in zip(columns.values(), values, strict=True):
            column[row] = known
        return columns

    def _ranges(self, events: list[Event]) -> dict[str, list[int]]:
        names, threads = self.names, self.threads
        return {
            "name": [names[event.name] for event in events],
            "thread": [threads[event.pid, event.tid] for event in events],
        }


class _Part:
    """The rows of one part; ``values`` gives the columns of a list of events, apart from their times."""

    def __init__(self, values: Callable[[list[Event]], dict[str, list[int]]]) -> None:
        self._values = values
        self._start, self._duration = TimeColumn(), TimeColumn()
        self._columns = {name: array("q") for name in values([])}

    def append(self, events: list[Event]) -> None:
        self._start.extend([event.ts for event in events])
        self._duration.extend([event.dur for event in events])
        for name, values in self._values(events).items():
            self._columns[name].fromlist(values)

    def columns(self) -> Columns:
        """All rows; NO_TIME where a start is not known, an end before the start where a duration is not known."""
        start, duration = self._start.nanoseconds(), self._duration.nanoseconds()
        columns = {name: np.array(values, np.int64) for name, values in self._columns.items()}
        return {"start_ns": start, "end_ns": np.where(duration < 0, start - 1, start + duration)} | columns


def take(columns: Columns, rows: npt.NDArray[Any]) -> Columns:
    """The same columns with only the rows that an index array or a mask selects, in that order."""
    return {name: values[rows] for name, values in columns.items()}


def without_repeats(columns: Columns) -> Columns:
    """The same rows, of those that are alike in every column only the first."""
    others = (values for name, values in columns.items() if name not in ("start_ns", "end_ns"))
    first = first_of_alike(columns["start_ns"], columns["end_ns"], others)
    return columns if first.all() else take(columns, first)


def _kind_of(category: str) -> int:
    return MEMCPY if "memcpy" in category.lower() else MEMSET if "memset" in category.lower() else KERNEL


def _first_known(*candidates: int) -> int:
    return next((candidate for candidate in candidates if candidate >= 0), -1)


def _number(label: int | str | None) -> int:
    """The number that a process or thread is labelled with (``stream 7``), -1 if there is none."""
    if isinstance(label, int):
        return label
    digits = re.search(r"\d{1,18}", label or "")
    return int(digits[0]) if digits else -1
