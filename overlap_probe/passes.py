"""Counts expected overlaps: in each pass, all children of the root but one.

The idea (design, section 3): the first child has nothing to hide behind, all others have the compute of the child
before them. A window may hold several passes (gradient accumulation); a pass ends when a unit is gathered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from overlap_probe.labels import ROOT

Pass: TypeAlias = tuple[str, int]
"""One pass of a trace's all-gathers: its phase and its number."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call, as far as counting needs it."""

    unit: str | None
    occasion: int
    """Calls of a unit with the same occasion are one gathering of it: a unit of several dtypes makes several."""


def number_passes(calls: Sequence[Call]) -> list[int]:
    """Number of the pass of each call; the calls are of one kind and phase, in the order in which they were issued."""
    numbers, seen, current = [], dict[str, int](), 0
    for call in calls:
        if call.unit is not None:
            if seen.get(call.unit, call.occasion) != call.occasion:
                current, seen = current + 1, {}
            seen[call.unit] = call.occasion
        numbers.append(current)
    return numbers


def leading(gathers: Iterable[tuple[int, Pass, str | None]]) -> set[int]:
    """Indices of those gathers that the first compute of their pass waits for: the root's, and the first of a child.

    gathers: (index, pass, unit) of each, in the order of issue.
    """
    found, begun = set[int](), set[Pass]()
    for index, its_pass, unit in gathers:
        if unit == ROOT:
            found.add(index)
        elif its_pass not in begun:
            begun.add(its_pass)
            found.add(index)
    return found


@dataclass(frozen=True, slots=True)
class Count:
    """``expected`` is None where no pass has two children: then there is nothing to expect."""

    children: int = 0
    expected: int | None = None
    found: int = 0


def count(calls: Iterable[tuple[int, str | None, bool]]) -> Count:
    """Expected and found overlaps of (pass, unit, whether it overlaps a GEMM)."""
    passes: dict[int, dict[str, bool]] = {}
    for number, unit, overlaps in calls:
        if unit is not None and unit != ROOT:
            units = passes.setdefault(number, {})
            units[unit] = units.get(unit, False) or overlaps
    children = {unit for units in passes.values() for unit in units}
    expected = sum(len(units) - 1 for units in passes.values())
    found = sum(min(sum(units.values()), len(units) - 1) for units in passes.values())
    return Count(len(children), expected or None, found)
