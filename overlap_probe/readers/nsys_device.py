"""Reads what ran on the devices, and the host calls that launched it, from a database of Nsight Systems.

The idea: the kernels, copies and memsets of all processes become the columns of one table, and a launch is found by
(process, correlation id) in one binary search, never by the name of the call: correlation ids repeat across processes,
one launch of a CUDA graph starts many kernels, and the calls that launch are many and change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from overlap_probe.readers.joins import latest_with_key
from overlap_probe.readers.nsys_nvtx import Names
from overlap_probe.readers.nsys_schema import CALLS, COLUMNS, COPIES, DEVICE_ROW, KERNELS, MEMSETS, Database
from overlap_probe.readers.repeats import first_of_alike
from overlap_probe.tables import I64, KERNEL, MEMCPY, MEMSET, NO_TIME, Bool

NO_PROCESS = -1
"""Stands for the process of a row that does not name one."""

_THREAD_BITS = (1 << 24) - 1
_HTOD, _DTOH, _DTOD, _PTOP = 1, 2, 8, 10
_COPY_KINDS = {
    **{1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP"},
    **{11: "Unified HtoD", 12: "Unified DtoH", 13: "Unified DtoD"},
}
_MEMORY_KINDS = dict(
    enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"))
)
"""Texts of ``ENUM_CUDA_MEMCPY_OPER`` and ``ENUM_CUDA_MEM_KIND``, as Kineto writes them."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Host calls of the CUDA runtime and driver, a row each."""

    start_ns: I64
    end_ns: I64
    thread: I64
    """``globalTid``."""
    process: I64
    """``globalPid``."""
    correlation: I64
    """0 for a call that failed: it launched nothing."""
    name: I64
    """Id of the function's name in StringIds."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Everything that ran on any device for any process: ``columns`` as in ``Activities``, and whose each row is."""

    process: I64
    """``globalPid``."""
    device: I64
    correlation: I64
    columns: dict[str, I64]

    def __len__(self) -> int:
        return len(self.process)


def process_of(thread: I64) -> I64:
    """The ``globalPid`` in each ``globalTid``: the same number with the bits of the thread cleared."""
    result: I64 = np.where(thread == NO_PROCESS, NO_PROCESS, thread & ~_THREAD_BITS)
    return result


def process_id(global_pid: int) -> int | None:
    """The operating system's process id in a ``globalPid``."""
    return None if global_pid == NO_PROCESS else (global_pid >> 24) & _THREAD_BITS


def read_calls(database: Database) -> Calls:
    """All runtime and driver calls; one that the file holds twice counts once."""
    rows = database.numbers(
        *(CALLS, "start", "end", "globalTid", "nameId"),
        correlation=lambda column: sa.case((column("returnValue") > 0, 0), else_=column("correlationId")),
    )
    first = first_of_alike(rows["start"], rows["end"], (rows["globalTid"], rows["nameId"], rows["correlation"]))
    if not first.all():
        rows = {name: values[first] for name, values in rows.items()}
    thread, returned_ns = rows["globalTid"], np.maximum(rows["start"], rows["end"])
    return Calls(rows["start"], returned_ns, thread, process_of(thread), rows["correlation"], rows["nameId"])


def read_device_rows(database: Database, names: Names) -> DeviceRows:
    """All kernels, copies and memsets, in any order; one that the file holds twice counts once.

    Their names are added to ``names``; an unknown name is -1.
    """
    parts = [_kernels(database, names), _copies(database, names), _memsets(database, names)]
    columns = {c: np.concatenate([part[c] for part in parts]) for c in parts[0]}
    first = first_of_alike(columns["start_ns"], columns["end_ns"], columns.values())
    if not first.all():
        columns = {name: values[first] for name, values in columns.items()}
    del columns["graph_node"]  # all nodes of a graph have its correlation and stream, also those that run side by side
    return DeviceRows(columns.pop("process"), columns.pop("device"), columns.pop("correlation"), columns)


def launches_of(rows: DeviceRows, calls: Calls) -> I64:
    """Row in ``calls`` of the call that launched each device row; -1 where the file has none."""
    processes = np.unique(calls.process)
    keys = _keys(processes, calls.process, calls.correlation)
    wanted = _keys(processes, rows.process, rows.correlation)
    return latest_with_key(keys, calls.start_ns, wanted, rows.columns["start_ns"])


def _keys(processes: I64, process: I64, correlation: I64) -> I64:
    """One number for (process, correlation id of 32 bits); -1 without a correlation or with a process not listed."""
    place = np.searchsorted(processes, process)
    known = np.isin(process, processes) & (correlation > 0)
    result: I64 = np.where(known, place << 32 | correlation & 0xFFFFFFFF, -1)
    return result


