"""Turns the microseconds of a trace into integer nanoseconds, exactly.

The idea: a float64 below 2**43 is nearer to the written decimal than half a nanosecond, so its integral part and its
rounded fraction are exact integers; whatever cannot be shown to be exact that way is computed from the decimal text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from overlap_probe.tables import I64, NO_TIME

_LARGEST_NS = 2**62
"""Far beyond any clock, and the sum of two such times still fits an int64."""


class TimeColumn:
    """A column that grows from microseconds and is read as nanoseconds.

    Floats must be below 2**43 (a hundred days of microseconds), where three decimals survive; decimals may be anything.
    """

    def __init__(self) -> None:
        self._floats = array("d")
        self._nanoseconds = array("q")

    def extend(self, microseconds: Sequence[float] | Sequence[Decimal]) -> None:
        """Append values of one kind; NaN stands for an absent one."""
        if microseconds and isinstance(microseconds[0], Decimal):
            self._settle()
            self._nanoseconds.fromlist([_from_decimal(Decimal(value)) for value in microseconds])
        else:
            self._floats.fromlist([*microseconds])

    def nanoseconds(self) -> I64:
        """All values so far; NO_TIME for one that is absent or is too large to be a time."""
        self._settle()
        return np.array(self._nanoseconds, np.int64)

    def _settle(self) -> None:
        """Turn what is still float into nanoseconds: vectorised, once for all pieces of a trace."""
        values = np.array(self._floats, np.float64)
        known = np.isfinite(values)
        whole = np.floor(np.where(known, values, 0.0))
        fraction = np.where(known, values, 0.0) - whole
        exact = whole.astype(np.int64) * 1000 + np.rint(fraction * 1000).astype(np.int64)
        self._nanoseconds.frombytes(np.where(known, exact, NO_TIME).tobytes())
        self._floats = array("d")


def _from_decimal(value: float | Decimal) -> int:
    if not isinstance(value, Decimal) or not value.is_finite() or value.adjusted() > 18:
        return NO_TIME
    nanoseconds = round(value * 1000)
    return nanoseconds if abs(nanoseconds) < _LARGEST_NS else NO_TIME
