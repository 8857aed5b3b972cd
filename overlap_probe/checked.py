"""A run that a test holds against checks, and what the test says when they do not hold.

The idea: only a pass lets a test go on. A check that does not hold and a run that cannot answer both raise, with
everything that a person needs to see first: the worst rank, its collectives, their causes, and where the report lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_probe.checks import evaluate, parse_check
from overlap_probe.errors import OverlapProbeError
from overlap_probe.render import summary, write_report
from overlap_probe.render.advice import CAUSE_ADVICE
from overlap_probe.render.words import without_folders
from overlap_probe.results import RunAnalysis, Verdict

if TYPE_CHECKING:
    from overlap_probe.runs import Attempts

MOST_OTHERS = 8
"""Findings besides the worst that a failure lists, one line each."""


class ChecksFailed(AssertionError):
    """A check does not hold; or it holds, and was to fail."""


class Inconclusive(AssertionError):
    """The run cannot answer a check: never a pass, and no proof for a negative control either."""


@dataclass(slots=True)
class CheckedRun:
    """A run that a test looks at. Where a busy machine keeps it from a verdict, it is made again (`Attempts`)."""

    run: RunAnalysis
    """All its numbers."""
    folder: Path
    """Where its report lies once there is one, and its traces if the test made them."""
    always_report: bool = False
    """Write a report even if all checks hold."""
    attempts: Attempts | None = None
    """What made it; None for traces that were there."""

    def evaluate(self, *expressions: str, at_least: str | None = None) -> Verdict:
        """The verdict, whatever it is. Raises CheckSyntaxError if an expression does not parse."""
        __tracebackhide__ = True
        if self.attempts is None:
            return evaluate(self.run, expressions, at_least=at_least)
        verdict = self.attempts.judge(expressions, at_least)
        self.run = self.attempts.run
        return verdict

    def check(self, *expressions: str, at_least: str | None = None) -> None:
        """Every expression must hold on every rank and window, or in K of N windows where ``at_least`` is ``K/N``.

        Raises:
            ChecksFailed: one does not hold.
            Inconclusive: the run cannot answer.
            CheckSyntaxError: an expression does not parse.
        """
        __tracebackhide__ = True
        verdict = self.evaluate(*expressions, at_least=at_least)
        if verdict.status == "pass" and not self.always_report:
            return
        lines = [*describe(self.run, verdict), self._report(verdict)]
        if verdict.status != "pass":
            raise (ChecksFailed if verdict.status == "fail" else Inconclusive)("\n".join(lines))

    def check_fails(self, *expressions: str, at_least: str | None = None) -> None:
        """The negative control: every expression must fail on some rank and window.

        Raises:
            ChecksFailed: one does not fail.
            Inconclusive: of those that do not fail, the run cannot answer any.
            CheckSyntaxError: an expression does not parse.
        """
        __tracebackhide__ = True
        parsed = [parse_check(text).text for text in expressions]
        # Each by itself: that one of them fails says nothing about another that the run cannot answer.
        verdicts = [self.evaluate(text, at_least=at_least) for text in parsed] or [self.evaluate()]
        if {v.status for v in verdicts} == {"fail"} and not self.always_report:
            return
        verdict = evaluate(self.run, parsed, at_least=at_least)  # what is shown is of one recording
        lines = [*describe(self.run, verdict), self._report(verdict)]
        hold = [text for text, v in zip(parsed, verdicts, strict=True) if v.status == "pass"]
        if hold:
            raise ChecksFailed("\n".join([f"was to fail here, and does not: {', '.join(hold)}", *lines]))
        unsure = [text for text, v in zip(parsed, verdicts, strict=True) if v.status == "inconclusive"]
        if unsure:
            raise Inconclusive("\n".join([f"was to fail here, which cannot be told: {', '.join(unsure)}", *lines]))

    def _report(self, verdict: Verdict) -> str:
        """Write the report. Says where it lies, or why there is none: that must not hide the verdict."""
        try:
            for name in ("result.json", "report.html"):
                write_report(self.run, self.folder / name, verdict)
        except OverlapProbeError as error:
            return f"no report: {error}"
        return f"report: {self.folder / 'report.html'}"


def describe(run: RunAnalysis, verdict: Verdict) -> list[str]:
    """A verdict in a few lines: the worst finding with its collectives, the others, the causes with what to do."""
    not_held = summary.not_held(verdict)
    check = f"{not_held[0].check}: " if not_held and not_held[0].check else ""
    lines = [f"{verdict.status.upper()}: {check}{summary.headline(run, verdict)}"]
    for finding in not_held[:1]:
        lines += [f"  {without_folders(line, [a.path for a in run.ranks])}" for line in finding.evidence]
    for finding in not_held[1 : 1 + MOST_OTHERS]:
        parts = (finding.check, summary.place(finding), summary.message(run, finding))
        lines.append(f"also {': '.join(filter(None, parts))}")
    if len(not_held) > 1 + MOST_OTHERS:
        lines.append(f"and {len(not_held) - 1 - MOST_OTHERS} more")
    return lines + [f"{c.count} x {c.cause}: {CAUSE_ADVICE.get(c.cause, '')}" for c in summary.causes(run)]
