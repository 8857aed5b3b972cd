"""What ran on the devices, as read from a database of Nsight Systems."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from nsys_databases import VM, NsysDatabase, global_pid, global_tid

from overlap_probe.readers.nsys import read_nsys
from overlap_probe.tables import KERNEL, MEMCPY, MEMSET, NO_TIME, Trace

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
FIXTURE = Path(__file__).parent / "data" / "nsys2024_gemm_copy.sqlite"


def read_one(database: NsysDatabase, folder: Path, without: tuple[str, ...] = ()) -> Trace:
    (trace,) = read_nsys(database.write(folder / "trace.sqlite", without))
    return trace


def names(trace: Trace, table: str = "activities") -> list[str]:
    return [trace.names[code] for code in getattr(trace, table).name]


def launches_us(trace: Trace) -> list[float | None]:
    return [None if ns == NO_TIME else ns / 1000 for ns in trace.activities.launch_ns.tolist()]


def test_a_kernel_has_its_times_name_launch_and_size(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GATHER, 100, 140.5, 12, streamId=21)
    trace = read_one(database, tmp_path)
    row = trace.activities
    assert (row.start_ns.tolist(), row.end_ns.tolist()) == ([100_000], [140_500])
    assert names(trace) == [GATHER]
    assert (row.kind.tolist(), row.stream.tolist(), launches_us(trace)) == ([KERNEL], [21], [12.0])
    # 2 x 66 x 1 blocks of 384 threads, 16 bytes of static and 1024 of dynamic shared memory
    assert (row.blocks.tolist(), row.threads.tolist()) == ([132], [384])
    assert (row.registers.tolist(), row.shared_bytes.tolist()) == ([96], [1040])
    assert (trace.format, trace.process, trace.device_index) == ("nsys", 580, 0)
    assert (trace.notes, trace.incomplete) == ((), ())


def test_rows_are_in_the_order_of_time_whatever_the_order_in_the_file(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel("late", 30, 40, 3)
    database.copy(8, 20, 25, 2)
    database.kernel("long", 10, 15, 1)
    database.kernel("short", 10, 12, 1.5)
    trace = read_one(database, tmp_path)
    assert names(trace) == ["short", "long", "Memcpy DtoD", "late"]
    assert launches_us(trace) == [1.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "columns", "name", "source", "target"),
    [
        (1, {"srcKind": 1, "dstKind": 2}, "Memcpy HtoD (Pinned -> Device)", -1, 3),
        (2, {"srcKind": 2, "dstKind": 0}, "Memcpy DtoH (Device -> Pageable)", 3, -1),
        (8, {"srcKind": 2, "dstKind": 2}, "Memcpy DtoD (Device -> Device)", 3, 3),
        (8, {"srcDeviceId": 1, "dstDeviceId": 3}, "Memcpy PtoP", 1, 3),
        (10, {"srcDeviceId": 1, "dstDeviceId": 3}, "Memcpy PtoP", 1, 3),
        (10, {}, "Memcpy PtoP", -1, -1),
        (99, {}, "Memcpy Unknown", -1, -1),
    ],
)
def test_a_copy_is_named_as_kineto_names_it_and_says_where_it_goes(
    tmp_path: Path, kind: int, columns: dict[str, int], name: str, source: int, target: int
) -> None:
    database = NsysDatabase()
    database.copy(kind, 10, 20, 1, bytes=4096, deviceId=3, **columns)
    trace = read_one(database, tmp_path)
    row = trace.activities
    assert names(trace) == [name]
    assert (row.kind.tolist(), row.bytes.tolist()) == ([MEMCPY], [4096])
    assert (row.source.tolist(), row.target.tolist()) == ([source], [target])
    assert row.blocks.tolist() == [-1]


def test_a_memset_is_read(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.memset(10, 20, 1, bytes=512, memKind=2)
    trace = read_one(database, tmp_path)
    assert names(trace) == ["Memset (Device)"]
    assert (trace.activities.kind.tolist(), trace.activities.bytes.tolist()) == ([MEMSET], [512])


def test_correlation_ids_that_repeat_in_another_process_do_not_mix_launches(tmp_path: Path) -> None:
    database = NsysDatabase(pid=580)
    database.call(7, "cudaMalloc_v3020", pid=900, correlationId=5)
    database.call(3, pid=580, correlationId=5)
    database.kernel(GEMM, 10, 20, correlationId=5)
    trace = read_one(database, tmp_path)
    assert launches_us(trace) == [3.0]
    assert trace.process == 580


def test_correlation_zero_and_null_are_no_correlation(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.call(3, correlationId=0)
    database.call(4, correlationId=None)
    database.kernel(GEMM, 10, 20, correlationId=0)
    database.kernel(GEMM, 20, 30, correlationId=None)
    trace = read_one(database, tmp_path)
    assert launches_us(trace) == [None, None]
    assert trace.activities.launch_thread.tolist() == [-1, -1]


def test_the_kernels_of_a_graph_share_their_launch(tmp_path: Path) -> None:
    database = NsysDatabase()
    correlation = database.call(3, "cudaGraphLaunch_v10000")
    for node, start in enumerate((10, 20, 30)):
        database.kernel(GATHER, start, start + 5, correlationId=correlation, graphNodeId=(2 << 32) + node)
    trace = read_one(database, tmp_path)
    assert launches_us(trace) == [3.0, 3.0, 3.0]
    assert not trace.incomplete


def test_a_kernel_without_a_host_row_stays_and_is_counted(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20)
    database.kernel(GEMM, 30, 40, 25)
    trace = read_one(database, tmp_path)
    assert launches_us(trace) == [None, 25.0]
    assert trace.notes == ("1 of 2 device rows have no host call that launched them",)
    assert not trace.incomplete


def test_every_process_and_device_is_a_trace_of_its_own(tmp_path: Path) -> None:
    database = NsysDatabase()
    for pid, device in ((901, 1), (900, 0), (900, 2)):
        database.kernel(f"kernel of {pid} on {device}", 10, 20, 5, pid=pid, deviceId=device)
        database.range(f"label of {pid}", 0, 30, pid=pid)
    traces = read_nsys(database.write(tmp_path / "rank7.sqlite"))
    assert [(t.process, t.device_index) for t in traces] == [(900, 0), (900, 2), (901, 1)]
    assert [names(t) for t in traces] == [["kernel of 900 on 0"], ["kernel of 900 on 2"], ["kernel of 901 on 1"]]
    assert [set(names(t, "ranges")) for t in traces] == [{"label of 900"}, {"label of 900"}, {"label of 901"}]
    assert [t.rank for t in traces] == [None, None, None]


def test_rows_on_a_device_without_kernels_belong_to_the_timeline_of_the_process(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5, deviceId=1)
    database.memset(30, 31, 25, deviceId=0)
    trace = read_one(database, tmp_path)
    assert (trace.device_index, len(trace.activities)) == (1, 2)


def test_the_rank_of_a_single_timeline_is_that_of_the_files_name(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    assert read_nsys(database.write(tmp_path / "run_rank3.sqlite"))[0].rank == 3
    assert read_nsys(database.write(tmp_path / "run.sqlite"))[0].rank is None


def test_the_short_name_stands_in_for_a_full_name_that_is_missing(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5, demangledName=None)
    database.kernel(GATHER, 30, 40, 25, demangledName=None)
    assert names(read_one(database, tmp_path)) == [GEMM, "ncclDevKernel_AllGather_RING_LL"]


def test_kernels_without_any_name_leave_the_trace_incomplete(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    trace = read_one(database, tmp_path, without=("StringIds",))
    assert names(trace) == ["<no name>"]
    assert "1 kernels have no name" in trace.incomplete[0]


@pytest.mark.parametrize(("start", "end"), [(30, 20), (0, 0), (None, 20), (10, None)])
def test_rows_without_a_usable_time_are_left_out_and_said(tmp_path: Path, start: int | None, end: int | None) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    database.kernel(GATHER, 1, 2, 5)
    database.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1] |= {"start": start, "end": end}
    trace = read_one(database, tmp_path)
    assert names(trace) == [GEMM]
    assert trace.incomplete == ("1 device rows have no time, or end before they start, and are left out",)


def test_a_kernel_of_no_duration_is_kept(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 10, 5)
    assert len(read_one(database, tmp_path).activities) == 1


OLD_COLUMNS = (
    *("greenContextId", "graphNodeId", "mangledName", "launchType", "callchainId", "endGlobalTid", "jsonText"),
    *(
        "returnValue",
        "staticSharedMemory",
        "dynamicSharedMemory",
        "gridZ",
        "srcKind",
        "dstKind",
        "textId",
        "eventClass",
    ),
)


def test_an_older_schema_lacks_columns_and_reads_as_if_they_were_empty(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GATHER, 10, 20, 5)
    database.copy(8, 30, 40, 25)
    database.range("step0", 0, 50)
    trace = read_one(database, tmp_path, OLD_COLUMNS)
    assert names(trace) == [GATHER, "Memcpy DtoD"]
    assert launches_us(trace) == [5.0, 25.0]
    assert trace.activities.blocks.tolist() == [-1, -1]
    assert trace.activities.shared_bytes.tolist() == [-1, -1]
    assert names(trace, "ranges") == ["step0"]
    assert trace.notes == ()


def test_a_newer_schema_has_tables_and_columns_that_nobody_asks_for(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GATHER, 10, 20, 5)
    path = database.write(tmp_path / "new.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN clusterX INTEGER DEFAULT 2")
        connection.execute("CREATE TABLE NEXT_VERSION (x BLOB)")
    connection.close()
    assert names(read_nsys(path)[0]) == [GATHER]


def test_rows_without_a_process_belong_to_the_only_one_there_is(tmp_path: Path) -> None:
    database = NsysDatabase(pid=77)
    database.kernel(GEMM, 10, 20, 5)
    trace = read_one(database, tmp_path, without=("globalPid",))
    assert (trace.process, launches_us(trace)) == (77, [5.0])


@pytest.mark.parametrize(
    "table",
    [
        *("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
        *("StringIds", "TARGET_INFO_GPU", "PROCESSES", "ThreadNames", "META_DATA_EXPORT"),
    ],
)
def test_any_table_may_be_missing(tmp_path: Path, table: str) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    database.copy(8, 30, 40, 25)
    database.memset(50, 60, 45)
    database.range("step0", 0, 50)
    database.add("TARGET_INFO_GPU", vmId=VM, id=0, name="NVIDIA H200", smCount=132)
    database.add("PROCESSES", globalPid=global_pid(580), pid=580, name="python3")
    database.add("ThreadNames", nameId=database.string("python3"), globalTid=global_tid(580, 580))
    trace = read_one(database, tmp_path, (table,))
    lost = {"CUPTI_ACTIVITY_KIND_MEMCPY": 1, "CUPTI_ACTIVITY_KIND_MEMSET": 1}.get(table, 0)
    assert len(trace.activities) == 3 - lost
    assert len(trace.ranges) == (table != "NVTX_EVENTS")
    assert (trace.device.sms is None) == (table == "TARGET_INFO_GPU")


def test_no_kernel_table_leaves_copies(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.copy(1, 10, 20, 5)
    assert names(read_one(database, tmp_path)) == ["Memcpy HtoD"]


def test_nothing_on_a_device_is_one_empty_trace_that_says_so(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.range("step0", 0, 50)
    database.call(5, "cudaMalloc_v3020")
    trace = read_one(database, tmp_path)
    assert len(trace.activities) == 0
    assert "nothing ran on a device" in trace.notes[0]


def test_texts_that_are_not_utf8_do_not_stop_the_reader(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    path = database.write(tmp_path / "latin.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'6b65726eff' AS TEXT) WHERE value = ?", (GEMM,))
    connection.close()
    assert names(read_nsys(path)[0]) == ["kern\N{REPLACEMENT CHARACTER}"]


def test_a_real_database_reads_as_its_tables_say() -> None:
    (trace,) = read_nsys(FIXTURE)
    row = trace.activities
    gemm = np.array(["nvjet" in name for name in trace.names])[row.name]
    with sqlite3.connect(f"{FIXTURE.as_uri()}?mode=ro&immutable=1", uri=True) as connection:
        (kernels,) = connection.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
        (gemm_ns,) = connection.execute(
            "SELECT sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName"
            " WHERE value LIKE 'nvjet%'"
        ).fetchone()
        late = connection.execute(
            "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_MEMCPY m JOIN CUPTI_ACTIVITY_KIND_RUNTIME r"
            " ON r.correlationId = m.correlationId WHERE m.start - r.start > 20000"
        ).fetchone()
    connection.close()
    assert int((row.kind == KERNEL).sum()) == kernels
    assert int((row.end_ns - row.start_ns)[gemm].sum()) == gemm_ns
    copies = row.take(row.kind == MEMCPY)
    assert (int((copies.start_ns - copies.launch_ns > 20_000).sum()),) == late
    assert set(copies.stream.tolist()) == {13}
    assert set(copies.bytes.tolist()) == {64 << 20}
    # 64 warps of 32 threads
    assert (trace.device.name, trace.device.sms, trace.device.threads_per_sm) == ("NVIDIA H200", 132, 2048)
    assert [n for n in names(trace, "ranges") if n.startswith("step")] == ["step0", "step1", "step2"]
    assert (trace.notes, trace.process, trace.rank) == ((), 580, None)


def test_rows_that_a_file_holds_twice_are_read_once(tmp_path: Path) -> None:
    """Merged files: kernels, copies, calls and ranges. A node of a graph that runs beside its like is another row."""
    database = NsysDatabase()
    database.range("step0", 0, 100)
    for graph_node in (1, 2):
        database.kernel(GEMM, 10, 20, None, correlationId=70, graphNodeId=graph_node)
    database.call(5, correlationId=70)
    database.kernel(GATHER, 10, 20, 6, streamId=9)
    database.copy(8, 10, 20, 7)
    database.memset(10, 20, 8)
    database.call(9)  # lost
    database.call(9.5)
    database.call(9.75)
    single = read_one(database, tmp_path)
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        database.rows[table] *= 2
    database.rows["CUPTI_ACTIVITY_KIND_RUNTIME"] *= 2
    database.rows["NVTX_EVENTS"] *= 2
    twice = read_one(database, tmp_path)
    assert (len(single.activities), len(single.ranges)) == (5, 1)
    assert (len(twice.activities), len(twice.ranges), twice.notes) == (5, 1, single.notes)
    assert twice.activities.launch_ns.tolist() == single.activities.launch_ns.tolist()
