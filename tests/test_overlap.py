"""The numbers of one rank: against sets of integers, and on timelines that were worked out by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from timelines import COMPUTE, GATHERS, LOCAL_COPY, Timeline, forward, gathers, only

from overlap_probe.options import Options
from overlap_probe.overlap import analyze
from overlap_probe.results import Analysis, Collective, Totals

# ---- whatever the timeline


@st.composite
def rows(draw: Any) -> list[tuple[str, int, int, int]]:
    """Up to 14 activities: what, stream, start and end in us."""
    what = st.sampled_from(["gemm", "pointwise", "copy", "gather", "gather", "reduce"])
    one = st.tuples(what, st.sampled_from([7, 8, 20]), st.integers(0, 40), st.integers(0, 15))
    return [(w, stream, start, start + length) for w, stream, start, length in draw(st.lists(one, max_size=14))]


def timeline(some: list[tuple[str, int, int, int]], ahead_ns: int = 0) -> Timeline:
    t = Timeline(ahead_ns=ahead_ns)
    for place, (what, stream, start, end) in enumerate(some):
        if what in ("gather", "reduce"):
            # A thread each, so that the labels around the launches do not meet.
            method = t.gather if what == "gather" else t.reduce_scatter
            method(f"u{place}", start, end, stream=stream, thread=f"thread {place}")
        else:
            getattr(t, what)(start, end, stream=stream)
    return t


def moments(some: list[tuple[str, int, int, int]], *kinds: str, streams: set[int] | None = None) -> set[int]:
    return {
        at
        for what, stream, start, end in some
        if what in kinds and (streams is None or stream in streams)
        for at in range(start, end)
    }


@given(rows())
def test_totals_are_sizes_of_sets_of_moments(some):
    whole = analyze(timeline(some).trace()).whole
    gemm, compute = moments(some, "gemm"), moments(some, "gemm", "pointwise")
    working = ["gemm"] if any(w == "gemm" for w, *_ in some) else ["pointwise"]
    compute_streams = {stream for w, stream, *_ in some if w in working}
    busy = compute | moments(some, "copy", streams=compute_streams)
    assert (whole.gemm_ns, whole.compute_ns) == (1000 * len(gemm), 1000 * len(compute))
    for totals, kinds in (
        (whole.communication, ("gather", "reduce")),
        (whole.all_gather, ("gather",)),
        (whole.by_op["reduce_scatter"], ("reduce",)),
    ):
        times = moments(some, *kinds)
        assert totals.count == sum(w in kinds for w, *_ in some)
        assert totals.time_ns == 1000 * len(times)
        assert totals.hidden_ns == 1000 * len(times & compute)
        assert totals.hidden_by_gemm_ns == 1000 * len(times & gemm)
        assert totals.exposed_ns == 1000 * len(times - compute)
        assert totals.stalled_ns == 1000 * len(times - busy)
        assert totals.overlapped_by_gemm == sum(
            bool(set(range(start, end)) & gemm) for w, _, start, end in some if w in kinds
        )


def consists(x: Collective | Totals) -> bool:
    return 0 <= x.hidden_by_gemm_ns <= x.hidden_ns <= x.time_ns == x.hidden_ns + x.exposed_ns


@given(rows())
def test_hidden_and_exposed_make_up_the_time_of_each_collective_and_of_each_set(some):
    analysis = analyze(timeline(some).trace())
    for window in analysis.windows.values():
        sets = [window.communication, *window.by_op.values()]
        sets += [p for phase in (window.forward, window.backward) for p in (phase.all_gather, phase.reduce_scatter)]
        assert all(consists(x) for x in [*sets, *window.collectives])
        assert all(0 <= x.stalled_ns <= x.exposed_ns for x in [*sets, *window.collectives])


def without_place(analysis: Analysis, ahead_ns: int = 0) -> tuple[Any, ...]:
    """What an analysis says apart from the order of its rows, with the clock put back."""

    def back(at: int | None) -> int | None:
        return None if at is None else at - ahead_ns

    whole = analysis.whole
    collectives = [
        replace(c, index=0, start_ns=back(c.start_ns), end_ns=back(c.end_ns), launch_ns=back(c.launch_ns))
        for c in whole.collectives
    ]
    totals = (whole.communication, whole.by_op, whole.forward, whole.backward, whole.gemm_ns, whole.compute_ns)
    return (*totals, sorted(collectives, key=lambda c: c.unit or ""))


@given(rows(), st.randoms())
def test_the_order_of_the_rows_of_a_trace_does_not_matter(some, random):
    # Rows of one start and end are told apart by nothing, so each is given a moment of its own.
    apart = [(w, stream, 50 * start + n, 50 * end + n) for n, (w, stream, start, end) in enumerate(some)]
    t = timeline(apart)
    expected = without_place(analyze(t.trace()))
    random.shuffle(t._rows["ranges"])
    random.shuffle(t._rows["activities"])
    assert without_place(analyze(t.trace())) == expected


@given(rows(), st.sampled_from([-1_000_000, 1, 1_764_000_000_123_456_789]))
def test_when_the_clock_started_does_not_matter(some, ahead_ns):
    shifted = without_place(analyze(timeline(some, ahead_ns).trace()), ahead_ns)
    assert shifted == without_place(analyze(timeline(some).trace()))


def test_an_empty_trace_gives_zeros():
    whole = analyze(Timeline().trace()).whole
    assert whole.communication == whole.all_gather == Totals(slowdown_ns=0, net_hidden_ns=0)
    assert set(whole.by_op) == {"all_gather", "reduce_scatter"}
    assert (whole.gemm_ns, whole.compute_ns, whole.collectives) == (0, 0, ())
    assert (whole.forward.children, whole.forward.expected, whole.forward.found) == (0, None, 0)


# ---- totals worked out by hand


def test_a_gather_is_hidden_as_far_as_compute_runs_beside_it():
    t = Timeline()
    t.gather("a", 100, 200)
    t.gemm(150, 170)
    t.pointwise(180, 230)
    c = only(analyze(t.trace()))
    # 150-170 under a GEMM, 180-200 under other compute: 40 hidden, 20 of it by a GEMM, 60 exposed.
    assert (c.time_ns, c.hidden_ns, c.hidden_by_gemm_ns, c.exposed_ns) == (100_000, 40_000, 20_000, 60_000)


def test_two_gathers_at_one_time_are_counted_once():
    t = Timeline()
    t.gather("a", 100, 200)
    t.gather("b", 150, 250, stream=21)
    t.gemm(160, 210)
    totals = analyze(t.trace()).whole.all_gather
    # Union 100-250, of which 160-210 is hidden; the sum would be 200 and 90.
    assert (totals.count, totals.time_ns, totals.hidden_ns, totals.exposed_ns) == (2, 150_000, 50_000, 100_000)


def test_a_gather_beside_a_reduce_scatter_counts_once_in_the_communication():
    t = Timeline()
    t.gather("a", 100, 200)
    t.reduce_scatter("b", 150, 250)
    whole = analyze(t.trace()).whole
    assert (whole.all_gather.time_ns, whole.by_op["reduce_scatter"].time_ns) == (100_000, 100_000)
    assert (whole.communication.count, whole.communication.time_ns) == (2, 150_000)


def test_overlapping_kernels_of_one_stream_are_a_union():
    t = Timeline()
    t.gemm(100, 200)
    t.gemm(190, 250)
    assert analyze(t.trace()).whole.gemm_ns == 150_000


def test_another_collective_beside_it_hides_nothing():
    t = Timeline()
    t.gather("a", 100, 200)
    t.reduce_scatter("b", 100, 200)
    assert analyze(t.trace()).whole.all_gather.hidden_ns == 0


def test_touching_is_not_overlapping():
    t = Timeline()
    t.gemm(50, 100)
    t.gather("a", 100, 200)
    t.gemm(200, 300)
    c = only(analyze(t.trace()))
    assert (c.hidden_ns, c.overlapped) == (0, False)


def test_a_gemm_of_no_duration_overlaps_nothing():
    t = Timeline()
    t.gather("a", 100, 200)
    t.gemm(150, 150)
    c = only(analyze(t.trace()))
    assert (c.hidden_ns, c.overlapped) == (0, False)


def test_a_gather_overlaps_if_it_does_so_for_longer_than_the_least():
    t = Timeline()
    t.gather("a", 100, 200)
    t.gemm(195, 300)
    trace = t.trace()
    counts = [
        analyze(trace, Options(min_overlap_ns=ns)).whole.all_gather.overlapped_by_gemm for ns in (0, 4_999, 5_000)
    ]
    assert counts == [1, 1, 0]


def test_other_collectives_are_reported_under_their_own_key():
    t = Timeline()
    t.call("nccl:all_reduce", 100, 150, collective="allreduce", kernel="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    whole = analyze(t.trace()).whole
    assert whole.by_op["all_reduce"].time_ns == whole.communication.time_ns == 50_000
    assert whole.all_gather.count == 0


def test_phases_are_totalled_apart():
    t = Timeline()
    t.gather("a", 100, 150)
    t.gemm(120, 150)
    t.gather("a", 200, 220, phase="backward")
    t.reduce_scatter("a", 300, 340)
    whole = analyze(t.trace()).whole
    assert (whole.forward.all_gather.time_ns, whole.forward.all_gather.hidden_ns) == (50_000, 30_000)
    assert (whole.backward.all_gather.time_ns, whole.backward.all_gather.hidden_ns) == (20_000, 0)
    assert (whole.forward.reduce_scatter.count, whole.backward.reduce_scatter.time_ns) == (0, 40_000)


# ---- stalled


def test_exposed_time_beside_a_copy_on_the_compute_stream_did_not_stall_the_rank():
    t = Timeline()
    t.gemm(0, 100)
    t.copy(100, 130, name=LOCAL_COPY, stream=COMPUTE)
    t.gather("a", 100, 150)
    c = only(analyze(t.trace()))
    # Exposed 100-150; until 130 the compute stream was at work.
    assert (c.exposed_ns, c.stalled_ns) == (50_000, 20_000)


def test_a_copy_on_a_stream_of_its_own_does_not_keep_the_rank_busy():
    t = Timeline()
    t.gemm(0, 100)
    t.copy(100, 150, name=LOCAL_COPY, stream=9)
    t.gather("a", 100, 150)
    assert only(analyze(t.trace())).stalled_ns == 50_000


def test_a_gather_on_the_compute_stream_stalls_it():
    t = Timeline()
    t.gemm(0, 100)
    t.gather("a", 100, 150, stream=COMPUTE)
    assert only(analyze(t.trace())).stalled_ns == 50_000


def test_without_a_gemm_the_streams_on_which_compute_ran_are_the_compute_streams():
    t = Timeline()
    t.pointwise(0, 100)
    t.copy(100, 130, name=LOCAL_COPY, stream=COMPUTE)
    t.gather("a", 100, 150)
    assert only(analyze(t.trace())).stalled_ns == 20_000


def test_with_a_gemm_a_stream_with_other_compute_only_is_no_compute_stream():
    t = Timeline()
    t.gemm(0, 100)
    t.pointwise(0, 10, stream=GATHERS)
    t.copy(100, 130, name=LOCAL_COPY, stream=GATHERS)
    t.gather("a", 100, 150, stream=21)
    assert only(analyze(t.trace())).stalled_ns == 50_000


# ---- launch and queue


def test_a_queue_begins_with_the_launch_where_the_stream_was_free():
    t = Timeline()
    t.gather("a", 130, 150, launch=100)
    c = only(analyze(t.trace()))
    assert (c.launch_ns, c.queue_ns) == (100_000, 30_000)


def test_a_queue_begins_when_the_stream_gets_free():
    t = Timeline()
    t.gather("a", 100, 160, launch=50)
    t.gather("b", 170, 180, launch=60)
    queues = {unit: c.queue_ns for unit, c in gathers(analyze(t.trace())).items()}
    # a: 100 - 50; b: its stream was busy until 160, 170 - 160.
    assert queues == {"a": 50_000, "b": 10_000}


def test_what_another_stream_did_before_is_not_part_of_the_queue():
    t = Timeline()
    t.gemm(0, 125)
    t.gather("a", 130, 150, launch=100)
    assert only(analyze(t.trace())).queue_ns == 30_000


def test_a_longer_activity_earlier_on_the_stream_holds_up_the_queue():
    # Two kernels of one stream overlap; the first ends last.
    t = Timeline()
    t.pointwise(0, 120, stream=GATHERS)
    t.pointwise(10, 20, stream=GATHERS)
    t.gather("a", 130, 150, launch=50)
    assert only(analyze(t.trace())).queue_ns == 10_000


def test_a_start_before_the_launch_makes_no_negative_queue():
    t = Timeline()
    t.gather("a", 100, 150, launch=105)
    assert only(analyze(t.trace())).queue_ns == 0


def test_without_a_launch_there_is_no_queue():
    t = Timeline()
    t.kernel("ncclDevKernel_AllGather_RING_LL", 100, 150, stream=GATHERS)
    c = only(analyze(t.trace()))
    assert (c.launch_ns, c.queue_ns) == (None, None)


def test_launch_and_queue_of_a_gather_of_copies_are_those_of_the_first():
    t = Timeline()
    t.gather("a", 0, 0, launch=100, copies=[(140, 150), (150, 160)])
    c = only(analyze(t.trace()))
    assert (c.launch_ns, c.queue_ns) == (100_000, 40_000)


# ---- slowdown


def with_gemms(*gemms: tuple[float, float, str | None], blocks: int = 256) -> Totals:
    """All-gather totals of a gather at 1000-1100 beside some GEMMs: start, end, shapes."""
    t = Timeline()
    t.gather("a", 1000, 1100)
    for start, end, shapes in gemms:
        operation = t.operation("aten::mm", start - 20, start - 19, shapes=shapes) if shapes else -1
        t.gemm(start, end, blocks=blocks, operation=operation)
    return analyze(t.trace()).whole.all_gather


def test_slowdown_is_what_gemms_beside_a_collective_took_longer_than_those_alone():
    totals = with_gemms((100, 200, None), (300, 404, None), (990, 1120, None))
    # Alone 100 and 104: median 102. Beside: 130. 28 slower; 100 hidden, net 72.
    assert (totals.slowdown_ns, totals.hidden_ns, totals.net_hidden_ns) == (28_000, 100_000, 72_000)


def test_slowdowns_are_summed():
    totals = with_gemms((100, 140, None), (200, 240, None), (1000, 1045, None), (1050, 1097, None))
    # 45 - 40 + 47 - 40
    assert totals.slowdown_ns == 12_000


def test_with_no_gemm_beside_it_nothing_was_slowed():
    totals = with_gemms((100, 200, None), (1100, 1200, None))
    assert (totals.slowdown_ns, totals.net_hidden_ns) == (0, 0)


def test_slowdown_is_not_known_if_no_comparable_gemm_ran_alone():
    totals = with_gemms((990, 1120, None))
    assert (totals.slowdown_ns, totals.net_hidden_ns) == (None, None)


def test_without_shapes_gemms_that_disagree_are_no_yardstick():
    # Alone 100 and 130 differ by 30, more than 25 % of their median 115: one grid, several sizes.
    assert with_gemms((100, 200, None), (300, 430, None), (990, 1120, None)).slowdown_ns is None
    # 100 and 125 differ by 25, less than 25 % of 112.5 = 28.1; 130 - 112.5 = 17.5.
    assert with_gemms((100, 200, None), (300, 425, None), (990, 1120, None)).slowdown_ns == 17_500


def test_with_shapes_only_gemms_of_the_same_shapes_are_comparable():
    large, small = "[[8192, 4096], [4096, 4096]]", "[[128, 4096], [4096, 4096]]"
    # The small one took 10 alone. The large one took 100 alone, 130 beside.
    assert with_gemms((100, 110, small), (300, 400, large), (990, 1120, large)).slowdown_ns == 30_000
    assert with_gemms((100, 110, small), (990, 1120, large)).slowdown_ns is None


def test_a_gemm_of_another_grid_is_not_comparable():
    t = Timeline()
    t.gather("a", 1000, 1100)
    t.gemm(100, 200, blocks=128)
    t.gemm(300, 400, blocks=128)
    t.gemm(990, 1120, blocks=256)
    assert analyze(t.trace()).whole.all_gather.slowdown_ns is None


def test_a_gemm_beside_any_other_collective_does_not_run_alone():
    t = Timeline()
    t.gather("a", 1000, 1100)
    t.gemm(990, 1120)
    t.reduce_scatter("a", 100, 500)
    t.gemm(100, 200)
    t.gemm(300, 400)
    whole = analyze(t.trace()).whole
    assert whole.all_gather.slowdown_ns is None
    assert whole.communication.slowdown_ns is None


def test_gemms_that_ran_faster_beside_a_collective_make_no_negative_slowdown():
    totals = with_gemms((100, 200, None), (300, 400, None), (1000, 1090, None))
    assert totals.slowdown_ns == 0


# ---- shape of an analysis


def test_an_analysis_carries_what_the_trace_says_of_itself():
    t = Timeline(rank=3, world_size=8, path="out/rank3.json")
    trace = replace(t.trace(), notes=("two rows dropped",))
    analysis = analyze(trace)
    assert (analysis.rank, analysis.world_size, analysis.path) == (3, 8, "out/rank3.json")
    assert (analysis.notes, analysis.quality) == (("two rows dropped",), "degraded")
    assert analyze(t.trace()).quality == "ok"


def test_a_forward_with_one_gather_too_late_is_found_out():
    t = Timeline()
    forward(t, 100, ["a", "b", "c", "d"], exposed=["c"])
    whole = analyze(t.trace()).whole
    # Root, a and c are exposed for 20 each; b and d are hidden.
    assert (whole.all_gather.time_ns, whole.all_gather.exposed_ns) == (100_000, 60_000)
    assert {unit for unit, c in gathers(analyze(t.trace())).items() if c.overlapped} == {"b", "d"}


def test_a_long_trace_is_measured_in_seconds():
    t = Timeline()
    for n in range(20_000):
        t.gemm(n * 10, n * 10 + 9, launch=n * 10)
        if n % 20 == 0:
            t.gather(f"u{n % 400}", n * 10 + 1, n * 10 + 5)
    trace = t.trace()
    began = time.perf_counter()
    assert analyze(trace).whole.all_gather.hidden_ns == 1000 * 4_000
    assert time.perf_counter() - began < 10
