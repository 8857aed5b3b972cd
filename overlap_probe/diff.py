"""What changed between two runs.

The idea: a change is the difference of two medians over windows. Beside it stands the range of the windows, so that a
reader sees whether the change is larger than the noise. Windows are few, so nothing is assumed of their distribution:
beyond the noise means that no window of one run lies among those of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_probe.baseline import RankSamples, Samples, UnitSample
from overlap_probe.render.summary import named
from overlap_probe.render.words import duration

COMPARED = {
    "overlaps": "",
    "time": "ns",
    "hidden": "%",
    "exposed": "ns",
    "stalled": "ns",
    "net_hidden": "%",
    "slowdown": "ns",
}
"""The metrics that are always compared, in order, each in its unit: a count, ns, or per cent of the time."""

_BETTER_UP = frozenset({"overlaps", "hidden", "net_hidden"})


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric in the windows of one run: at least one, in order."""

    windows: Mapping[str, float]

    @property
    def median(self) -> float:
        return statistics.median(self.windows.values())

    @property
    def lowest(self) -> float:
        return min(self.windows.values())

    @property
    def highest(self) -> float:
        return max(self.windows.values())


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of one scope on one rank. ``unit`` is ``%`` (points of the collectives' time), ``ns`` or empty."""

    rank: str
    scope: str
    metric: str
    unit: str
    base: Spread
    new: Spread

    @property
    def value(self) -> float:
        """The new median less the base's."""
        return self.new.median - self.base.median

    @property
    def noise(self) -> float:
        """The larger of both runs' ranges."""
        return max(side.highest - side.lowest for side in (self.base, self.new))

    @property
    def beyond_noise(self) -> bool | None:
        """Whether the windows of both runs are apart; None where a run has a single one, so that nothing is known."""
        if min(len(self.base.windows), len(self.new.windows)) < 2:
            return None
        return self.new.lowest > self.base.highest or self.new.highest < self.base.lowest

    @property
    def gain(self) -> float:
        """The change, positive if it is for the better."""
        return self.value if self.metric in _BETTER_UP else -self.value

    def in_words(self) -> str:
        """``hidden of forward.all_gather: 90.1 % -> 23.0 %, a change of -67.1 % (noise 2.9 %)``."""
        before, after = (amount(side.median, self.unit) for side in (self.base, self.new))
        noise = "of one window" if self.beyond_noise is None else f"noise {amount(self.noise, self.unit)}"
        change = amount(self.value, self.unit, sign=True)
        return f"{self.metric} of {self.scope}: {before} -> {after}, a change of {change} ({noise})"


@dataclass(frozen=True, slots=True)
class UnitChange:
    """What the collectives of one unit cost more or less in a window, and why they did and do."""

    exposed: Change
    base_causes: tuple[str, ...]
    new_causes: tuple[str, ...]

    def in_words(self) -> str:
        """``forward.all_gather of layers.3: exposed 12.00 us -> 230.0 us, now late_launch``."""
        before, after = (duration(round(side.median)) for side in (self.exposed.base, self.exposed.new))
        causes = " and ".join(self.new_causes)
        why = "" if self.new_causes == self.base_causes else f", now {causes or 'without a cause'}"
        return f"{self.exposed.scope}: exposed {before} -> {after}{why}"


@dataclass(frozen=True, slots=True)
class Diff:
    """Everything that was compared, rank by rank."""

    pairs: tuple[tuple[RankSamples, RankSamples], ...]
    changes: tuple[Change, ...]
    units: tuple[UnitChange, ...]
    notes: tuple[str, ...]
    """How the two runs were made differently."""
    problems: tuple[str, ...]
    """Why no comparison may pass."""


def amount(value: float, unit: str, *, sign: bool = False) -> str:
    """A number in its unit, for people; ``sign`` marks a change."""
    plus = "+" if sign and value > 0 else ""
    return plus + (f"{value:.1f} %" if unit == "%" else duration(round(value)) if unit == "ns" else f"{value:g}")


def diff(base: Samples, new: Samples) -> Diff:
    """Compare two runs, each rank with its like; a single rank on both sides is compared whatever it is called."""
    known = {rank.label: rank for rank in new.ranks}
    pairs = tuple((rank, known[rank.label]) for rank in base.ranks if rank.label in known)
    if len(base.ranks) == len(new.ranks) == 1:
        pairs = ((base.ranks[0], new.ranks[0]),)
    problems = [f"{side}: {problem}" for side, run in (("base", base), ("new", new)) for problem in run.problems]
    for at, (side, run) in enumerate((("base", base), ("new", new))):
        paired = {pair[at].label for pair in pairs}
        problems += [f"{named(r.label)} is in the {side} run only" for r in run.ranks if r.label not in paired]
    return Diff(
        pairs=pairs,
        changes=tuple(change for pair in pairs for change in _changes(*pair)),
        units=tuple(change for pair in pairs for change in _unit_changes(*pair)),
        notes=tuple(_made_differently(base.made, new.made)),
        problems=tuple(problems),
    )


def compare(base: RankSamples, new: RankSamples, scope: str, metric: str, unit: str) -> Change | None:
    """One change; None where a run has no such number in any window."""
    sides = [_values(rank, scope, metric, unit) for rank in (base, new)]
    return Change(new.label, scope, metric, unit, *map(Spread, sides)) if all(sides) else None


def _values(rank: RankSamples, scope: str, metric: str, unit: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for sample in rank.scopes.get(scope, ()):
        value = sample.overlaps if metric == "overlaps" else getattr(sample, f"{metric}_ns")
        if value is not None and (unit != "%" or sample.time_ns):
            values[sample.window] = 100 * value / sample.time_ns if unit == "%" else value
    return values


def _changes(base: RankSamples, new: RankSamples) -> Iterator[Change]:
    for scope in base.scopes:
        for metric, unit in COMPARED.items():
            if change := compare(base, new, scope, metric, unit):
                yield change


def _unit_changes(base: RankSamples, new: RankSamples) -> Iterator[UnitChange]:
    for name, before in base.units.items():
        if after := new.units.get(name):
            sides = [Spread({sample.window: sample.exposed_ns for sample in samples}) for samples in (before, after)]
            yield UnitChange(Change(new.label, name, "exposed", "ns", *sides), _causes(before), _causes(after))


def _causes(samples: Sequence[UnitSample]) -> tuple[str, ...]:
    return tuple(sorted({cause for sample in samples for cause in sample.causes}))


def _made_differently(base: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, before in base.items():
        after = new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _made_differently(before, after, f"{prefix}{key}.")
        elif key in new and before != after:
            yield f"{prefix}{key} was {before}, is {after}"
