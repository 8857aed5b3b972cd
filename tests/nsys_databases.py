"""Makes databases like those of ``nsys export --type sqlite``: small ones by hand, a large one from a real one.

The idea: a table is what was added to it, with the columns of the schema of Nsight Systems 2024.2 unless a test takes
some away; a table to which nothing was added is not made, as the exporter does it. Times are us here, ns in the file.

    python -m tests.nsys_databases OUT.sqlite KERNELS     makes the large one
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

VM = 1 << 48
"""High bits of every serialized id: the machine."""

SCHEMA: dict[str, str] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId contextId greenContextId streamId correlationId globalPid"
    " demangledName shortName mangledName launchType registersPerThread gridX gridY gridZ blockX blockY blockZ"
    " staticSharedMemory dynamicSharedMemory gridId graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId contextId streamId correlationId globalPid bytes copyKind srcKind"
    " dstKind srcDeviceId dstDeviceId graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId streamId correlationId globalPid value bytes memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId contextId streamId correlationId globalPid graphId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "NVTX_EVENTS": "start end eventType rangeId text globalTid endGlobalTid textId domainId jsonText",
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
    "TARGET_INFO_GPU": "vmId id name busLocation uuid smCount maxShmemPerSm maxRegistersPerSm threadsPerWarp"
    " maxWarpsPerSm",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid uuid numMultiprocessors",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "PROCESSES": "globalPid pid name",
    "ThreadNames": "nameId priority globalTid",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
    "GPU_METRICS": "timestamp typeId metricId value",
    "TARGET_INFO_GPU_METRICS": "typeId sourceId typeName metricId metricName",
}
_TEXTS = ("text", "name", "value", "uuid", "jsonText", "busLocation", "devStateName", "typeName", "metricName")


def global_pid(pid: int) -> int:
    """The serialized id of a process."""
    return VM | pid << 24


def global_tid(pid: int, thread: int) -> int:
    """The serialized id of a thread."""
    return global_pid(pid) | thread


class NsysDatabase:
    """A database in the making; ``write`` makes the file."""

    def __init__(self, pid: int = 580) -> None:
        self.pid = pid
        self.at = 0.0
        """Added to every time, us: what is added next happens so much later."""
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._strings: dict[str, int] = {}
        self._correlation = 50
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_NAME", value="NVIDIA Nsight Systems")
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.11.1")

    def add(self, table: str, **values: Any) -> None:
        """Add a row; columns that are not given are NULL."""
        self.rows.setdefault(table, []).append(values)

    def string(self, text: str) -> int:
        """Id of a text in StringIds."""
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 20
            self.add("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def call(self, at: float, name: str = "cudaLaunchKernelExC_v11060", **values: Any) -> int:
        """Add a host call of 6 us and give its correlation id (the next one, whatever ``values`` say)."""
        pid, thread = values.pop("pid", self.pid), values.pop("thread", None)
        self._correlation += 1
        row = {
            "start": _ns(self.at + at),
            "end": _ns(self.at + at + 6),
            "eventClass": 0,
            "globalTid": global_tid(pid, pid if thread is None else thread),
            "correlationId": self._correlation,
            "nameId": self.string(name),
            "returnValue": 0,
        }
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", **row | values)
        return self._correlation

    def kernel(self, name: str, start: float, end: float, launch: float | None = None, **values: Any) -> None:
        """Add a kernel, and at ``launch`` the call that launched it (None: no such call)."""
        row = self._device_row(start, end, launch, values)
        row |= {"demangledName": self.string(name), "shortName": self.string(name.split("(")[0])}
        row |= {"registersPerThread": 96, "gridX": 2, "gridY": 66, "gridZ": 1, "blockX": 384, "blockY": 1, "blockZ": 1}
        row |= {"staticSharedMemory": 16, "dynamicSharedMemory": 1024}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", **row | values)

    def copy(self, kind: int, start: float, end: float, launch: float | None = None, **values: Any) -> None:
        """Add a copy (kinds: 1 HtoD, 2 DtoH, 8 DtoD, 10 PtoP)."""
        row = self._device_row(start, end, launch, values, "cudaMemcpyAsync_v3020")
        self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **row | {"bytes": 64, "copyKind": kind} | values)

    def memset(self, start: float, end: float, launch: float | None = None, **values: Any) -> None:
        """Add a memset."""
        row = self._device_row(start, end, launch, values, "cudaMemsetAsync_v3020")
        self.add("CUPTI_ACTIVITY_KIND_MEMSET", **row | {"bytes": 4, "value": 0} | values)

    def range(self, text: str | None, start: float, end: float | None, **values: Any) -> None:
        """Add an NVTX range of the main thread (push/pop unless ``eventType`` says otherwise)."""
        pid, thread = values.pop("pid", self.pid), values.pop("thread", None)
        row = {
            "start": _ns(self.at + start),
            "end": None if end is None else _ns(self.at + end),
            "eventType": 59,
            "text": text,
        }
        row |= {"globalTid": global_tid(pid, pid if thread is None else thread), "domainId": 0}
        self.add("NVTX_EVENTS", **row | values)

    def _device_row(
        self,
        start: float,
        end: float,
        launch: float | None,
        values: dict[str, Any],
        call: str = "cudaLaunchKernel_v7000",
    ) -> dict[str, Any]:
        pid = values.pop("pid", self.pid)
        thread = values.pop("thread", None)
        row = {"start": _ns(self.at + start), "end": _ns(self.at + end), "deviceId": 0, "contextId": 1, "streamId": 7}
        self._correlation += 1
        row |= {"globalPid": global_pid(pid), "correlationId": self._correlation}
        if launch is not None:
            row["correlationId"] = self.call(launch, call, pid=pid, thread=thread)
        return row

    def write(self, path: Path, without: tuple[str, ...] = ()) -> Path:
        """Write the file, without some tables, or columns named ``column`` or ``table.column``; give its path."""
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        for table, rows in self.rows.items():
            gone = {w for w in without} | {w.partition(".")[2] for w in without if w.startswith(table + ".")}
            if table in without:
                continue
            columns = [c for c in SCHEMA[table].split() if c not in gone]
            connection.execute(_create(table, columns))
            marks = ", ".join("?" * len(columns))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [[r.get(c) for c in columns] for r in rows])
        connection.commit()
        connection.close()
        return path


def _ns(us: float) -> int:
    return round(us * 1000)


def _create(table: str, columns: list[str]) -> str:
    typed = (f'"{c}" {_type(table, c)}' for c in columns)
    return f"CREATE TABLE {table} ({', '.join(typed)})"


def _type(table: str, column: str) -> str:
    if column == "id" and table == "StringIds":
        return "INTEGER NOT NULL PRIMARY KEY"
    is_number = column not in _TEXTS or (column == "value" and table in ("GPU_METRICS", "CUPTI_ACTIVITY_KIND_MEMSET"))
    return "INTEGER" if is_number else "TEXT"


REAL = Path(__file__).resolve().parent / "data" / "nsys2024_gemm_copy.sqlite"
"""A recording of GEMMs and copies on one GPU, which the large database is made from."""

KERNELS_OF_UNIT, UNITS_OF_STEP = 100, 100
"""Of the large database."""

_EVERY = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count)"
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write_large(path: Path, kernels: int = 1_000_000) -> Path:
    """A training run: 2 host calls and 2 operator ranges a kernel, and the labels of units and steps.

    Tables, columns and rows are those of REAL, in which a GEMM, its launch, another of its calls and a range are
    repeated with other times, texts and correlations; only the name of the all-gather and of the operators are not in
    it. A kernel begins every 10 us. The first of a unit is an all-gather of 60 us on stream 21, the others are GEMMs of
    9 us, so 45 of the 60 us are hidden: 5 GEMMs begin 10 to 50 us after the gather's start, and end before it does.
    """
    shutil.copyfile(REAL, path)
    path.chmod(0o644)
    connection = sqlite3.connect(path)
    names = {value: number for number, value in connection.execute("SELECT id, value FROM StringIds")}
    gather = max(names.values()) + 1
    connection.execute("INSERT INTO StringIds VALUES (?, ?)", (gather, _GATHER))
    known = {"gather": gather, "unit": KERNELS_OF_UNIT, "units": UNITS_OF_STEP, "late": 1_000_000}
    kernel, call, label = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
    launches, others = (f"nameId = {names[name]}" for name in ("cuLaunchKernelEx", "cuKernelGetAttribute"))
    gemm = next(number for name, number in names.items() if name.startswith("nvjet"))
    one = {
        "kernel": (kernel, f"demangledName = {gemm}"),
        "launch": (call, launches),
        "attribute": (call, others),
        "range": (label, "text = 'unit0'"),
    }
    for name, (table, which) in one.items():
        connection.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM {table} WHERE {which} LIMIT 1")
    for table in (kernel, call, label, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        connection.execute(f"DELETE FROM {table}")

    def repeat(name: str, count: int, **changes: str) -> None:
        """Add ``count`` copies of a row in which some columns are what SQL makes of the copy's number ``i``."""
        table = one[name][0]
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        values = ", ".join(changes.get(column, f'"{column}"') for column in columns)
        connection.execute(f"INSERT INTO {table} {_EVERY} SELECT {values} FROM n, {name}", known | {"count": count})

    def operators(start: int, end: int, text: str) -> None:
        repeat("range", kernels, start=f"i * 10000 + {start}", end=f"i * 10000 + {end}", text=text)

    begin = "i * 10000 * :unit"  # of a unit
    # Everything on the device runs 1 ms after the launches began.
    repeat(
        "kernel",
        kernels,
        start=":late + i * 10000",
        end=":late + i * 10000 + iif(i % :unit, 9000, 60000)",
        streamId="iif(i % :unit, streamId, 21)",
        correlationId="i + 1",
        demangledName="iif(i % :unit, demangledName, :gather)",
        shortName="iif(i % :unit, shortName, :gather)",
    )
    repeat("launch", kernels, start="i * 10000 + 2000", end="i * 10000 + 5000", correlationId="i + 1")
    repeat("attribute", kernels, start="i * 10000 + 8500", end="i * 10000 + 8600", correlationId=f"{kernels} + i + 1")
    inner = "iif(i % :unit, 'aten::addmm', 'record_param_comms') || ', op_id = ' || (2 * i + 1)"
    outer = "iif(i % :unit, 'aten::linear', 'c10d::_allgather_base_') || ', seq = ' || i || ', op_id = ' || (2 * i)"
    operators(500, 8000, outer)
    operators(1000, 7000, inner)
    unit, step = KERNELS_OF_UNIT, KERNELS_OF_UNIT * UNITS_OF_STEP
    text = "'MFSDP layers.' || (i % :units) || ' forward'"
    repeat("range", kernels // unit, start=begin, end=f"{begin} + 10000 * :unit - 500", text=text)
    begin += " * :units"  # of a step
    repeat(
        "range", max(1, kernels // step), start=begin, end=f"{begin} + 10000 * :unit * :units - 100", text="'step' || i"
    )
    connection.commit()
    connection.close()
    return path


if __name__ == "__main__":
    print(write_large(Path(sys.argv[1]), int(sys.argv[2])))
