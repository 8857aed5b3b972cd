"""Why a gather was exposed: one timeline a cause, and one that nearly is it.

All of them begin with ``started``: a root gathered at 0-20 and a GEMM at 30-60, so that a gather after it is not the
first of its pass. Evidence is text for people and not looked at here.
"""

from __future__ import annotations

import pytest
from timelines import COMPUTE, LOCAL_COPY, Timeline, gathers

from overlap_probe.overlap import analyze
from overlap_probe.results import Collective

FILLS, LEAVES_ROOM = 1024, 64
"""Blocks of a GEMM on 132 SMs."""


def started(**options: object) -> Timeline:
    t = Timeline(**options)
    t.gather(None, 0, 20, launch=-5)
    t.gemm(30, 60)
    return t


def of(t: Timeline, unit: str = "a") -> Collective:
    return gathers(analyze(t.trace()))[unit]


# ---- who gets a cause


@pytest.mark.parametrize(
    ("time_us", "exposed_us", "asked"),
    [
        (50, 10, False),  # not more than 10 us
        (50, 10.001, True),
        (200, 20, False),  # not more than 10 % of 200
        (200, 20.001, True),
        (5, 5, False),
    ],
)
def test_a_cause_is_given_where_more_than_10_us_and_a_tenth_is_exposed(time_us, exposed_us, asked):
    t = started()
    t.gather("a", 1000, 1000 + time_us, launch=990)
    t.gemm(1000 + exposed_us, 2000)
    assert (of(t).cause is not None) == asked


def test_only_all_gathers_get_a_cause():
    t = started()
    t.reduce_scatter("a", 1000, 1100, launch=900)
    (_, reduce) = analyze(t.trace()).whole.collectives
    assert (reduce.op, reduce.cause, reduce.waited_for) == ("reduce_scatter", None, None)


# ---- serial


def test_serial_is_a_gather_on_the_compute_stream():
    t = started()
    t.gather("a", 100, 200, stream=COMPUTE)
    assert of(t).cause == "serial"


def test_serial_is_not_a_gather_on_a_stream_of_its_own():
    t = started()
    t.gather("a", 100, 200)
    assert of(t).cause != "serial"


def test_serial_comes_before_first():
    t = Timeline()
    t.gather(None, 0, 50, stream=COMPUTE)
    t.gemm(60, 100)
    assert of(t, "<root>").cause == "serial"


# ---- first


def test_first_is_every_gather_before_the_first_compute_of_the_pass():
    t = Timeline()
    t.gather(None, 0, 50, launch=-5)
    t.gather("a", 50, 100, launch=0)
    t.gemm(110, 200)
    t.gather("b", 300, 400, launch=290)
    assert [of(t, unit).cause == "first" for unit in ("<root>", "a", "b")] == [True, True, False]


def test_a_pass_begins_anew_in_each_step():
    t = Timeline()
    for step in range(2):
        at = 1000 * step
        t.label(f"ProfilerStep#{step}", at, at + 1000)
        t.gather("a", at + 100, at + 150)
        t.gemm(at + 200, at + 300)
    windows = analyze(t.trace()).windows
    assert [c.cause for c in windows["whole"].collectives] == ["first", "first"]


def test_the_first_gather_of_the_backward_is_not_first_if_compute_runs_since():
    # The loss is computed between the first re-gather and the second.
    t = started()
    t.gather("b", 100, 150, phase="backward")
    t.pointwise(160, 200)
    t.gather("a", 250, 300, phase="backward")
    assert [of(t, unit).cause == "first" for unit in ("b", "a")] == [True, False]


# ---- late_launch


def test_late_launch_is_a_launch_after_the_compute_that_could_hide_it_had_ended():
    # 40 us exposed; the GEMM of 30 us ended 40 us before the launch.
    t = started()
    t.gather("a", 115, 155, launch=100)
    assert of(t).cause == "late_launch"


def test_late_launch_is_a_launch_after_the_compute_that_could_hide_it_had_begun():
    # Launched 150 us into a GEMM of 200 us, at once started, 50 us hidden.
    t = started()
    t.gemm(100, 300)
    t.gather("a", 250, 400, launch=250)
    assert of(t).cause == "late_launch"


def test_a_launch_at_the_beginning_of_the_compute_is_not_late():
    # Until 98 its stream was taken; the compute beside it begins with its launch.
    t = started()
    t.gather("b", 65, 98, launch=62)
    t.gemm(100, 300)
    t.gather("a", 105, 400, launch=100)
    assert of(t).cause == "longer_than_compute"


def test_a_gather_that_queued_is_not_late():
    t = started()
    t.gather("a", 200, 240, launch=100)
    assert of(t).cause != "late_launch"


