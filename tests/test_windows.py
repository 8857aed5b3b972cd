"""Which stretch of a trace each activity belongs to."""

from __future__ import annotations

import pytest
from timelines import Timeline

from overlap_probe.options import Options
from overlap_probe.overlap import analyze


def windows(t: Timeline, pattern: str | None = None) -> dict[str, int]:
    """Number of all-gathers of each window."""
    analysis = analyze(t.trace(), Options.parse(window=pattern))
    return {name: w.all_gather.count for name, w in analysis.windows.items()}


def two_ranges(first: str, second: str) -> Timeline:
    """One gather launched in each of two ranges of 100 us, one between them."""
    t = Timeline()
    t.label(first, 0, 100)
    t.label(second, 200, 300)
    for launch in (50, 150, 250):
        t.gather("a", launch + 10, launch + 20, launch=launch)
    return t


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ProfilerStep#0", "ProfilerStep#1"),
        ("step0", "step1"),
        ("step 4", "step 5"),
        ("Step_7", "Step_8"),
        ("step#1", "step#2"),
    ],
)
def test_each_step_is_a_window_and_whole_is_always_there(first, second):
    assert windows(two_ranges(first, second)) == {"whole": 3, first: 1, second: 1}


def test_without_steps_the_whole_trace_is_the_only_window():
    assert windows(two_ranges("forward", "backward")) == {"whole": 3}


@pytest.mark.parametrize("name", ["stepping 1", "step", "my step 3", "optimizer.step#1x", "ProfilerStep*"])
def test_a_range_that_is_not_a_step_is_no_window(name):
    assert windows(two_ranges(name, name)) == {"whole": 3}


def test_profiler_steps_come_before_other_steps():
    t = two_ranges("ProfilerStep#0", "ProfilerStep#1")
    t.label("step 0", 0, 300)
    assert windows(t) == {"whole": 3, "ProfilerStep#0": 1, "ProfilerStep#1": 1}


def test_a_pattern_of_the_users_finds_windows_of_other_names():
    assert windows(two_ranges("train/1", "train/2"), r"train/\d") == {"whole": 3, "train/1": 1, "train/2": 1}


def test_windows_of_one_name_are_told_apart():
    assert windows(two_ranges("train", "train"), "train") == {"whole": 3, "train": 1, "train (2)": 1}


def test_numbering_windows_of_one_name_never_takes_another_windows_name():
    t = two_ranges("a", "a (2)")
    t.label("a", 400, 500)
    t.gather("a", 460, 470, launch=450)
    found = windows(t, r"a.*")
    assert list(found.values()) == [4, 1, 1, 1]


def test_a_window_cannot_take_the_name_of_the_whole():
    found = windows(two_ranges("whole", "whole"), "whole")
    assert list(found.values()) == [3, 1, 1]


def test_work_belongs_to_the_window_that_launched_it_however_late_it_runs():
    t = Timeline()
    t.label("ProfilerStep#0", 0, 100)
    t.label("ProfilerStep#1", 100, 200)
    t.gather("a", 150, 170, launch=50)
    t.gemm(500, 540, launch=60)
    found = analyze(t.trace()).windows
    assert [(w.all_gather.count, w.gemm_ns) for w in found.values()] == [(1, 40_000), (1, 40_000), (0, 0)]


def test_without_a_launch_the_operation_says_the_window_and_without_both_the_start():
    t = Timeline()
    t.label("ProfilerStep#0", 0, 100)
    t.label("ProfilerStep#1", 100, 200)
    t.gemm(150, 151, operation=t.operation("aten::mm", 50, 60))
    t.gemm(160, 162)
    found = analyze(t.trace()).windows
    assert [w.gemm_ns for w in found.values()] == [3_000, 1_000, 2_000]


def test_a_launch_at_the_end_of_a_step_belongs_to_the_next():
    t = Timeline()
    t.label("ProfilerStep#0", 0, 100)
    t.label("ProfilerStep#1", 100, 200)
    t.gather("a", 150, 170, launch=100)
    assert windows(t) == {"whole": 1, "ProfilerStep#0": 0, "ProfilerStep#1": 1}


def test_a_step_that_each_thread_marks_is_one_window():
    t = two_ranges("step0", "step1")
    t.label("step0", 1, 99, thread="other")
    assert windows(t) == {"whole": 3, "step0": 1, "step1": 1}


def test_steps_are_listed_in_the_order_of_time_after_the_whole():
    t = Timeline()
    for number, at in ((10, 0), (9, 100), (11, 200)):
        t.label(f"ProfilerStep#{number}", at, at + 100)
    assert list(windows(t)) == ["whole", "ProfilerStep#10", "ProfilerStep#9", "ProfilerStep#11"]


def test_compute_of_another_window_hides_a_collective_too():
    t = Timeline()
    t.label("ProfilerStep#0", 0, 100)
    t.label("ProfilerStep#1", 100, 200)
    t.gemm(110, 190, launch=90)
    t.gather("a", 150, 170, launch=140)
    window = analyze(t.trace()).windows["ProfilerStep#1"]
    assert window.gemm_ns == 0
    assert (window.all_gather.hidden_ns, window.all_gather.overlapped_by_gemm) == (20_000, 1)
