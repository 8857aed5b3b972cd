"""NVTX ranges of a database of Nsight Systems: labels, PyTorch's operators, NCCL's own ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
from nsys_databases import NsysDatabase, global_tid
from test_nsys import GATHER, GEMM, names, read_one

from overlap_probe.tables import Trace


def with_a_kernel(launch: float = 25, **values: object) -> NsysDatabase:
    database = NsysDatabase()
    database.kernel(GEMM, 100, 200, launch, **values)
    return database


def spans_us(trace: Trace) -> list[tuple[str, float, float]]:
    ranges = trace.ranges
    pairs = zip(names(trace, "ranges"), ranges.start_ns.tolist(), ranges.end_ns.tolist(), strict=True)
    return [(name, start / 1000, end / 1000) for name, start, end in pairs]


def launched_inside(trace: Trace) -> list[str | None]:
    """Name of the operation that launched each activity."""
    rows = trace.activities.operation.tolist()
    return [None if row < 0 else trace.names[trace.operations.name[row]] for row in rows]


def test_ranges_come_outermost_first(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range("inner", 10, 20)
    database.range("later", 30, 40)
    database.range("outer", 10, 50)
    assert spans_us(read_one(database, tmp_path)) == [("outer", 10, 50), ("inner", 10, 20), ("later", 30, 40)]


def test_a_registered_string_is_found_by_its_number(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range(None, 10, 20, textId=database.string("MFSDP layers.0 forward"))
    assert spans_us(read_one(database, tmp_path)) == [("MFSDP layers.0 forward", 10, 20)]


def test_start_end_ranges_count_and_marks_and_domains_do_not(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range("start/end", 10, 20, eventType=60, rangeId=1, endGlobalTid=global_tid(580, 599))
    database.range("a mark", 12, None, eventType=34)
    database.range("a category", 12, 13, eventType=33)
    database.range("NCCL", 0, None, eventType=75)
    trace = read_one(database, tmp_path)
    assert spans_us(trace) == [("start/end", 10, 20)]
    assert trace.notes == ()


def test_a_range_is_on_the_thread_that_opened_it_as_the_launches_are(tmp_path: Path) -> None:
    database = with_a_kernel(thread=601)
    database.range("on the launching thread", 10, 50, thread=601)
    database.range("on another thread", 10, 50, thread=602, endGlobalTid=global_tid(580, 601), eventType=60)
    trace = read_one(database, tmp_path)
    same = trace.ranges.thread == trace.activities.launch_thread[0]
    assert dict(zip(names(trace, "ranges"), same.tolist(), strict=True)) == {
        "on the launching thread": True,
        "on another thread": False,
    }


def test_a_range_without_end_lasts_until_the_end_of_the_trace(tmp_path: Path) -> None:
    database = with_a_kernel()  # ends at 200 us
    database.range("never popped", 10, None)
    trace = read_one(database, tmp_path)
    assert spans_us(trace) == [("never popped", 10, 200)]
    assert trace.notes == ("1 NVTX ranges have no end in the file and count until the end of the trace",)
    assert not trace.incomplete


def test_a_range_that_opens_after_everything_else_and_has_no_end_is_empty(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range("step9", 900, None)
    assert spans_us(read_one(database, tmp_path)) == [("step9", 900, 900)]


def test_a_range_that_ends_before_it_starts_is_left_out(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range("backwards", 50, 40)
    trace = read_one(database, tmp_path)
    assert spans_us(trace) == []
    assert "end before they start" in trace.notes[0]


def test_ncclS_own_ranges_keep_their_name(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range(None, 10, 20, textId=database.string("ncclAllGather"), domainId=1, jsonText='{"Bytes": 64}')
    assert names(read_one(database, tmp_path), "ranges") == ["ncclAllGather"]


def test_pytorchs_operators_become_operations_with_their_shapes(tmp_path: Path) -> None:
    database = with_a_kernel()
    database.range("aten::linear, seq = 12, op_id = 33, sizes = [[2, 3], [3, 4], []]", 10, 40)
    database.range("aten::addmm, op_id = 34, sizes = [[4], [2, 3], [3, 4]], input_op_ids = [(12,0), (,-1)]", 20, 30)
    database.range("aten::view, op_id = 35", 50, 60)
    trace = read_one(database, tmp_path)
    assert names(trace, "operations") == ["aten::linear", "aten::addmm", "aten::view"]
    shapes = [None if code < 0 else trace.names[code] for code in trace.operations.shapes]
    assert shapes == ["[[2, 3], [3, 4], []]", "[[4], [2, 3], [3, 4]]", None]
    assert len(trace.ranges) == 0
    assert launched_inside(trace) == ["aten::addmm"]


@pytest.mark.parametrize(
    ("text", "is_operation", "name"),
    [
        ("aten::mm, seq = 12", True, "aten::mm"),
        ("AddmmBackward0, seq = 7, op_id = 8", True, "AddmmBackward0"),
        ("aten::mm, sizes = [[2, 3], [3, 4]]", True, "aten::mm"),
        ("_c10d_functional::all_gather_into_tensor, op_id = 5", True, "_c10d_functional::all_gather_into_tensor"),
        ("ProfilerStep#4, op_id = 9", False, "ProfilerStep#4"),
        ("FSDP::all_gather (layers.0, wrapped), op_id = 9", False, "FSDP::all_gather (layers.0, wrapped)"),
        ("nccl:all_gather, op_id = 9", False, "nccl:all_gather"),
        ("aten::mm", False, "aten::mm"),
        ("a, seq of steps", False, "a, seq of steps"),
    ],
)
def test_what_pytorch_appends_tells_operators_from_labels(
    tmp_path: Path, text: str, is_operation: bool, name: str
) -> None:
    database = with_a_kernel()
    database.range(text, 10, 40)
    trace = read_one(database, tmp_path)
    assert names(trace, "operations" if is_operation else "ranges") == [name]
    assert len(trace.operations) + len(trace.ranges) == 1


def test_the_collective_operator_is_innermost_because_record_param_comms_says_nothing_here(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GATHER, 100, 200, 25)
    database.range("c10d::_allgather_base_, op_id = 1", 10, 40)
    database.range("record_param_comms, op_id = 2", 12, 38)
    database.range("nccl:_all_gather_base, op_id = 3", 14, 36)
    trace = read_one(database, tmp_path)
    assert launched_inside(trace) == ["c10d::_allgather_base_"]
    assert names(trace, "ranges") == ["nccl:_all_gather_base"]


def test_the_operation_of_a_launch_is_the_innermost_around_it_on_its_thread(tmp_path: Path) -> None:
    # Launches at 5 (before any), 15 (in linear), 25 (in addmm), 30 (addmm has just ended), 45 (after all), and at 25 on
    # a thread without operators.
    database = NsysDatabase()
    for place, launch in enumerate((5, 15, 25, 30, 45)):
        database.kernel(GEMM, 100 + 10 * place, 105 + 10 * place, launch)
    database.kernel(GEMM, 150, 155, 25, thread=601)
    database.range("aten::linear, op_id = 1", 10, 40)
    database.range("aten::addmm, op_id = 2", 20, 30)
    trace = read_one(database, tmp_path)
    assert launched_inside(trace) == [None, "aten::linear", "aten::addmm", "aten::linear", None, None]