@pytest.mark.parametrize(("queue_us", "late"), [(20, True), (20.001, False)])
def test_a_queue_is_small_up_to_20_us(queue_us, late):
    t = started()
    t.gather("a", 100 + queue_us, 140 + queue_us, launch=100)
    assert (of(t).cause == "late_launch") == late


# ---- sm_contention


def contended(blocks: int, start: float = 380, **device: object) -> Timeline:
    """A gather ready since 110 beside a GEMM of 100-400, started when the GEMM is nearly over."""
    t = started(**device)
    t.gemm(100, 400, blocks=blocks)
    t.gather("a", start, start + 220, launch=110)
    return t


def test_sm_contention_is_a_start_in_the_tail_of_a_kernel_that_fills_the_device():
    c = of(contended(FILLS))
    assert (c.cause, c.waited_for) == ("sm_contention", "sm")


@pytest.mark.parametrize(
    "near_miss",
    [
        contended(LEAVES_ROOM),  # the GEMM leaves SMs free
        contended(FILLS, start=250),  # half of the GEMM is still to run: not its tail
        contended(FILLS, sms=None),  # nobody knows how many SMs there are
    ],
)
def test_sm_contention_is_not_claimed_without_a_full_device_and_its_tail(near_miss):
    c = of(near_miss)
    assert (c.cause, c.waited_for) == ("unknown", None)


@pytest.mark.parametrize(("source", "target", "waits"), [(0, 0, True), (0, 1, False)])
def test_a_copy_inside_one_device_needs_sms_and_one_between_devices_does_not(source, target, waits):
    t = started()
    t.gemm(100, 400, blocks=FILLS)
    t.label("fsdp_runtime::all_gather forward (a)", 109, 111)
    t.copy(380, 600, launch=110, source=source, target=target)
    assert (of(t).cause == "sm_contention") == waits


def test_a_copy_that_says_no_devices_is_judged_by_its_name():
    t = started()
    t.gemm(100, 400, blocks=FILLS)
    t.label("fsdp_runtime::all_gather forward (a)", 109, 111)
    t.copy(380, 600, launch=110, name=LOCAL_COPY)
    assert of(t).waited_for == "sm"


def test_a_gather_whose_stream_was_busy_until_it_started_waited_for_no_sms():
    t = started()
    t.gemm(100, 400, blocks=FILLS)
    t.gather("b", 70, 380, launch=65)
    t.gather("a", 380, 600, launch=110)
    assert of(t).waited_for is None


# ---- dependency


def depending(ended: float) -> Timeline:
    """A gather ready since 110 that starts at 402; a copy on another stream ran until ``ended``."""
    t = started()
    t.gemm(100, 300, blocks=LEAVES_ROOM)
    t.copy(305, ended, name=LOCAL_COPY, stream=9, launch=105)
    t.gather("a", 402, 600, launch=110)
    return t


def test_dependency_is_a_start_right_at_the_end_of_another_streams_work():
    c = of(depending(400))
    assert (c.cause, c.waited_for) == ("dependency", "dependency")


def test_dependency_is_not_a_start_long_after_anything_else_ended():
    c = of(depending(340))
    assert (c.cause, c.waited_for) == ("unknown", None)


def test_work_that_ends_after_the_start_was_not_waited_for():
    c = of(depending(403))
    assert (c.cause, c.waited_for) == ("unknown", None)


# ---- longer_than_compute


def longer(last_gemm_ends: float) -> Timeline:
    """A gather launched early, behind another on its stream, at 100-300; its compute begins at 102."""
    t = started()
    t.gather("b", 65, 100, launch=62)
    t.gather("a", 100, 300, launch=64)
    t.gemm(102, 150)
    t.gemm(200, last_gemm_ends)
    return t


def test_longer_than_compute_covers_all_of_its_compute_and_more():
    assert of(longer(250)).cause == "longer_than_compute"


def test_a_gather_that_ends_before_its_compute_is_not_longer():
    # Exposed from 150 to 200, in a gap of the compute that goes on until 400.
    c = of(longer(400))
    assert c.exposed_ns == 52_000
    assert c.cause == "unknown"


# ---- the tail of a kernel whose tiles are known


def in_waves(rows: int, start: float) -> Timeline:
    """A gather ready since 65 beside a persistent GEMM of 100-200 on all SMs; its product is ``rows`` x 4096.

    Tiles are 256 x 128: rows / 256 x 32 of them, on 132 blocks.
    """
    t = started()
    product = t.operation("aten::mm", 60, 64, shapes=f"[[{rows}, 4096], [4096, 4096]]")
    t.gemm(100, 200, blocks=132, launch=62, operation=product)
    t.gather("a", start, start + 100, launch=65)
    return t


