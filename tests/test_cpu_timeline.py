"""CPU-only timelines: gloo's rows are the collectives, operators the compute, threads the streams."""

from __future__ import annotations

import pytest
from timelines import Timeline, gathers

from overlap_probe.cpu_timeline import with_cpu_activities
from overlap_probe.overlap import analyze
from overlap_probe.results import Window

GATHER, SCATTER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"


def call(t: Timeline, name: str, at: float, label: str | None = None) -> None:
    """A call of 4 us on the main thread, under a label."""
    if label:
        t.label(label, at - 1, at + 5)
    t.operation(name, at, at + 4)


def row(t: Timeline, kind: str, start: float, end: float, thread: str = "gloo 1") -> None:
    t.label(f"gloo:{kind}", start, end, thread=thread)


def whole(t: Timeline) -> Window:
    return analyze(t.trace()).whole


def test_a_gloo_row_beside_a_matmul_of_another_thread_is_hidden():
    t = Timeline()
    call(t, GATHER, 0, "FSDP::all_gather (a)")
    row(t, "all_gather", 10, 60)
    t.operation("aten::mm", 40, 140)
    (c,) = whole(t).collectives
    # 10-60, of which 40-60 beside the matmul.
    assert (c.op, c.mechanism, c.found_by) == ("all_gather", "cpu", "operation")
    assert (c.time_ns, c.hidden_by_gemm_ns, c.exposed_ns) == (50_000, 20_000, 30_000)
    assert (c.launch_ns, c.queue_ns) == (0, 10_000)


def test_the_nth_row_belongs_to_the_nth_call_however_late_it_runs():
    # All three calls are made before the first row begins.
    t = Timeline()
    for place, unit in enumerate("abc"):
        call(t, GATHER, 10 * place, f"fsdp_runtime::all_gather forward ({unit})")
        row(t, "all_gather", 100 + 10 * place, 105 + 10 * place, thread=f"gloo {place % 2}")
    assert [(c.unit, c.launch_ns) for c in whole(t).collectives] == [("a", 0), ("b", 10_000), ("c", 20_000)]


def test_rows_of_other_kinds_do_not_take_a_call():
    t = Timeline()
    call(t, "c10d::broadcast_", 0)
    call(t, GATHER, 10, "FSDP::all_gather (a)")
    row(t, "all_gather", 20, 40)
    row(t, "broadcast", 20, 90, thread="gloo 2")
    assert [(c.op, c.unit) for c in whole(t).collectives] == [("all_gather", "a"), ("broadcast", None)]


def test_a_reduce_scatter_that_gloo_runs_as_an_all_reduce_is_a_reduce_scatter():
    t = Timeline()
    call(t, SCATTER, 0, "FSDP::post_backward_reduce (a)")
    row(t, "all_reduce", 10, 60)
    call(t, REDUCE, 70)
    row(t, "all_reduce", 80, 90)
    assert [(c.op, c.unit, c.time_ns) for c in whole(t).collectives] == [
        ("reduce_scatter", "a", 50_000),
        ("all_reduce", None, 10_000),
    ]


def test_a_call_that_gloo_runs_as_several_rows_is_one_collective():
    # A reduce-scatter of a list of tensors is an all-reduce a rank; the call after it has a row of its own.
    t = Timeline(world_size=2)
    call(t, "c10d::reduce_scatter_", 0, "FSDP::post_backward_reduce (a)")
    row(t, "all_reduce", 10, 30, thread="gloo 1")
    row(t, "all_reduce", 20, 50, thread="gloo 2")
    call(t, SCATTER, 100, "FSDP::post_backward_reduce (b)")
    row(t, "all_reduce", 110, 120)
    # a: the union of 10-30 and 20-50.
    assert [(c.op, c.unit, c.time_ns) for c in whole(t).collectives] == [
        ("reduce_scatter", "a", 40_000),
        ("reduce_scatter", "b", 10_000),
    ]


def coalesced(shapes: str | None) -> Timeline:
    """A call that gloo ran as three rows, and one that it ran as one."""
    t = Timeline()
    t.label("FSDP::post_backward_reduce (a)", 0, 10)
    t.operation("c10d::reduce_scatter_tensor_coalesced_", 1, 9, shapes=shapes)
    for start, end in ((10, 20), (20, 30), (40, 60)):
        row(t, "all_reduce", start, end)
    call(t, SCATTER, 100, "FSDP::post_backward_reduce (b)")
    row(t, "all_reduce", 110, 115)
    return t


def test_a_call_that_gloo_runs_as_one_row_a_tensor_is_one_collective():
    collectives = whole(coalesced("[[[4], [8], []], [[8], [16], [2]], [], []]")).collectives
    # a: 10 + 10 + 20.
    assert [(c.op, c.unit, c.time_ns) for c in collectives] == [
        ("reduce_scatter", "a", 40_000),
        ("reduce_scatter", "b", 5_000),
    ]


