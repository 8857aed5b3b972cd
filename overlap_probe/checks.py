"""Judges a run: parses check expressions and holds every rank and window against them.

The idea: a check is ``METRIC OP VALUE`` parsed once into an object, before any trace is read; it is held against each
window of each rank, and whatever cannot be answered (nothing to measure, records lost, ranks missing, no core for a
thread: `starvation`) is inconclusive, which is never a pass (design, section 5). The verdict is the worst rank's.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from overlap_probe.errors import CheckSyntaxError
from overlap_probe.results import (
    OPS,
    PHASES,
    SEVERITY,
    Analysis,
    Collective,
    Finding,
    Phase,
    RunAnalysis,
    Totals,
    Verdict,
    Window,
)
from overlap_probe.starvation import too_busy, value_at_best
from overlap_probe.units import duration

METRICS = ("overlaps", "hidden", "exposed", "stalled", "net_hidden", "slowdown")
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_DURATION_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_EXPRESSION = re.compile(r"\s*(?P<name>[\w.]+)\s*(?P<op>>=|<=|==|!=|>|<)\s*(?P<value>[^\s<>=!]\S*)\s*")
MOST_DIGITS = 15
"""Before and after the point of a number: all that a float holds, and in seconds more than a clock of 64 bits."""
_VALUE = re.compile(rf"(?P<number>\d{{1,{MOST_DIGITS}}}(?:\.\d{{1,{MOST_DIGITS}}})?)(?P<unit>%|ns|us|ms|s)?", re.ASCII)
_AT_LEAST = re.compile(rf"(?P<hold>\d{{1,{MOST_DIGITS}}})/(?P<of>\d{{1,{MOST_DIGITS}}})", re.ASCII)
MOST_EVIDENCE = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One parsed expression. ``phase`` None means all phases; ``limit`` None means ``auto``."""

    text: str
    phase: str | None
    op: str
    metric: str
    compare: str
    limit: float | None
    unit: str
    """``%`` of the collectives' time, ``ns``, or nothing for a count."""
    by_default: bool
    """No scope was given: in a window where no phase is known, all its all-gathers are meant."""


def parse_check(text: str) -> Check:
    """A check from its text; raises CheckSyntaxError that says what was expected."""
    match = _EXPRESSION.fullmatch(text)
    if not match:
        raise CheckSyntaxError(
            f"check {text!r}: expected METRIC OP VALUE, for example 'overlaps >= auto' or 'hidden >= 80%'"
        )
    *scope, metric = match["name"].split(".")
    if metric not in METRICS:
        raise CheckSyntaxError(f"check {text!r}: no metric {metric!r}; expected one of {', '.join(METRICS)}")
    phase = scope.pop(0) if scope and scope[0] in PHASES else None
    op = scope.pop(0) if scope and scope[0] in (*OPS, "communication") else None
    if scope:
        raise CheckSyntaxError(
            f"check {text!r}: no scope {'.'.join(scope)!r}; expected [forward.|backward.][COLLECTIVE.]METRIC, "
            f"COLLECTIVE one of {', '.join(OPS)} or communication"
        )
    limit, unit = _value(text, metric, match["value"])
    by_default = phase is None and op is None
    if limit is None and (op or "all_gather") not in ("all_gather", "reduce_scatter"):
        raise CheckSyntaxError(f"check {text!r}: auto is known for all_gather and reduce_scatter only; give a number")
    if limit is None and not by_default and phase is None:
        raise CheckSyntaxError(
            f"check {text!r}: auto needs a phase in front: forward.{match['name']} or backward.{match['name']}"
        )
    return Check(
        text=text.strip(),
        phase="forward" if by_default else phase,
        op=op or "all_gather",
        metric=metric,
        compare=match["op"],
        limit=limit,
        unit=unit,
        by_default=by_default,
    )


