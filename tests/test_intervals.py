"""Interval arithmetic against the same questions asked of sets of integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_probe.intervals import (
    EMPTY,
    Intervals,
    covered,
    intersect,
    length_before,
    subtract,
    union,
    union_by_group,
)

LOW, HIGH = -30, 30
times = st.integers(LOW, HIGH)
pairs = st.lists(st.tuples(times, times).map(sorted).map(tuple), max_size=12)
"""Intervals in any order; empty, touching, nested and equal ones among them."""


def columns(some: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in some], np.int64), np.array([b for _, b in some], np.int64)


def made(some: list[tuple[int, int]]) -> Intervals:
    return union(*columns(some))


def moments(some: list[tuple[int, int]]) -> set[int]:
    """Every nanosecond that the intervals cover: [a, b) covers a .. b - 1."""
    return {t for a, b in some for t in range(a, b)}


def as_set(some: Intervals) -> set[int]:
    return moments(list(zip(some.start_ns.tolist(), some.end_ns.tolist(), strict=True)))


def assert_is_canonical(some: Intervals) -> None:
    """In increasing order, none empty, no two touching."""
    assert (some.end_ns > some.start_ns).all()
    assert (some.start_ns[1:] > some.end_ns[:-1]).all()
    assert some.start_ns.dtype == some.end_ns.dtype == np.int64


@given(pairs)
def test_a_union_covers_exactly_what_its_intervals_cover(some):
    result = made(some)
    assert_is_canonical(result)
    assert as_set(result) == moments(some)
    assert result.total_ns == len(moments(some))


@given(pairs, st.randoms())
def test_a_union_does_not_depend_on_the_order_of_its_intervals(some, random):
    shuffled = list(some)
    random.shuffle(shuffled)
    a, b = made(some), made(shuffled)
    assert a.start_ns.tolist() == b.start_ns.tolist()
    assert a.end_ns.tolist() == b.end_ns.tolist()


@given(pairs, pairs)
def test_an_intersection_holds_what_both_sets_hold(a, b):
    result = intersect(made(a), made(b))
    assert_is_canonical(result)
    assert as_set(result) == moments(a) & moments(b)


@given(pairs, pairs)
def test_a_difference_holds_what_only_the_first_set_holds(a, b):
    result = subtract(made(a), made(b))
    assert_is_canonical(result)
    assert as_set(result) == moments(a) - moments(b)


@given(pairs, pairs)
def test_what_is_shared_and_what_is_left_add_up_to_the_set(a, b):
    shared, left = intersect(made(a), made(b)), subtract(made(a), made(b))
    assert shared.total_ns + left.total_ns == made(a).total_ns


@given(pairs, st.lists(times, max_size=6))
def test_length_before_counts_the_moments_before_each_moment(some, at):
    result = length_before(made(some), np.array(at, np.int64))
    assert result.tolist() == [sum(t < moment for t in moments(some)) for moment in at]


@given(pairs, pairs)
def test_covered_is_the_shared_length_of_each_interval(some, by):
    result = covered(*columns(some), made(by))
    assert result.tolist() == [len(moments([one]) & moments(by)) for one in some]


@given(st.lists(st.tuples(st.integers(-2, 9), times, times), max_size=12))
def test_a_union_by_group_is_the_union_of_each_group(rows):
    rows = [(group, *sorted((a, b))) for group, a, b in rows]
    owner, result = union_by_group(np.array([g for g, _, _ in rows], np.int64), *columns([(a, b) for _, a, b in rows]))
    assert owner.tolist() == sorted(owner.tolist())
    for group in {g for g, _, _ in rows}:
        mine = Intervals(result.start_ns[owner == group], result.end_ns[owner == group])
        assert_is_canonical(mine)
        assert as_set(mine) == moments([(a, b) for g, a, b in rows if g == group])


@pytest.mark.parametrize("function", [intersect, subtract])
def test_the_empty_set_shares_nothing_and_takes_nothing_away(function):
    some = made([(3, 5)])
    assert function(EMPTY, some).total_ns == 0
    assert function(some, EMPTY).total_ns == (2 if function is subtract else 0)


def test_times_since_1970_keep_their_nanoseconds():
    # A float64 of this size has steps of 256 ns.
    epoch = 1_764_000_000_123_456_789
    some = union(np.array([epoch]), np.array([epoch + 3]))
    assert covered(np.array([epoch + 2]), np.array([epoch + 9]), some).tolist() == [1]
    owner, merged = union_by_group(np.array([5, 9]), np.array([epoch, epoch + 1]), np.array([epoch + 3, epoch + 2]))
    assert owner.tolist() == [5, 9]
    assert merged.start_ns.tolist() == [epoch, epoch + 1]
    assert merged.end_ns.tolist() == [epoch + 3, epoch + 2]
