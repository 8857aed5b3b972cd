"""The innermost range around a moment, against a search through all ranges."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlap_probe.nesting import Nesting

ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 1)), max_size=10)


def nesting(rows: list[tuple[int, int, int]]) -> Nesting:
    start, end, thread = (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return Nesting(np.array(start, np.int64), np.array(end, np.int64), np.array(thread, np.int32))


def innermost(of: Nesting, thread: int, *at: int) -> list[int]:
    return of.innermost(np.full(len(at), thread, np.int32), np.array(at, np.int64)).tolist()


def properly_nested(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Without the ranges that cross one before them on the same thread: host ranges of one thread never do."""
    kept: list[tuple[int, int, int]] = []
    for start, end, thread in sorted((min(a, b), max(a, b), t) for a, b, t in rows):
        crosses = any(t == thread and (a < start < b < end or start < a < end < b) for a, b, t in kept)
        if not crosses:
            kept.append((start, end, thread))
    return kept


@given(ranges)
def test_the_innermost_range_is_the_shortest_one_around(rows):
    rows = properly_nested(rows)
    found = nesting(rows)
    for thread in (0, 1):
        for at, row in zip(range(-1, 22), innermost(found, thread, *range(-1, 22)), strict=True):
            around = [b - a for a, b, t in rows if t == thread and a <= at < b]
            assert (row >= 0) == bool(around)
            if around:
                assert rows[row][2] == thread
                assert rows[row][1] - rows[row][0] == min(around)


@given(ranges)
def test_the_parent_is_the_shortest_range_that_holds_another(rows):
    rows = properly_nested(rows)
    for row, parent in enumerate(nesting(rows).parent.tolist()):
        start, end, thread = rows[row]
        around = [
            b - a
            for other, (a, b, t) in enumerate(rows)
            if t == thread and a <= start and end <= b and ((b - a) > (end - start) or other < row)
        ]
        if end == start or not around:
            assert parent == -1
        else:
            assert rows[parent][1] - rows[parent][0] == min(around)


def test_a_range_holds_its_start_and_not_its_end():
    assert innermost(nesting([(10, 20, 0)]), 0, 9, 10, 19, 20) == [-1, 0, 0, -1]


def test_one_range_follows_another_without_a_gap():
    assert innermost(nesting([(10, 20, 0), (20, 30, 0)]), 0, 19, 20) == [0, 1]


def test_of_two_ranges_that_start_together_the_longer_is_the_outer_one():
    found = nesting([(0, 10, 0), (0, 30, 0)])
    assert found.parent.tolist() == [1, -1]
    assert innermost(found, 0, 5, 15) == [0, 1]


def test_a_range_of_another_thread_is_not_around():
    found = nesting([(0, 10, 0)])
    assert innermost(found, 1, 5) == [-1]


def test_a_range_that_ends_before_one_it_began_around_is_left_alone():
    # NVTX start/end ranges may cross: 0-20 and 10-30. Until 20 the later one is inside; after that it is alone.
    found = nesting([(0, 20, 0), (10, 30, 0)])
    assert innermost(found, 0, 5, 15, 25) == [0, 1, 1]


@given(ranges)
def test_of_ranges_that_cross_each_other_the_innermost_is_the_last_to_begin(rows):
    rows = [(min(a, b), max(a, b), t) for a, b, t in rows]
    found = nesting(rows)
    for thread in (0, 1):
        for at, row in zip(range(-1, 22), innermost(found, thread, *range(-1, 22)), strict=True):
            around = [(a, -b) for a, b, t in rows if t == thread and a <= at < b]
            assert (row >= 0) == bool(around)
            if around:
                assert (rows[row][0], -rows[row][1]) == max(around)


def test_many_ranges_cost_a_sweep_and_not_a_join():
    # 40 000 ranges and as many moments: a join of containment would look at 1.6e9 pairs.
    start = np.arange(40_000, dtype=np.int64) * 10
    thread = np.zeros(len(start), np.int32)
    began = time.perf_counter()
    found = Nesting(start, start + 9, thread).innermost(thread, start + 5)
    assert time.perf_counter() - began < 10
    assert found.tolist() == list(range(len(start)))
