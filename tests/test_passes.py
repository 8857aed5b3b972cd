"""How many overlaps a pass leads one to expect, and how many of them were found."""

from __future__ import annotations

import pytest
from timelines import Timeline, forward

from overlap_probe.labels import ROOT
from overlap_probe.overlap import analyze
from overlap_probe.passes import Call, Count, count, leading, number_passes


def numbers(*units: str | None) -> list[int]:
    """Numbers of the passes of calls that are each an occasion of their own."""
    return number_passes([Call(unit, occasion) for occasion, unit in enumerate(units)])


def test_a_pass_ends_when_a_unit_is_gathered_again():
    assert numbers(ROOT, "a", "b", ROOT, "a", "b") == [0, 0, 0, 1, 1, 1]


def test_a_root_that_stays_gathered_does_not_hide_the_second_pass():
    assert numbers(ROOT, "a", "b", "a", "b") == [0, 0, 0, 1, 1]


def test_several_calls_on_one_occasion_are_one_gathering_of_a_unit():
    # A unit with parameters of two dtypes makes two calls under one label.
    calls = [Call("a", 1), Call("a", 1), Call("b", 2), Call("b", 2), Call("a", 3)]
    assert number_passes(calls) == [0, 0, 0, 0, 1]


def test_a_call_of_an_unknown_unit_ends_no_pass():
    assert numbers("a", None, None, "b", "a") == [0, 0, 0, 0, 1]


def test_the_root_and_the_first_child_lead_each_pass():
    first, second, other = ("forward", 0), ("forward", 1), ("backward", 0)
    units = [(first, ROOT), (first, "a"), (first, "b"), (second, None), (second, "b"), (other, "a")]
    assert leading((n, its_pass, unit) for n, (its_pass, unit) in enumerate(units)) == {0, 1, 3, 5}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        # Root and three children; the first child has nothing to hide behind.
        ([(0, ROOT, False), (0, "a", False), (0, "b", True), (0, "c", True)], Count(3, 2, 2)),
        ([(0, ROOT, False), (0, "a", False), (0, "b", True), (0, "c", False)], Count(3, 2, 1)),
        # The root's own overlap counts for nobody.
        ([(0, ROOT, True), (0, "a", False), (0, "b", False)], Count(2, 1, 0)),
        # More than expected is found in one pass: it must not make up for another. 2 + 1, min(3, 2) + min(0, 1).
        (
            [(0, "a", True), (0, "b", True), (0, "c", True), (1, "a", False), (1, "b", False)],
            Count(3, 3, 2),
        ),
        # With one child, or none, there is nothing to expect.
        ([(0, ROOT, True), (0, "a", True)], Count(1, None, 0)),
        ([(0, ROOT, True)], Count(0, None, 0)),
        ([(0, None, True), (0, None, True)], Count(0, None, 0)),
        ([], Count(0, None, 0)),
        # Two calls of one child: it overlaps if one of them does, and is one child.
        ([(0, "a", False), (0, "b", False), (0, "b", True)], Count(2, 1, 1)),
    ],
)
def test_all_children_of_a_pass_but_one_are_expected_to_overlap(calls, expected):
    assert count(calls) == expected


def test_a_forward_of_three_children_expects_two():
    t = Timeline()
    forward(t, 100, ["a", "b", "c"])
    phase = analyze(t.trace()).whole.forward
    assert (phase.children, phase.expected, phase.found, phase.all_gather.count) == (3, 2, 2, 4)


def test_micro_batches_of_one_step_are_passes_of_their_own():
    # Two forwards of three children: 2 + 2 expected. In the second, b is exposed: 2 + 1 found.
    t = Timeline()
    t.label("ProfilerStep#0", 0, 5000)
    end = forward(t, 100, ["a", "b", "c"])
    forward(t, end + 100, ["a", "b", "c"], exposed=["b"])
    phase = analyze(t.trace()).windows["ProfilerStep#0"].forward
    assert (phase.children, phase.expected, phase.found) == (3, 4, 3)