@pytest.mark.parametrize("shapes", [None, "", "[[[4], [8", "[7]", "{}", "[[]]"])
def test_rows_of_a_call_of_unknown_tensors_are_left_over_and_a_note_says_so(shapes):
    analysis = analyze(coalesced(shapes).trace())
    assert analysis.notes == ("2 of 4 gloo rows have no call in the trace",)


def test_a_functional_collective_is_one_call_although_it_makes_another():
    t = Timeline()
    for at, unit in ((0, "a"), (100, "b")):
        t.label(f"fsdp_runtime::all_gather forward ({unit})", at - 1, at + 9)
        t.operation("_c10d_functional::all_gather_into_tensor", at, at + 8)
        t.operation("c10d::allgather_into_tensor_coalesced_", at + 2, at + 6)
        row(t, "all_gather", at + 20, at + 40)
    assert [c.unit for c in whole(t).collectives] == ["a", "b"]


def test_rows_that_the_trace_has_no_call_of_are_still_collectives_and_a_note_says_so():
    t = Timeline()
    row(t, "all_gather", 0, 10)
    call(t, GATHER, 20, "FSDP::all_gather (a)")
    row(t, "all_gather", 30, 40)
    analysis = analyze(t.trace())
    assert [(c.op, c.unit, c.launch_ns) for c in analysis.whole.collectives] == [
        ("all_gather", None, None),
        ("all_gather", "a", 20_000),
    ]
    assert analysis.quality == "degraded"
    assert "1 of 2" in analysis.notes[0]


def test_waiting_for_a_functional_collective_is_no_call():
    t = Timeline()
    call(t, "_c10d_functional::all_gather_into_tensor", 0, "fsdp_runtime::all_gather forward (a)")
    t.operation("_c10d_functional::wait_tensor", 6, 60)
    row(t, "all_gather", 10, 50)
    found = whole(t)
    assert [c.unit for c in found.collectives] == ["a"]
    assert found.compute_ns == 0


def operators(*rows: tuple[str, float, float, str]) -> tuple[int, int]:
    """GEMM and compute time of operators (name, start, end, thread), one gloo row at 1000-1100 on ``gloo 1``."""
    t = Timeline()
    row(t, "all_gather", 1000, 1100)
    for name, start, end, thread in rows:
        t.operation(name, start, end, thread=thread)
    found = whole(t)
    return found.gemm_ns, found.compute_ns


@pytest.mark.parametrize(
    ("rows", "gemm_us", "compute_us"),
    [
        # Innermost counts: 20-80 of the linear is a matmul.
        ([("aten::linear", 0, 100, "main"), ("aten::addmm", 20, 80, "main")], 60, 60),
        # What is inside a matmul and no matmul does not cut it short.
        ([("aten::mm", 0, 100, "main"), ("aten::copy_", 20, 30, "main")], 100, 100),
        ([("aten::mm", 0, 100, "main"), ("aten::resolve_conj", 20, 30, "main")], 100, 100),
        # An operator around another is the inner one's time.
        ([("aten::gelu", 0, 100, "main"), ("aten::mul", 20, 30, "main")], 0, 10),
        ([("aten::view", 0, 100, "main"), ("aten::empty", 100, 200, "main")], 0, 0),
        # Inside a gloo row it is gloo's own work; at the same time on another thread it is not.
        ([("aten::copy_", 1010, 1020, "gloo 1")], 0, 0),
        ([("aten::copy_", 1010, 1020, "main")], 0, 10),
        ([("aten::copy_", 1100, 1120, "gloo 1")], 0, 20),
    ],
)
def test_only_innermost_operators_outside_of_gloos_rows_compute(rows, gemm_us, compute_us):
    assert operators(*rows) == (gemm_us * 1000, compute_us * 1000)


def test_a_thread_plays_the_part_of_a_stream():
    t = Timeline()
    call(t, GATHER, 0, "FSDP::all_gather (a)")
    row(t, "all_gather", 10, 60, thread="gloo 1")
    call(t, GATHER, 20, "FSDP::all_gather (b)")
    row(t, "all_gather", 30, 80, thread="gloo 2")
    a, b = gathers(analyze(t.trace())).values()
    assert len({a.streams, b.streams}) == 2
    # b waits for nothing on its own thread: 30 - 20.
    assert b.queue_ns == 10_000


def test_a_row_on_a_busy_gloo_thread_does_not_count_the_row_before_it_as_its_queue():
    t = Timeline()
    call(t, GATHER, 0, "FSDP::all_gather (a)")
    call(t, GATHER, 5, "FSDP::all_gather (b)")
    row(t, "all_gather", 10, 60)
    row(t, "all_gather", 62, 100)
    assert gathers(analyze(t.trace()))["b"].queue_ns == 2_000


def test_a_trace_with_device_activity_is_left_as_it_is():
    t = Timeline()
    t.gemm(10, 20)
    row(t, "all_gather", 0, 100)
    trace = t.trace()
    assert with_cpu_activities(trace) is trace


def test_a_trace_without_gloo_has_no_device_activity():
    t = Timeline()
    t.operation("aten::mm", 0, 100)
    found = whole(t)
    assert (found.gemm_ns, found.collectives) == (0, ())