def _value(text: str, metric: str, value: str) -> tuple[float | None, str]:
    if value == "auto":
        if metric != "overlaps":
            raise CheckSyntaxError(
                f"check {text!r}: only overlaps can be compared with auto; give a duration or a percentage"
            )
        return None, ""
    match = _VALUE.fullmatch(value)
    if not match:
        raise CheckSyntaxError(
            f"check {text!r}: no value {value!r}; expected a number of up to {MOST_DIGITS} digits (and as many "
            "decimals), auto, a percentage or a duration like 120us"
        )
    number, unit = float(match["number"]), match["unit"] or ""
    if metric == "overlaps" and unit:
        raise CheckSyntaxError(f"check {text!r}: overlaps is a count; give a number or auto")
    if metric != "overlaps" and not unit and number:
        raise CheckSyntaxError(
            f"check {text!r}: {metric} is a time; say {value}% of the collectives' time or a duration like {value}us"
        )
    if unit == "%" and number > 100 and metric != "slowdown":
        raise CheckSyntaxError(
            f"check {text!r}: {metric} is a part of the collectives' time, so at most 100%; give one up to that"
        )
    if unit == "%" or metric == "overlaps":
        return number, unit
    return float(Fraction(match["number"]) * _DURATION_NS.get(unit, 1)), "ns"


def parse_duration_ns(option: str, text: str) -> int:
    """A duration like ``5us`` in ns; 0 needs no unit. Raises CheckSyntaxError that names the option."""
    match = _VALUE.fullmatch(text.strip())
    if not match or match["unit"] == "%" or (not match["unit"] and float(match["number"])):
        raise CheckSyntaxError(f"{option} {text!r}: expected a duration such as 5us, 2ms or 0")
    return round(Fraction(match["number"]) * _DURATION_NS[match["unit"] or "ns"])


@dataclass(frozen=True, slots=True)
class AtLeast:
    """``K/N``: of every N windows K must hold."""

    hold: int
    of: int

    @classmethod
    def parse(cls, text: str) -> AtLeast:
        match = _AT_LEAST.fullmatch(text.strip())
        if not match or not 0 < int(match["hold"]) <= int(match["of"]):
            raise CheckSyntaxError(f"--at-least {text!r}: expected K/N with 0 < K <= N, for example 4/5")
        return cls(int(match["hold"]), int(match["of"]))


def evaluate(
    run: RunAnalysis | Analysis, checks: Iterable[str | Check], *, at_least: str | AtLeast | None = None
) -> Verdict:
    """The verdict of some checks over every rank and window (design, section 5).

    Raises CheckSyntaxError if an expression does not parse; no check at all is one, too.
    """
    parsed = [parse_check(c) if isinstance(c, str) else c for c in checks]
    if not parsed:
        raise CheckSyntaxError("no check was given; try 'overlaps >= auto'")
    quorum = AtLeast.parse(at_least) if isinstance(at_least, str) else at_least
    if isinstance(run, Analysis):
        run = RunAnalysis((run,))
    findings = [Finding("", "inconclusive", problem) for problem in run.problems]
    if not run.ranks:
        findings.append(Finding("", "inconclusive", "no trace was analysed"))
    for check in parsed:
        for rank in run.ranks:
            held = [_hold(check, rank, window) for window in rank.steps.values()]
            findings += held if quorum is None else [_quorum(check, rank, held, quorum)]
    return Verdict(max((f.status for f in findings), key=SEVERITY.index), tuple(findings))


def _hold(check: Check, rank: Analysis, window: Window) -> Finding:
    """One check on one window."""

    def finding(status: str, message: str, value: float | None = None, limit: float | None = None) -> Finding:
        evidence = tuple(_evidence(check, _scope(check, window)[1])) if status == "fail" else ()
        return _finding(check, rank, status, message, window.name, value, limit, evidence)

    if rank.incomplete:
        return finding("inconclusive", f"records are missing from this trace: {rank.incomplete[0]}")
    totals, some, phase, where = _measure(check, window)
    if not some:
        whole = rank.whole
        why = "" if whole.collectives or whole.compute_ns else ": nothing ran on a device, or it was not recorded"
        return finding("inconclusive", f"no {where} in this window{why}")
    if not totals.time_ns:
        return finding("inconclusive", f"the {where} of this window take no time")
    if check.metric == "overlaps":
        value, limit, said = _overlaps(check, totals, phase, where)
        if limit is None:
            return finding("inconclusive", said)
        wanted = f"{limit:g}"
    else:
        amount = getattr(totals, f"{check.metric}_ns")
        if amount is None:
            return finding("inconclusive", f"{check.metric} is not known: no comparable GEMM ran alone in this trace")
        value = 100 * amount / totals.time_ns if check.unit == "%" else amount
        limit = check.limit or 0.0
        share = f"{100 * amount / totals.time_ns:.1f} % of the {where}' {duration(totals.time_ns)}"
        said = f"{check.metric} is {duration(amount)}, {share}"
        wanted = f"{limit:g} %" if check.unit == "%" else duration(int(limit))
    said = f"{said}, wanted {check.compare} {wanted}"
    compare = OPERATORS[check.compare]
    if compare(value, limit):
        return finding("pass", said, value, limit)
    starved = [c for c in some if c.starved_ns is not None]
    if starved and compare(value_at_best(check.metric, check.unit, value, totals, starved), limit):
        return finding("inconclusive", f"{said}; {too_busy(starved)}", value, limit)
    return finding("fail", said, value, limit)


