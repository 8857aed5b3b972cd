"""A miss on a CPU whose thread had no core is the machine's; any other is the program's, on a busy machine too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timelines import Timeline, gathers

from overlap_probe.checks import evaluate
from overlap_probe.overlap import analyze
from overlap_probe.results import Analysis, Collective
from overlap_probe.tables import Waits

Wait = tuple[str, float, float, float]
"""A thread, between when it waited, and how long; us."""


def analysis(t: Timeline, *waits: Wait) -> Analysis:
    trace = t.trace()
    columns = zip(*waits, strict=True) if waits else ((), (), (), ())
    thread, start, end, waited = columns
    return analyze(
        replace(
            trace,
            waits=Waits.from_columns(
                len(waits),
                thread=[trace.names.index(name) for name in thread],
                start_ns=[round(1000 * us) for us in start],
                end_ns=[round(1000 * us) for us in end],
                waited_ns=[round(1000 * us) for us in waited],
            ),
        )
    )


def gather(t: Timeline, unit: str, launch: float, start: float, end: float) -> None:
    """A gather on gloo's thread; its call takes 4 us of the main thread."""
    t.label(f"fsdp_runtime::all_gather forward ({unit})", launch - 1, launch + 5)
    t.operation("c10d::_allgather_base_", launch, launch + 4)
    t.label("gloo:all_gather", start, end, thread="gloo")


def forward(*, b: tuple[float, float] = (1010, 1060), a_gemm: tuple[float, float] = (1010, 1110)) -> Timeline:
    """Three children: a is gathered, then b is launched at 1000, a computes, then c is gathered beside b's GEMM."""
    t = Timeline()
    gather(t, "a", 900, 910, 990)
    gather(t, "b", 1000, *b)
    t.operation("aten::mm", *a_gemm)
    gather(t, "c", 1200, 1210, 1260)
    t.operation("aten::mm", 1210, 1310)
    t.operation("aten::mm", 1320, 1420)
    return t


def early() -> Timeline:
    """The gather of b is over when a's GEMM begins."""
    return forward(b=(1010, 1060), a_gemm=(1070, 1170))


def late() -> Timeline:
    """The gather of b begins when a's GEMM is over."""
    return forward(b=(1120, 1170), a_gemm=(1010, 1110))


def b_of(found: Analysis) -> Collective:
    return gathers(found)["b"]


def verdict(found: Analysis, check: str = "overlaps >= auto") -> str:
    return evaluate(found, [check]).status


def test_an_overlap_that_was_seen_was_seen_however_long_threads_waited():
    found = analysis(forward(), ("main", 1000, 1060, 60), ("gloo", 1000, 1010, 10))
    assert b_of(found).starved_ns is None
    assert verdict(found) == "pass"


@pytest.mark.parametrize(
    ("waits", "starved_us"),
    [
        # The main thread launched it at 1000, and had no core for 40 of the 60 us until its end at 1060.
        ([("main", 1005, 1045, 40)], 40),
        # Of a wait from 1020 to 1100 half lies before 1060: 40 of 80.
        ([("main", 1020, 1100, 80)], 40),
        ([("main", 1000, 1015, 15), ("main", 1020, 1035, 15)], 30),
        # Where in an interval a wait was nobody knows: all of it may have been before 1060.
        ([("main", 1000, 1100, 35)], 35),
        ([("main", 950, 1035, 80), ("main", 1030, 1060, 30)], 60),  # 35 and 30 overlap: not more than there was
    ],
)
def test_a_gather_that_was_over_before_the_launching_thread_got_a_core_is_starved(
    waits: list[Wait], starved_us: int
) -> None:
    found = analysis(early(), *waits)
    assert b_of(found).starved_ns == starved_us * 1000
    assert verdict(found) == "inconclusive"


def test_what_the_launching_thread_computes_before_the_gemm_is_no_excuse_and_no_blame():
    t = early()
    t.operation("aten::copy_", 1010, 1040)
    # 16 of the 30 us that are left of 60; 14 would be less than half.
    assert b_of(analysis(t, ("main", 1040, 1060, 16))).starved_ns == 16_000
    assert b_of(analysis(t, ("main", 1040, 1060, 14))).starved_ns is None


def test_a_gather_whose_own_thread_had_no_core_until_the_gemm_was_over_is_starved():
    found = analysis(late(), ("gloo", 1010, 1110, 100))
    assert b_of(found).starved_ns == 100_000
    assert verdict(found) == "inconclusive"


@pytest.mark.parametrize(
    ("timeline", "waits"),
    [
        (early, []),
        # 29 of 60 us: less than half of what it had.
        (early, [("main", 1000, 1029, 29)]),
        # What waited after its end, before its launch, or in another thread, did not keep them apart.
        (early, [("main", 1061, 1070, 9), ("main", 900, 1000, 100), ("other", 1000, 1060, 60)]),
        # Once it runs, its own thread's waits make it longer, which is a chance more, not less.
        (early, [("gloo", 1010, 1060, 50)]),
        # The GEMM ran, and the gather's own thread was blocked, not ready.
        (late, [("gloo", 1120, 1170, 50)]),
    ],
)
def test_a_miss_that_no_wait_explains_is_a_failure(timeline, waits):
    t = timeline()
    t.label("something else", 0, 1, thread="other")
    found = analysis(t, *waits)
    assert b_of(found).starved_ns is None
    assert verdict(found) == "fail"


