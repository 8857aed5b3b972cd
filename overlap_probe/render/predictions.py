"""Turns the answers of `what_if` into what every format shows: what a phase takes, would take, and what is worth most.

The idea: a user asks one question, *what should I do first*, so beside the numbers stands the change that saves most.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlap_probe.render.advice import WHAT_IF
from overlap_probe.render.summary import rank_labels
from overlap_probe.render.words import duration, percent
from overlap_probe.results import RunAnalysis, WhatIf

WORTH_HAVING = 0.01
"""Share of its time that a phase must gain for a change to be called worth something."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a phase takes in a window, and would take with each change that can be told: keys of `advice.WHAT_IF`."""

    rank: str
    phase: str
    now_ns: int
    would_ns: dict[str, int]

    @property
    def best(self) -> str | None:
        """The change that saves most; None if none saves a share worth having."""
        change = min(self.would_ns, key=lambda c: self.would_ns[c], default=None)
        return change if change and self.saved_ns(change) >= WORTH_HAVING * self.now_ns else None

    def saved_ns(self, change: str) -> int:
        """What a change would save; negative if it would cost."""
        return self.now_ns - self.would_ns[change]

    def in_words(self) -> str:
        """``all gathers hidden: saves 1.20 ms (9.8 %)``, of the best change."""
        if not self.would_ns:
            return "nothing can be predicted"
        if self.best is None:
            return f"none of these saves {100 * WORTH_HAVING:.0f} %"
        saved = self.saved_ns(self.best)
        return f"{WHAT_IF[self.best]}: saves {duration(saved)} ({percent(saved, self.now_ns)})"


def predictions(run: RunAnalysis) -> list[Prediction]:
    """What each phase of each rank would take, where the run was replayed: averages over the step windows."""
    made = []
    for label, analysis in zip(rank_labels(run), run.ranks, strict=True):
        answers: dict[str, list[WhatIf]] = {}
        for window in analysis.steps.values():
            for phase, answer in window.what_if.items():
                answers.setdefault(phase, []).append(answer)
        for phase, some in answers.items():
            total = sum(some[1:], some[0])
            known = {change: getattr(total, f"{change}_ns") for change in WHAT_IF}
            would = {change: max(0, ns) // len(some) for change, ns in known.items() if ns is not None}
            made.append(Prediction(label, phase, total.now_ns // len(some), would))
    return made
