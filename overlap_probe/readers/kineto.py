"""Reads a trace of torch.profiler (Kineto JSON) into tables.

The idea: stream the events into columns (``json_stream.py``, ``kineto_columns.py``), then join whole columns: a device
row to the call with its correlation, to the operation with its External id, and where that is not known to the
innermost operation around the call. After that nothing is left of the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from overlap_probe.kernels import is_collective_operation
from overlap_probe.nesting import Nesting
from overlap_probe.readers.bytes_source import read_pieces
from overlap_probe.readers.joins import latest_with_key, row_of_key
from overlap_probe.readers.json_stream import EventStream
from overlap_probe.readers.kineto_columns import ColumnBuilder, Columns, take, without_repeats
from overlap_probe.readers.kineto_events import Event, ExactEvent, event_of
from overlap_probe.readers.kineto_metadata import device_of, groups_of, rank_of, waits_of, world_size_of
from overlap_probe.readers.kineto_notes import Notes
from overlap_probe.tables import I64, KERNEL, MEMCPY, NO_TIME, Activities, Operations, Ranges, Table, Trace

PIECE_BYTES = 1 << 17
"""Text decoded at a time. Its events stay in the processor's caches, and their memory is used again for the next."""

_STEP = "ProfilerStep#"
_COPY = re.compile(r"\b([HDPAU])to([HDPAU])\b")
_ON_DEVICE = "DA"
"""Letters of a copy's end in device memory (arrays are device memory); H is the host, P a peer that is not named."""


def read_kineto(path: Path, piece_bytes: int = PIECE_BYTES) -> list[Trace]:
    """The trace of each device on which kernels ran; one trace where there are none. Raises TraceError."""
    stream: EventStream[Event] = EventStream(path, read_pieces(path, piece_bytes), Decoder(), event_of)
    builder = ColumnBuilder()
    for events in stream:
        builder.add(events)
    parts, left_out = builder.rows()
    first_ns, last_ns = _span(parts)
    activities, calls, operations, ranges = map(without_repeats, parts)
    names = tuple(builder.names)
    operations, ranges = _steps_as_ranges(operations, ranges, names)
    activities = take(activities, np.lexsort((activities["end_ns"], activities["start_ns"])))
    operations, ranges = _outermost_first(operations), _outermost_first(ranges)
    waits, notes_on_waits = waits_of(stream.metadata, builder.threads, first_ns, last_ns)
    notes = Notes(stream, left_out, activities, calls, names)
    _join(activities, calls, operations, names)
    _fill_ends_of_copies(activities, names)
    device_of_row = _device_of_row(activities)
    devices = np.unique(device_of_row).tolist()
    several = len(devices) > 1
    processes = {process for process, _ in builder.threads if isinstance(process, int)}
    traces = []
    for device in devices or [None]:
        trace = Trace(
            path=str(path),
            format="kineto",
            names=names,
            activities=_table(Activities, take(activities, device_of_row == device) if several else activities),
            operations=_table(Operations, operations),
            ranges=_table(Ranges, ranges),
            rank=rank_of(stream.metadata, path),
            world_size=world_size_of(stream.metadata),
            device=device_of(stream.metadata, device),
            process=min(processes) if several and len(processes) == 1 else None,
            device_index=device if several else None,
            groups=groups_of(stream.metadata),
            notes=notes.all + notes_on_waits,
            incomplete=notes.incomplete,
            waits=waits,
        )
        trace.validate()
        traces.append(trace)
    return traces


class Decoder:
    """Decodes fast, and exactly from the first piece on in which a time is too large for a float."""

    def __init__(self) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[Event], strict=False)

    def __call__(self, text: bytes) -> list[Event]:
        try:
            events: list[Event] = self._decoder.decode(text)
        except msgspec.ValidationError:
            exact = msgspec.json.Decoder(list[ExactEvent], strict=False)
            events = list(exact.decode(text))
            self._decoder = exact
        return events