def test_the_tail_of_a_kernel_of_two_waves_is_its_second_half():
    # 2048 rows: 8 x 32 = 256 tiles, 132 in the first wave. A wave is half of the kernel, at most 1.2 times that: 60 us.
    assert of(in_waves(2048, 150)).cause == "sm_contention"
    assert of(in_waves(2048, 140)).cause == "sm_contention"


@pytest.mark.parametrize(
    "near_miss",
    [
        in_waves(2048, 139),  # 61 us left: in the first wave
        in_waves(4096, 150),  # 512 tiles, 4 waves: the last is a quarter of the kernel
        in_waves(1024, 150),  # 128 tiles: one wave, no tail that is told
    ],
)
def test_a_start_before_the_last_wave_did_not_wait_for_sms(near_miss):
    assert of(near_miss).cause == "unknown"


# ---- behind what waited for SMs on its stream


def behind_a_copy(blocks: int = FILLS, depends: bool = False, shift: float = 0) -> Timeline:
    """Two gathers launched at 70 and 73, the first a copy from a peer and one inside the device; a gap at 400-424.

    The first one's local copy is ready at 150 and starts at 360, in the tail of the GEMM; the second gather comes right
    behind it, 24 us of it in the gap.
    """
    t = started()
    t.gemm(100, 400, blocks=blocks, launch=75)
    t.label("fsdp_runtime::all_gather forward (b)", 69, 71)
    t.copy(102, 150, launch=70, source=0, target=1)
    t.copy(360, 394, launch=70, source=0, target=0)
    t.label("fsdp_runtime::all_gather forward (a)", 72, 74)
    t.copy(398 + shift, 450 + shift, launch=73, source=0, target=1)
    if depends:
        t.pointwise(380, 396, launch=66, stream=9)
    t.gemm(424 + shift, 700, blocks=blocks, launch=80)
    return t


def test_sm_contention_holds_up_what_stands_behind_on_the_stream():
    # Without the copy's wait of 210 us it would have begun at 188, beside the first GEMM.
    c = of(behind_a_copy())
    assert (c.exposed_ns, c.cause, c.waited_for) == (24_000, "sm_contention", None)


@pytest.mark.parametrize(
    "near_miss",
    [
        behind_a_copy(LEAVES_ROOM),  # the copy had room, and waited for something else
        behind_a_copy(depends=True),  # it may have been made to wait for what ended after its stream was free
        behind_a_copy(shift=16.001),  # its stream had been free for 20.001 us
    ],
)
def test_a_gather_is_not_held_up_where_another_gate_may_have_opened_last(near_miss):
    assert of(near_miss).cause == "unknown"


def test_a_gather_that_nothing_would_have_hidden_is_not_held_up():
    # The copy before it waited for 25 us only; so much earlier, the gather would have hidden 4 us of its 74.
    t = started()
    t.gemm(100, 400, blocks=FILLS, launch=68)
    t.label("fsdp_runtime::all_gather forward (b)", 69, 71)
    t.copy(102, 345, launch=70, source=0, target=1)
    t.copy(370, 420, launch=70, source=0, target=0)
    t.label("fsdp_runtime::all_gather forward (a)", 72, 74)
    t.copy(422, 500, launch=73, source=0, target=1)
    t.gemm(496, 600, launch=80)
    c = of(t)
    assert (c.exposed_ns, c.cause) == (74_000, "unknown")


def packed(blocks: int = FILLS, reduced: float | None = None) -> Timeline:
    """A gather by copies from 405 on, packed by a kernel on its stream that was ready at 72 and started at 360.

    The GEMM beside it was launched before both, and ended 5 us before the gather started.
    """
    t = started()
    t.gemm(100, 400, blocks=blocks, launch=68)
    t.pointwise(360, 380, launch=72, stream=20, blocks=128)
    if reduced is not None:
        t.reduce_scatter("z", 150, reduced, launch=66)
    t.label("fsdp_runtime::all_gather forward (a)", 75, 77)
    t.copy(405, 450, launch=76, source=0, target=1)
    return t


def test_sm_contention_holds_up_the_packing_of_a_gather():
    # Queued for 25 us, while the ranks told each other that they had come. The GEMM ended by chance.
    c = of(packed())
    assert (c.cause, c.waited_for) == ("sm_contention", None)


def test_packing_that_had_room_waited_for_something_else():
    assert of(packed(LEAVES_ROOM)).cause == "unknown"


