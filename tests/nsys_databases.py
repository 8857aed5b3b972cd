"""Makes databases like those of ``nsys export --type sqlite``: small ones by hand, a large one for benchmarks.

The idea: a table is what was added to it, with the columns of the schema of Nsight Systems 2024.2 unless a test takes
some away; a table to which nothing was added is not made, as the exporter does it. Times are us here, ns in the file.

    python -m tests.nsys_databases OUT.sqlite KERNELS     makes the large one
"""

from __future__ import annotations

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
            "start": _ns(at),
            "end": _ns(at + 6),
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
        row = {"start": _ns(start), "end": None if end is None else _ns(end), "eventType": 59, "text": text}
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
        row = {"start": _ns(start), "end": _ns(end), "deviceId": 0, "contextId": 1, "streamId": 7}
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


KERNELS_OF_UNIT, UNITS_OF_STEP = 100, 100
"""Of the large database."""


def write_large(path: Path, kernels: int = 1_000_000) -> Path:
    """A training run: 2 host calls and 2 operator ranges a kernel, and the labels of units and steps.

    A kernel begins every 10 us. The first of a unit is an all-gather of 60 us on stream 21, the others are GEMMs of 9
    us, so 45 of the 60 us are hidden: 5 GEMMs begin 10 to 50 us after the gather's start, and end before it does.
    """
    small = NsysDatabase()
    gather, gemm = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nvjet_sm90_tst_128x256_TNT"
    small.kernel(gather, 0, 1, 0)
    small.kernel(gemm, 0, 1, 0)
    small.range("", 0, 1)
    small.add("TARGET_INFO_GPU", vmId=VM, id=0, name="NVIDIA H200", smCount=132)
    launch, query = small.string("cudaLaunchKernel_v7000"), small.string("cudaEventQuery_v3020")
    small.write(path)
    connection = sqlite3.connect(path)
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
        connection.execute(f"DELETE FROM {table}")
    every = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count)"
    ids = {"pid": global_pid(580), "tid": global_tid(580, 580), "launch": launch, "query": query}
    ids |= {"gather": small.string(gather), "gemm": small.string(gemm), "late": 1_000_000}
    ids |= {"unit": KERNELS_OF_UNIT, "units": UNITS_OF_STEP}
    columns = "start, end, eventClass, globalTid, correlationId, nameId, returnValue"
    call = f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME ({columns})"
    statements = (
        # Everything on the device runs 1 ms after the launches began.
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, contextId, streamId, correlationId, globalPid,"
        " demangledName, shortName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ)"
        f" {every} SELECT :late + i * 10000, :late + i * 10000 + iif(i % :unit, 9000, 60000), 0, 1,"
        " iif(i % :unit, 7, 21), i + 1, :pid, iif(i % :unit, :gemm, :gather), iif(i % :unit, :gemm, :gather),"
        " 96, 132, 1, 1, 384, 1, 1 FROM n",
        f"{call} {every} SELECT i * 10000 + 2000, i * 10000 + 5000, 0, :tid, i + 1, :launch, 0 FROM n",
        f"{call} {every} SELECT i * 10000 + 8500, i * 10000 + 8600, 0, :tid, :count + i + 1, :query, 0 FROM n",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId)"
        f" {every} SELECT i * 10000 + 500, i * 10000 + 8000, 59,"
        " iif(i % :unit, 'aten::linear', 'c10d::_allgather_base_') || ', seq = ' || i || ', op_id = ' || (2 * i),"
        " :tid, 0 FROM n",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId)"
        f" {every} SELECT i * 10000 + 1000, i * 10000 + 7000, 59, iif(i % :unit, 'aten::addmm', 'record_param_comms')"
        " || ', op_id = ' || (2 * i + 1), :tid, 0 FROM n",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId)"
        f" {every} SELECT i * 10000 * :unit, (i + 1) * 10000 * :unit - 500, 59,"
        " 'MFSDP layers.' || (i % :units) || ' forward', :tid, 0 FROM n WHERE i < :count / :unit",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId)"
        f" {every} SELECT i * 10000 * :unit * :units, (i + 1) * 10000 * :unit * :units - 100, 59, 'step' || i, :tid, 0"
        " FROM n WHERE i < :count / :unit / :units",
    )
    for statement in statements:
        connection.execute(statement, ids | {"count": kernels})
    connection.commit()
    connection.close()
    return path


if __name__ == "__main__":
    print(write_large(Path(sys.argv[1]), int(sys.argv[2])))