def _common(rows: dict[str, I64], kind: int) -> dict[str, I64]:
    """Columns that rows of each kind have; those of one kind only are absent (-1)."""
    count = len(rows["start"])
    absent = np.full(count, -1, np.int64)
    return {
        "process": rows["globalPid"],
        "device": rows["deviceId"],
        "correlation": rows["correlationId"],
        "graph_node": rows["graphNodeId"],
        "start_ns": rows["start"],
        "end_ns": rows["end"],
        "stream": rows["streamId"],
        "kind": np.full(count, kind, np.int64),
        **dict.fromkeys(
            ("name", "blocks", "threads", "registers", "shared_bytes", "bytes", "source", "target"), absent
        ),
    }


def _kernels(database: Database, names: Names) -> dict[str, I64]:
    rows = database.numbers(
        *(KERNELS, *DEVICE_ROW, "registersPerThread"),
        name=lambda column: sa.func.coalesce(column("demangledName"), column("shortName")),
        blocks=lambda column: column("gridX") * column("gridY") * column("gridZ"),
        threads=lambda column: column("blockX") * column("blockY") * column("blockZ"),
        shared_bytes=lambda column: column("staticSharedMemory") + column("dynamicSharedMemory"),
    )
    text_of = database.texts(np.unique(rows["name"]).tolist())
    return _common(rows, KERNEL) | {
        "name": names.codes(rows["name"], text_of.get),
        "blocks": rows["blocks"],
        "threads": rows["threads"],
        "registers": rows["registersPerThread"],
        "shared_bytes": rows["shared_bytes"],
    }


def _copies(database: Database, names: Names) -> dict[str, I64]:
    rows = database.numbers(COPIES, *COLUMNS[COPIES])
    kind, device, source, target = rows["copyKind"], rows["deviceId"], rows["srcDeviceId"], rows["dstDeviceId"]
    between = (kind == _DTOD) & (source >= 0) & (target >= 0) & (source != target)
    kind = np.where(between, _PTOP, kind)
    # Only a copy between devices names them; the others read or write the device that they run on.
    inside = kind == _DTOD
    source = np.where((source < 0) & (inside | (kind == _DTOH)), device, source)
    target = np.where((target < 0) & (inside | (kind == _HTOD)), device, target)
    packed = (kind + 1) << 16 | (rows["srcKind"] + 1) << 8 | (rows["dstKind"] + 1)
    return _common(rows, MEMCPY) | {
        "name": names.codes(packed, lambda p: _copy_name((p >> 16) - 1, (p >> 8 & 0xFF) - 1, (p & 0xFF) - 1)),
        "bytes": rows["bytes"],
        "source": np.where(kind == _HTOD, -1, source),
        "target": np.where(kind == _DTOH, -1, target),
    }


def _memsets(database: Database, names: Names) -> dict[str, I64]:
    rows = database.numbers(MEMSETS, *COLUMNS[MEMSETS])
    return _common(rows, MEMSET) | {
        "name": names.codes(rows["memKind"], lambda k: f"Memset{_in_brackets(k)}"),
        "bytes": rows["bytes"],
        "target": rows["deviceId"],
    }


def _copy_name(kind: int, source: int, target: int) -> str:
    """As Kineto names it: ``Memcpy DtoD (Device -> Device)``."""
    return f"Memcpy {_COPY_KINDS.get(kind, 'Unknown')}{_in_brackets(source, target)}"


def _in_brackets(*memory: int) -> str:
    if any(kind not in _MEMORY_KINDS for kind in memory):
        return ""
    return f" ({' -> '.join(_MEMORY_KINDS[kind] for kind in memory)})"


def has_a_time(rows: DeviceRows) -> Bool:
    """Whether a row can be placed on the timeline. CUPTI writes 0 and 0 where it could not take the time."""
    start_ns, end_ns = rows.columns["start_ns"], rows.columns["end_ns"]
    known = (start_ns != NO_TIME) & (end_ns >= start_ns)
    result: Bool = known & ~((start_ns == 0) & (end_ns == 0))
    return result


def timeline_of(rows: DeviceRows) -> I64:
    """The device whose timeline each row belongs to: its own, but on a device where the process ran no kernel it is a
    stray copy or memset, and belongs to the device on which the process ran most kernels."""
    device, is_kernel = rows.device.copy(), rows.columns["kind"] == KERNEL
    for process in np.unique(rows.process[is_kernel]):
        mine = rows.process == process
        used, kernels = np.unique(rows.device[mine & is_kernel], return_counts=True)
        device[mine & ~np.isin(rows.device, used)] = used[np.argmax(kernels)]
    return device