def test_a_gather_waits_for_a_collective_of_another_stream_even_if_it_was_packed_later():
    assert of(packed(reduced=402)).cause == "dependency"
    assert of(packed(reduced=390)).cause == "unknown"  # after its packing, but not right before it
    assert of(packed(reduced=370)).cause == "sm_contention"


# ---- a rule that all gathers of a pass follow


def ruled(units: int, start: float, odd: float, length: float = 20) -> Timeline:
    """Units of a GEMM of 100 us and 60 us without one; each gather is launched before its GEMM, all very early.

    From the second on, gathers start ``start`` us after the GEMM before them, the last one ``odd`` us; all are exposed.
    """
    t = Timeline()
    for n in range(units):
        at, after = 160 * n + 100, odd if n == units - 1 else start
        t.label(f"fsdp_runtime::all_gather forward ({n})", 4 * n - 51, 4 * n - 49)
        begin = at - 60 + after if n else at - 60
        t.copy(begin, begin + (length if n else 20), launch=4 * n - 50, source=0, target=1)
        t.gemm(at, at + 100, launch=4 * n - 48)
    return t


def test_dependency_is_a_rule_that_all_gathers_of_a_pass_follow():
    # 25 us after a GEMM's end is by itself no sign of a wait for it; three times out of three it is.
    t = ruled(4, start=25, odd=30)
    assert [of(t, unit).cause for unit in "0123"] == ["first", "dependency", "dependency", "dependency"]
    assert [of(t, unit).waited_for for unit in "123"] == ["dependency"] * 3


@pytest.mark.parametrize(
    "near_miss",
    [
        ruled(5, start=25, odd=-10),  # one started before its GEMM had ended
        ruled(5, start=25, odd=40.001),  # one came too late for it
        ruled(3, start=25, odd=25),  # two may be chance
    ],
)
def test_a_rule_that_one_gather_breaks_is_none(near_miss):
    assert of(near_miss, "1").cause == "unknown"


@pytest.mark.parametrize(("odd", "causes"), [(4, ["dependency"] * 2), (-4, ["unknown"] * 2)])
def test_a_rule_counts_where_the_stream_was_not_free_for_long(odd, causes):
    # Copies of 152 us: the stream is free 4 us before the GEMM ends, 8 us before the gather starts (units 2 and 3).
    t = ruled(4, start=4, odd=odd, length=152)
    assert of(t, "2").queue_ns == 8_000
    assert [of(t, unit).cause for unit in "23"] == causes


# ---- what the evidence says of the host


@pytest.mark.parametrize(
    ("launch", "said"), [(412, "312.0 us after it had ended"), (95, "after it had begun"), (40, None)]
)
def test_a_first_gather_says_how_late_the_compute_was_launched_that_could_have_hidden_it(launch, said):
    # What computes is a: it has to wait for the root and for a, and could have run beside b, had it been launched.
    t = Timeline()
    t.gather(None, 0, 20, launch=-5)
    t.gather("a", 20, 50, launch=0)
    t.gather("b", 50, 100, launch=5)
    t.gemm(420, 500, launch=launch)
    evidence = {unit: str(of(t, unit).evidence) for unit in ("<root>", "a", "b")}
    assert [of(t, unit).cause for unit in evidence] == ["first"] * 3
    assert ["host came late" in text for text in evidence.values()] == [False, False, said is not None]
    assert (said or "") in evidence["b"]


# ---- unknown, and what a hidden gather waited for


def test_a_gather_without_a_launch_cannot_be_explained():
    t = started()
    for start in (200, 300):
        t.kernel("ncclDevKernel_AllGather_RING_LL", start, start + 50, stream=20)
    t.gemm(250, 260)
    (_, _, c) = analyze(t.trace()).whole.collectives
    assert (c.launch_ns, c.cause, c.waited_for) == (None, "unknown", None)


def test_a_hidden_gather_says_what_it_waited_for_and_has_no_cause():
    t = contended(FILLS)
    t.gemm(400, 700)
    c = of(t)
    assert (c.exposed_ns, c.cause, c.waited_for) == (0, None, "sm")


@pytest.mark.parametrize(("start", "waited_for"), [(400, None), (400.001, "sm")])
def test_a_gather_with_a_small_queue_waited_for_nothing(start, waited_for):
    # Ready at 380; the GEMM's tail is its last third, from 295 on; it fills the device until 420.
    t = started()
    t.gemm(60, 420, blocks=FILLS)
    t.gather("a", start, start + 100, launch=380)
    assert of(t).waited_for == waited_for


@pytest.mark.parametrize("unit", ["<root>", "a"])
def test_evidence_is_given_with_every_cause(unit):
    assert of(contended(FILLS), unit).evidence