def test_the_whole_expects_as_much_as_its_steps_together():
    t = Timeline()
    for step in range(3):
        t.label(f"ProfilerStep#{step}", step * 1000, step * 1000 + 1000)
        forward(t, step * 1000 + 100, ["a", "b", "c"], exposed=["c"] if step == 1 else [])
    windows = analyze(t.trace()).windows
    assert [(w.forward.expected, w.forward.found) for w in windows.values()] == [(6, 5), (2, 2), (2, 1), (2, 2)]


def test_what_was_gathered_before_a_step_does_not_split_its_pass():
    """The recording began inside a forward: b and c of the step's own forward are not its second pass."""
    t = Timeline()
    for unit, launch in [("b", 10), ("c", 20), (None, 110), ("a", 120), ("b", 130), ("c", 140)]:
        t.gather(unit, launch + 1000, launch + 1005, launch=launch)
    t.label("ProfilerStep#1", 100, 200)
    t.gemm(1120, 1150)  # hides a, b and c of the step
    analysis = analyze(t.trace())
    step, whole = analysis.windows["ProfilerStep#1"].forward, analysis.whole.forward
    assert (step.children, step.expected, step.found) == (3, 2, 2)
    assert (whole.expected, whole.found) == (3, 2)  # b, c and a: 2, of which a overlaps; then b and c again: 1
    assert {c.pass_index for c in analysis.windows["ProfilerStep#1"].collectives} == {1}


def test_a_unit_that_only_some_steps_use_does_not_split_their_passes():
    t = Timeline()
    for unit, launch in [("a", 10), ("c", 20), ("b", 110), ("a", 120), ("c", 130)]:
        t.gather(unit, launch + 1000, launch + 1005, launch=launch)
    t.label("ProfilerStep#0", 0, 100)
    t.label("ProfilerStep#1", 100, 200)
    expected = {name: w.forward.expected for name, w in analyze(t.trace()).windows.items()}
    assert expected == {"whole": 3, "ProfilerStep#0": 1, "ProfilerStep#1": 2}


def test_what_comes_before_a_step_and_what_comes_after_it_are_no_pass_together():
    t = Timeline()
    for unit, launch in [("a", 10), ("b", 20), ("a", 110), ("b", 120), ("c", 210)]:
        t.gather(unit, launch, launch + 5, launch=launch)
    t.label("ProfilerStep#0", 100, 200)
    assert [c.pass_index for c in analyze(t.trace()).whole.collectives] == [0, 0, 1, 1, 2]


def test_the_backward_is_counted_apart_from_the_forward():
    # Forward: b is exposed, 1 of 2. The backward's overlaps must not make up for it.
    t = Timeline()
    end = forward(t, 100, ["a", "b", "c"], exposed=["b"])
    forward(t, end + 100, ["c", "b", "a"], phase="backward")
    whole = analyze(t.trace()).whole
    assert (whole.forward.expected, whole.forward.found) == (2, 1)
    assert (whole.backward.expected, whole.backward.found) == (2, 2)


def test_the_last_reduce_scatter_has_no_compute_after_it():
    # Three reduce-scatters, each launched after its unit's GEMM; the last begins when all compute is over.
    t = Timeline()
    for place, unit in enumerate(("c", "b", "a")):
        at = 100 * place
        t.gemm(at, at + 100)
        t.reduce_scatter(unit, at + 110, at + 150)
    phase = analyze(t.trace()).whole.backward
    assert (phase.reduce_scatter.count, phase.reduce_expected, phase.reduce_found) == (3, 2, 2)
    assert (phase.expected, phase.children) == (None, 0)


def test_passes_follow_the_order_of_launch_and_not_of_start():
    # Launched a b a b: two passes, 1 + 1. b's stream is late: by their starts, a | a b | b, only one would be expected.
    t = Timeline()
    t.gemm(0, 400)
    for unit, launch, start in (("a", 10, 20), ("b", 20, 200), ("a", 30, 100), ("b", 40, 300)):
        t.gather(unit, start, start + 20, launch=launch, stream=20 if unit == "a" else 21)
    phase = analyze(t.trace()).whole.forward
    assert (phase.expected, phase.found) == (2, 2)
