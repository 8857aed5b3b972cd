"""What a database of Nsight Systems lacks, and whether the trace says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from nsys_databases import NsysDatabase, global_pid
from test_nsys import GEMM, read_one

from overlap_probe.readers.nsys import read_nsys

MIGHT = "Not all CUDA events might have been collected."


def with_kernels(count: int = 3, **values: object) -> NsysDatabase:
    database = NsysDatabase()
    for place in range(count):
        database.kernel(GEMM, 100 + 10 * place, 105 + 10 * place, 10 * place, **values)
    return database


def test_a_launch_without_its_kernel_leaves_the_trace_incomplete(tmp_path: Path) -> None:
    database = with_kernels()
    database.call(5, "cudaLaunchKernel_v7000")
    trace = read_one(database, tmp_path)
    assert trace.incomplete == ("1 of 4 kernel launches have no row on the device: the profiler dropped records",)
    assert trace.notes == trace.incomplete


def test_a_launch_that_failed_or_was_captured_into_a_graph_has_no_kernel_to_lose(tmp_path: Path) -> None:
    database = with_kernels()
    database.call(5, "cudaLaunchKernel_v7000", returnValue=1)
    database.call(6, "cudaStreamBeginCapture_v10000")
    database.call(7, "cudaLaunchKernel_v7000")
    database.call(8, "cudaStreamEndCapture_v10000")
    assert read_one(database, tmp_path).notes == ()


def test_launches_of_another_process_are_its_own_affair(tmp_path: Path) -> None:
    database = with_kernels()
    for place in range(3):
        database.kernel(GEMM, 100 + 10 * place, 105 + 10 * place, 10 * place, pid=900, deviceId=1)
    database.call(5, "cudaLaunchKernel_v7000", pid=900)
    here, there = read_nsys(database.write(tmp_path / "two.sqlite"))
    assert here.incomplete == ()
    assert "1 of 4 kernel launches" in there.incomplete[0]


def test_a_process_that_lost_all_of_its_rows_is_still_a_trace(tmp_path: Path) -> None:
    database = with_kernels()
    database.call(5, "cudaLaunchKernel_v7000", pid=900)
    database.call(6, "cudaLaunchKernel_v7000", pid=900)
    whole, lost = read_nsys(database.write(tmp_path / "two.sqlite"))
    assert (whole.process, whole.incomplete) == (580, ())
    assert (lost.process, lost.device_index, len(lost.activities)) == (900, None, 0)
    assert lost.incomplete == ("the process launched 2 kernels, and none is in the file",)


@pytest.mark.parametrize("severity", [2, 3])
@pytest.mark.parametrize("text", ["12 CUDA events were dropped", "Events were lost: the buffer of the GPU\noverflowed"])
def test_events_that_the_profiler_says_were_lost_leave_the_trace_incomplete(
    tmp_path: Path, text: str, severity: int
) -> None:
    database = with_kernels()
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=severity, text=text, globalPid=global_pid(580))
    assert read_one(database, tmp_path).incomplete == (f"Nsight Systems says: {' '.join(text.split())}",)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("12 CUDA events were dropped", 1),
        ("CUDA injection initialized successfully.", 2),
        ("Not all OS runtime libraries events might have been collected.", 2),
        ("CPU IP/backtrace samples were lost", 2),
    ],
)
def test_messages_that_are_no_warning_or_of_other_things_are_no_note(tmp_path: Path, text: str, severity: int) -> None:
    database = with_kernels()
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=severity, text=text, globalPid=global_pid(580))
    assert read_one(database, tmp_path).notes == ()


def test_a_warning_that_rows_might_be_missing_is_disproved_by_launches_that_all_have_theirs(tmp_path: Path) -> None:
    database = with_kernels()
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=MIGHT, globalPid=global_pid(580))
    trace = read_one(database, tmp_path)
    assert (trace.notes, trace.incomplete) == ((f"Nsight Systems says: {MIGHT}",), ())


def test_a_warning_that_rows_might_be_missing_counts_where_nothing_disproves_it(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 100, 105)
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=MIGHT, globalPid=global_pid(580))
    assert f"Nsight Systems says: {MIGHT}" in read_one(database, tmp_path).incomplete


def test_a_warning_about_ranges_is_a_note_only(tmp_path: Path) -> None:
    text = "Not all NVTX events might have been collected."
    database = NsysDatabase()
    database.kernel(GEMM, 100, 105)
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text=text, globalPid=global_pid(580))
    trace = read_one(database, tmp_path)
    assert f"Nsight Systems says: {text}" in trace.notes
    assert trace.incomplete == ()


@pytest.mark.parametrize(("whose", "concerned"), [(global_pid(580), True), (global_pid(901), False), (None, True)])
def test_a_warning_concerns_the_process_that_it_names_or_all(
    tmp_path: Path, whose: int | None, concerned: bool
) -> None:
    database = with_kernels()
    database.add("DIAGNOSTIC_EVENT", timestamp=1, severity=2, text="CUDA events were dropped", globalPid=whose)
    assert bool(read_one(database, tmp_path).incomplete) == concerned


def test_graphs_recorded_as_a_whole_hide_their_kernels(tmp_path: Path) -> None:
    database = with_kernels()
    row = {"deviceId": 0, "globalPid": global_pid(580), "correlationId": 900, "graphId": 1}
    for start in (300_000, 400_000):
        database.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=start, end=start + 50_000, **row)
    trace = read_one(database, tmp_path)
    assert len(trace.activities) == 3
    assert trace.incomplete[0].startswith("2 launches of CUDA graphs are recorded as a whole")
    assert "--cuda-graph-trace=node" in trace.incomplete[0]


def test_a_file_with_nothing_but_whole_graphs_is_not_an_idle_device(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1000, end=2000, deviceId=0, globalPid=global_pid(580))
    trace = read_one(database, tmp_path)
    assert (trace.process, trace.device_index, len(trace.activities), len(trace.incomplete)) == (580, 0, 0, 1)