def _scope(check: Check, window: Window) -> tuple[Phase | None, list[Collective]]:
    """The phase that a check looks at (None: all phases), and its collectives."""
    some = [c for c in window.collectives if check.op in ("communication", c.op)]
    no_phase_known = all(c.phase == "unknown" for c in some)
    if check.phase is None or (check.by_default and no_phase_known):
        return None, some
    return getattr(window, check.phase), [c for c in some if c.phase == check.phase]


def _measure(check: Check, window: Window) -> tuple[Totals, list[Collective], Phase | None, str]:
    """Totals and collectives in a check's scope, and the scope in words."""
    phase, some = _scope(check, window)
    things = check.op.replace("_", "-") + ("s" if check.op != "communication" else "")
    if phase is None:
        everything = window.communication if check.op == "communication" else window.by_op.get(check.op, Totals())
        return everything, some, None, things
    totals: Totals | None = getattr(phase, check.op, None)
    if totals is None:
        return Totals(), [], phase, f"{check.phase} {things} (only all_gather and reduce_scatter are totalled by phase)"
    return totals, some, phase, f"{check.phase} {things}"


def _overlaps(check: Check, totals: Totals, phase: Phase | None, where: str) -> tuple[int, float | None, str]:
    """Overlaps found, overlaps wanted (None where the window cannot say), and the first in words, or why it cannot."""
    reduces = check.op == "reduce_scatter"
    expected = None if phase is None else phase.reduce_expected if reduces else phase.expected
    if phase is not None and expected is not None:
        found = phase.reduce_found if reduces else phase.found
        limit = float(expected) if check.limit is None else check.limit
        return found, limit, f"{found} of {expected} expected {where} overlap a GEMM"
    found = totals.overlapped_by_gemm
    if check.limit is not None:
        return found, check.limit, f"{found} of {totals.count} {where} overlap a GEMM"
    missing = "two units below the root" if phase is not None else "a phase and units"
    why = f"no label names {missing} for the {totals.count} {where}, so auto has nothing to expect"
    return found, None, f"{why}; give a number: 'overlaps >= N'"


def _quorum(check: Check, rank: Analysis, held: Sequence[Finding], quorum: AtLeast) -> Finding:
    """K of N windows as one finding."""
    need = math.ceil(quorum.hold * len(held) / quorum.of)
    passed, failed = (sum(f.status == status for f in held) for status in ("pass", "fail"))
    if len(held) < quorum.of and failed <= quorum.of - quorum.hold:
        status, message = "inconclusive", f"{len(held)} windows in this trace, {quorum.of} wanted"
    else:
        status = "pass" if passed >= need else "fail" if len(held) - failed < need else "inconclusive"
        message = f"{passed} of {len(held)} windows hold, {need} wanted"
    evidence = tuple(f"{f.window}: {f.message}" for f in held if f.status != "pass")[:MOST_EVIDENCE]
    return _finding(check, rank, status, message, None, passed, need, evidence)


def _finding(
    check: Check,
    rank: Analysis,
    status: str,
    message: str,
    window: str | None,
    value: float | None,
    limit: float | None,
    evidence: tuple[str, ...],
) -> Finding:
    """A finding on one rank, which it names as its Analysis does."""
    return Finding(
        check.text,
        status,
        message,
        rank.rank,
        rank.path,
        window,
        value,
        limit,
        evidence,
        process=rank.process,
        device=rank.device,
    )


def _evidence(check: Check, some: Iterable[Collective]) -> Iterable[str]:
    """The collectives that cost the most, one line each."""
    bad = [c for c in some if c.exposed_ns and (check.metric != "overlaps" or not c.overlapped)]
    for c in sorted(bad, key=lambda c: -c.exposed_ns)[:MOST_EVIDENCE]:
        why = f"{c.cause}: {c.evidence}" if c.cause else (c.evidence or "little of it is exposed")
        exposed = f"exposed {duration(c.exposed_ns)} of {duration(c.time_ns)}"
        yield f"{c.op} of {c.unit or 'an unknown unit'}: {exposed}; {why}"