def test_a_serial_schedule_fails_on_a_busy_machine_too():
    # The host is blocked in each gather: it waits for a core only in the last 5 us of 50, when it wakes up; gloo's
    # thread waits for half of the time.
    t = Timeline()
    waits: list[Wait] = []
    for n, unit in enumerate("abc"):
        at = 1000 * n
        gather(t, unit, at, at + 2, at + 50)
        t.operation("aten::mm", at + 60, at + 200)
        waits += [("main", at + 45, at + 60, 15), ("gloo", at + 2, at + 50, 25), ("main", at + 60, at + 200, 100)]
    found = analysis(t, *waits)
    assert [c.starved_ns for c in found.whole.collectives] == [None, None, None]
    assert {gathers(found)[unit].cause for unit in "bc"} == {"serial"}
    assert verdict(found) == "fail"


def test_the_first_child_and_the_root_have_nothing_to_hide_behind_and_excuse_nobody():
    t = early()
    gather(t, "<root>", 870, 875, 890)
    found = analysis(t, ("main", 870, 990, 120))
    assert [c.starved_ns for c in found.whole.collectives] == [None] * 4
    assert verdict(found) == "fail"


def test_the_first_gather_of_each_step_excuses_nobody_where_no_units_tell_passes_apart():
    t = Timeline()
    for step, (at, launches) in enumerate([(0, (10, 300)), (1000, (1010, 1300, 1600))]):  # not alike: no order either
        t.label(f"ProfilerStep#{step}", at, at + 900)
        for launch in launches:  # all over before the GEMM
            t.operation("c10d::_allgather_base_", launch, launch + 4)
            t.label("gloo:all_gather", launch + 10, launch + 90, thread="gloo")
            t.operation("aten::mm", launch + 100, launch + 200)
    waits = [("main", at, at + 80, 80) for at in (15, 305, 1015, 1305, 1605)]
    found = analysis(t, *waits)
    assert [c.starved_ns for c in found.whole.collectives] == [None, 80_000, None, 80_000, 80_000]


def test_one_starved_gather_does_not_excuse_another():
    t = early()
    t.operation("aten::mm", 1430, 1500)
    gather(t, "d", 1600, 1610, 1700)  # missed, and nobody waited
    found = analysis(t, ("main", 1000, 1060, 60))
    assert b_of(found).starved_ns == 60_000
    # 1 of 3 overlaps; with b it would be 2.
    assert verdict(found) == "fail"
    assert verdict(found, "overlaps >= 2") == "inconclusive"


def test_the_evidence_is_in_the_finding_and_with_the_collective_instead_of_a_wrong_cause():
    without, found = analysis(early()), analysis(early(), ("main", 1000, 1060, 50))
    (finding,) = evaluate(found, ["overlaps >= auto"]).findings
    assert finding.message == (
        "1 of 2 expected forward all-gathers overlap a GEMM, wanted >= 2; but a thread waited up to 50.00 us for a "
        "core in the 60.00 us from launch to end of the all_gather of b: this machine is too busy to say; run again on "
        "idle cores"
    )
    assert (finding.value, finding.limit) == (1, 2)
    t = early()
    t.operation("aten::mm", 800, 850)  # compute before b: it is not the first of its pass
    gather(t, "z", 700, 710, 790)
    assert b_of(analysis(t)).cause == "serial"
    starved = b_of(analysis(t, ("main", 1000, 1060, 50)))
    assert starved.cause == "unknown"
    assert "without a core for up to 50.00 us" in str(starved.evidence)
    assert b_of(found).cause == b_of(without).cause == "first"


@pytest.mark.parametrize(
    ("check", "status"),
    [
        # a 80, b 50 and c 50 us, c all hidden: 50 of 180 = 27.8 %; with b 100 of 180 = 55.6 %.
        ("hidden >= 25%", "pass"),
        ("hidden >= 50%", "inconclusive"),
        ("hidden >= 60%", "fail"),
        # exposed 130 us, without b 80.
        ("exposed <= 80us", "inconclusive"),
        ("exposed <= 79us", "fail"),
        ("stalled <= 80us", "inconclusive"),
        ("stalled <= 40%", "fail"),
    ],
)
def test_a_time_is_in_doubt_by_what_the_starved_gathers_cost(check, status):
    assert verdict(analysis(early(), ("main", 1000, 1060, 50)), check) == status


def test_of_k_windows_a_starved_one_neither_holds_nor_fails():
    t = early()
    for step, (start, end) in enumerate([(890, 1500), (1890, 2500)]):
        t.label(f"ProfilerStep#{step}", start, end)
    for unit, launch in (("a", 1900), ("b", 2000), ("c", 2200)):
        gather(t, unit, launch, launch + 10, launch + 60)
    for start in (2010, 2210, 2320):
        t.operation("aten::mm", start, start + 100)
    found = analysis(t, ("main", 1000, 1060, 50))
    assert [f.status for f in evaluate(found, ["overlaps >= auto"]).findings] == ["inconclusive", "pass"]
    assert evaluate(found, ["overlaps >= auto"], at_least="1/2").status == "pass"
    assert evaluate(found, ["overlaps >= auto"], at_least="2/2").status == "inconclusive"


def test_on_a_device_waits_say_nothing():
    t = Timeline()
    t.label("gloo", 0, 1, thread="gloo")
    t.gather("a", 100, 150, launch=90)
    t.gather("b", 160, 210, launch=151)
    t.gemm(220, 320)
    t.gemm(330, 430)
    found = analysis(t, ("main", 80, 220, 140))
    assert b_of(found).starved_ns is None
    assert verdict(found) == "fail"