def _join(activities: Columns, calls: Columns, operations: Columns, names: tuple[str, ...]) -> None:
    """Add the columns ``launch_ns``, ``launch_thread`` and ``operation`` to the activities."""
    call = latest_with_key(calls["correlation"], calls["start_ns"], activities["correlation"], activities["start_ns"])
    launch_ns = _at(calls["start_ns"], call, NO_TIME)
    launch_thread = _at(calls["thread"], call, -1)

    collective = np.array([is_collective_operation(name) for name in names], np.bool_)[operations["name"]]
    collective |= operations["collective"] >= 0

    def with_external_id(rows: I64, external_id: I64) -> I64:
        found = row_of_key(operations["external_id"], external_id, collective)
        # Some traces repeat the correlation as the External id: then an operation has that number only by accident.
        around = (_at(operations["start_ns"], found, 0) <= launch_ns[rows]) & (
            launch_ns[rows] < _at(operations["end_ns"], found, 0)
        )
        return np.where((external_id == activities["correlation"][rows]) & (call[rows] >= 0) & ~around, -1, found)

    operation = with_external_id(np.arange(len(call)), activities["external_id"])
    unknown = np.flatnonzero((operation < 0) & (call >= 0))
    operation[unknown] = with_external_id(unknown, calls["external_id"][call[unknown]])
    unknown = unknown[operation[unknown] < 0]
    if len(unknown):
        near = np.flatnonzero(np.isin(operations["thread"], launch_thread[unknown]))
        thread = operations["thread"][near].astype(np.int32)
        nesting = Nesting(operations["start_ns"][near], operations["end_ns"][near], thread)
        around = nesting.innermost(launch_thread[unknown].astype(np.int32), launch_ns[unknown])
        operation[unknown] = _at(near, around, -1)

    activities["launch_ns"] = launch_ns
    activities["returned_ns"] = _at(calls["returned_ns"], call, NO_TIME)
    activities["operation"] = operation
    activities["launch_thread"] = np.where(call >= 0, launch_thread, _at(operations["thread"], operation, -1))


def _steps_as_ranges(operations: Columns, ranges: Columns, names: tuple[str, ...]) -> tuple[Columns, Columns]:
    """The same rows, with the profiler's steps among the ranges: an older one wrote them as operations."""
    is_step = np.array([name.startswith(_STEP) for name in names], np.bool_)[operations["name"]]
    if not is_step.any():
        return operations, ranges
    steps = take(operations, is_step)
    ranges = {column: np.concatenate((values, steps[column])) for column, values in ranges.items()}
    return take(operations, ~is_step), ranges


def _fill_ends_of_copies(activities: Columns, names: tuple[str, ...]) -> None:
    """Where a copy's args do not say which devices it reads and writes, its name does: ``Memcpy HtoD (...)``."""
    silent = (activities["kind"] == MEMCPY) & (activities["source"] < 0) & (activities["target"] < 0)
    for code in np.unique(activities["name"][silent]):
        if direction := _COPY.search(names[code]):
            rows = silent & (activities["name"] == code)
            for column, letter in zip(("source", "target"), direction.groups(), strict=True):
                if letter in _ON_DEVICE:
                    activities[column][rows] = activities["device"][rows]


def _device_of_row(activities: Columns) -> I64:
    """The device whose timeline each row belongs to: its own, but rows of a device without kernels join the busiest."""
    device = activities["device"]
    with_kernels, count = np.unique(device[(activities["kind"] == KERNEL) & (device >= 0)], return_counts=True)
    if not len(with_kernels):
        with_kernels, count = np.unique(device, return_counts=True)
    if not len(with_kernels):
        return device
    return np.where(np.isin(device, with_kernels), device, with_kernels[np.argmax(count)])


def _span(parts: Iterable[Columns]) -> tuple[int, int]:
    """The first and the last time of a trace; 0 and 0 without rows."""
    times = [(int(part["start_ns"].min()), int(part["end_ns"].max())) for part in parts if len(part["start_ns"])]
    return (min(start for start, _ in times), max(end for _, end in times)) if times else (0, 0)


def _outermost_first(rows: Columns) -> Columns:
    return take(rows, np.lexsort((-rows["end_ns"], rows["start_ns"])))


def _table(kind: type[Table], columns: Columns) -> Any:
    """The table whose columns these are among."""
    wanted = {name: values for name, values in columns.items() if name in kind.__dataclass_fields__}
    return kind.from_columns(len(columns["start_ns"]), **wanted)


def _at(values: I64, rows: I64, absent: int) -> I64:
    """``values[rows]``, and ``absent`` where a row is -1."""
    result = np.full(len(rows), absent, np.int64)
    result[rows >= 0] = values[rows[rows >= 0]]
    return result
