"""Reads what Nsight Systems recorded: the SQLite database that it exports, or a report that ``nsys`` can export here.

The idea: a database holds all processes and devices of a run. Everything is read once, as columns of the whole file,
and then cut into one Trace for each process on each device; no row is ever an object. A database needs no ``nsys``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from overlap_probe.errors import TraceError
from overlap_probe.nesting import Nesting
from overlap_probe.readers.kineto_metadata import rank_of
from overlap_probe.readers.nsys_device import (
    NO_PROCESS,
    Calls,
    DeviceRows,
    has_a_time,
    launches_of,
    process_id,
    process_of,
    read_calls,
    read_device_rows,
    timeline_of,
)
from overlap_probe.readers.nsys_export import as_database
from overlap_probe.readers.nsys_gpus import read_devices, read_sm_samples
from overlap_probe.readers.nsys_nvtx import HostRanges, Names, read_ranges
from overlap_probe.readers.nsys_quality import Notes, Quality
from overlap_probe.readers.nsys_schema import Database
from overlap_probe.tables import I64, NO_TIME, Activities, Bool, Device, Operations, Ranges, SmSamples, Trace

_NO_DEVICE = -1


def read_nsys(path: str | Path) -> list[Trace]:
    """The timelines in an export of Nsight Systems: a Trace for each process on each device, in the order of these.

    A file in which nothing ran on a device gives one Trace without rows and with a note. A report (``.nsys-rep``) is
    exported first, which needs ``nsys`` on the PATH. ``rank`` is that of the file's name, because the database does not
    say it, and None if the file holds several timelines.

    Raises:
        TraceError: no database, cut off or damaged, of another program, or a report that cannot be exported.
    """
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix="overlap_probe_") as folder:
        try:
            traces = _read(as_database(path, Path(folder)))
        except TraceError as error:
            raise TraceError(path, error.problem, error.hint) from error
    rank = rank_of({}, path) if len(traces) == 1 else None
    return [replace(trace, path=str(path), rank=rank) for trace in traces]


def _read(path: Path) -> list[Trace]:
    names = Names()
    with Database(path) as database:
        calls, ranges = read_calls(database), read_ranges(database, names)
        rows = _with_the_only_process(read_device_rows(database, names), calls)
        quality = Quality(database, calls, rows, names)
        device_of, samples_of = read_devices(database), read_sm_samples(database)
    file = _File(names, calls, ranges, rows, quality, device_of, samples_of)
    traces = file.traces() or [_nothing_ran()]
    for trace in traces:
        trace.validate()
    return traces


def _with_the_only_process(rows: DeviceRows, calls: Calls) -> DeviceRows:
    """Rows that do not name their process belong to the only one that called anything, if there is only one."""
    known = np.unique(calls.process[calls.process != NO_PROCESS])
    if len(known) != 1:
        return rows
    return replace(rows, process=np.where(rows.process == NO_PROCESS, known[0], rows.process))


def _nothing_ran() -> Trace:
    note = "nothing ran on a device, or it was not recorded (profile with: nsys profile --trace cuda,nvtx)"
    none = Activities.from_columns(0), Operations.from_columns(0), Ranges.from_columns(0)
    return Trace("", "nsys", (), *none, notes=(note,))


@dataclass(frozen=True, slots=True)
class _Host:
    """What one process did on the host."""

    operations: Operations
    ranges: Ranges
    nesting: Nesting
    """Of the operations."""
    notes: Notes
    """On the process: those that all of its timelines share."""


class _File:
    """The columns of a whole file, ready to be cut."""

    def __init__(
        self,
        names: Names,
        calls: Calls,
        ranges: HostRanges,
        rows: DeviceRows,
        quality: Quality,
        device_of: Callable[[int | None, int], Device],
        samples_of: Callable[[int | None, int], SmSamples],
    ) -> None:
        self._calls, self._ranges, self._rows, self._quality = calls, ranges, rows, quality
        self._device_of, self._samples_of = device_of, samples_of
        self._launched_by, self._timed, self._timeline = launches_of(rows, calls), has_a_time(rows), timeline_of(rows)
        self._unnamed = names.code("<no name>")
        self._call_thread = names.codes(calls.thread, _thread_name)
        self._range_thread = names.codes(ranges.thread, _thread_name)
        self._range_process = process_of(ranges.thread)
        self._names = tuple(names)

    def traces(self) -> list[Trace]:
        """A trace for each process on each device, and for each process that lacks all of its device rows."""
        pairs = {*zip(self._rows.process.tolist(), self._timeline.tolist(), strict=True), *self._quality.graphs}
        pairs |= {(process, _NO_DEVICE) for process in self._quality.silent}
        hosts = {process: self._host(process) for process, _ in pairs}
        return [self._trace(hosts[process], process, device) for process, device in sorted(pairs)]

    def _host(self, process: int) -> _Host:
        """Operations and labels of a process. A range without an end lasts until the last time of the process."""
        ranges, notes = self._ranges, self._quality.of_process(process)
        mine = np.flatnonzero(self._range_process == process)
        start_ns, end_ns = ranges.start_ns[mine], ranges.end_ns[mine]
        endless = end_ns == NO_TIME
        if endless.any():
            notes.add(f"{endless.sum()} NVTX ranges have no end in the file and count until the end of the trace")
            end_ns = np.where(endless, self._last_time(process, mine), end_ns)
        backwards = end_ns < start_ns
        if backwards.any():
            notes.add(f"{backwards.sum()} NVTX ranges end before they start and are left out")
        kept = np.flatnonzero(~backwards)
        kept = kept[np.lexsort((-end_ns[kept], start_ns[kept]))]
        mine, is_operation = mine[kept], ranges.is_operation[mine[kept]]
        columns = {
            "start_ns": start_ns[kept],
            "end_ns": end_ns[kept],
            "name": ranges.name[mine],
            "thread": self._range_thread[mine],
        }
        operations: Operations = Operations.from_columns(len(mine), shapes=ranges.shapes[mine], **columns).take(
            is_operation
        )
        labels: Ranges = Ranges.from_columns(len(mine), **columns).take(~is_operation)
        nesting = Nesting(operations.start_ns, operations.end_ns, operations.thread)
        return _Host(operations, labels, nesting, notes)

    def _last_time(self, process: int, ranges: I64) -> int:
        """The last time that the file has of a process, whose rows in ``HostRanges`` are given."""
        device_rows = self._rows.columns["end_ns"][(self._rows.process == process) & self._timed]
        calls = self._calls.start_ns[self._calls.process == process]
        both = (self._ranges.start_ns[ranges], self._ranges.end_ns[ranges])
        return max(int(times.max(initial=NO_TIME)) for times in (device_rows, calls, *both))

    def _trace(self, host: _Host, process: int, device: int) -> Trace:
        """The timeline of a process on a device."""
        mine = (self._rows.process == process) & (self._timeline == device)
        activities = self._activities(host, np.flatnonzero(mine & self._timed))
        pid = process_id(process)
        notes = host.notes.copy()
        self._note_rows(notes, activities, int((mine & ~self._timed).sum()))
        if graphs := self._quality.graphs[process, device]:
            notes.add(
                f"{graphs} launches of CUDA graphs are recorded as a whole, without their kernels"
                " (profile with --cuda-graph-trace=node)",
                rows_missing=True,
            )
        if device == _NO_DEVICE:
            launches = self._quality.silent[process]
            notes.add(f"the process launched {launches} kernels, and none is in the file", rows_missing=True)
        return Trace(
            "",
            "nsys",
            self._names,
            activities,
            host.operations,
            host.ranges,
            device=self._device_of(pid, device),
            process=pid,
            device_index=None if device == _NO_DEVICE else device,
            notes=tuple(notes.all),
            incomplete=tuple(notes.incomplete),
            sm_samples=self._samples_of(pid, device),
        )

    def _note_rows(self, notes: Notes, activities: Activities, untimed: int) -> None:
        if untimed:
            notes.add(
                f"{untimed} device rows have no time, or end before they start, and are left out", rows_missing=True
            )
        if unnamed := int((activities.name == self._unnamed).sum()):
            notes.add(f"{unnamed} kernels have no name in the file, so what they are is not known", rows_missing=True)
        if unlaunched := int((activities.launch_ns == NO_TIME).sum()):
            notes.add(f"{unlaunched} of {len(activities)} device rows have no host call that launched them")

    def _activities(self, host: _Host, rows: I64) -> Activities:
        columns = self._rows.columns
        rows = rows[np.lexsort((columns["end_ns"][rows], columns["start_ns"][rows]))]
        call = self._launched_by[rows]
        launched: Bool = call >= 0
        launch_ns, thread = np.full(len(rows), NO_TIME, np.int64), np.full(len(rows), -1, np.int32)
        returned_ns = launch_ns.copy()
        launch_ns[launched] = self._calls.start_ns[call[launched]]
        returned_ns[launched] = self._calls.end_ns[call[launched]]
        thread[launched] = self._call_thread[call[launched]]
        picked = {name: values[rows] for name, values in columns.items()}
        picked["name"] = np.where(picked["name"] < 0, self._unnamed, picked["name"])
        operation = host.nesting.innermost(thread, launch_ns)
        made: Activities = Activities.from_columns(
            len(rows),
            launch_ns=launch_ns,
            returned_ns=returned_ns,
            launch_thread=thread,
            operation=operation,
            **picked,
        )
        return made


def _thread_name(thread: int) -> str:
    return f"thread {thread & 0xFFFFFF}"
