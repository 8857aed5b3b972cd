"""How a time is written for people: in messages, evidence and every format."""

from __future__ import annotations

ABSENT = "-"
"""Stands for a number that there is not."""

_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))


def duration(ns: int | None) -> str:
    """``218.4 us``, ``19.24 ms``: four digits, or whole ns below a microsecond; ``-`` for None."""
    if ns is None:
        return ABSENT
    for size, unit in _UNITS:
        # 999_950 ns are 1000 us in four digits: the next unit takes over where rounding would need a fifth.
        if abs(ns) >= size - size // 20_000:
            value = ns / size
            return f"{value:.{2 if abs(value) < 99.995 else 1}f} {unit}"
    return f"{ns} ns"
