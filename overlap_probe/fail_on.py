"""Judges what changed between two runs: expressions on a change, such as ``hidden < -5%``, become a verdict.

The idea: an expression names a change that is not to be. It is a check whose value may have a sign, read by the parser
of checks; it means the numbers that a check means; and as with checks, what cannot be told is never a pass. Where a
thread had no core (`starvation`), a run may be anything between what it is and its best, and both must answer alike.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from overlap_probe.baseline import RankSamples, at_best
from overlap_probe.checks import MOST_EVIDENCE, OPERATORS, Check, parse_check
from overlap_probe.diff import Change, Diff, compare
from overlap_probe.errors import CheckSyntaxError
from overlap_probe.render.summary import named
from overlap_probe.render.words import plural
from overlap_probe.results import PHASES, SEVERITY, Finding, Verdict

DEFAULT_FAIL_ON = ("overlaps < 0", "hidden < -5%")
"""What a baseline asks for unless told otherwise: no overlap lost, and no more than 5 points of hidden time."""

_SIGN = re.compile(r"(?<=[<>=])\s*([+-])\s*(?=\d)")


def parse_change(text: str) -> Check:
    """An expression on a change, such as ``hidden < -5%``: a check whose value may have a sign.

    A percentage means points of the collectives' time: from 90 % to 84 % is -6 %. Raises CheckSyntaxError.
    """
    sign = _SIGN.search(text)
    try:
        check = parse_check(_SIGN.sub("", text, count=1))
    except CheckSyntaxError as error:
        raise CheckSyntaxError(f"--fail-on {text!r}: {str(error).partition(': ')[2]}; e.g. 'hidden < -5%'") from error
    if check.limit is None:
        raise CheckSyntaxError(f"--fail-on {text!r}: auto is no change; give a number, e.g. 'overlaps < 0'")
    return replace(check, text=text.strip(), limit=-check.limit if sign and sign[1] == "-" else check.limit)


def judge(compared: Diff, fail_on: Sequence[Check]) -> Verdict:
    """The verdict of the worst rank.

    It fails where a change is one to fail on, and is inconclusive where such a change is within the noise, where the
    machine was too busy to tell, or where a run lacks the number, a rank or records. Raises CheckSyntaxError where
    there is nothing to fail on.
    """
    if not fail_on:
        raise CheckSyntaxError("no expression was given; try --fail-on 'hidden < -5%'")
    findings = [Finding("", "inconclusive", problem) for problem in compared.problems]
    if not compared.pairs:
        findings.append(Finding("", "inconclusive", "the two runs have no rank in common"))
    findings += [_judge(check, compared, *pair) for check in fail_on for pair in compared.pairs]
    return Verdict(max((f.status for f in findings), key=SEVERITY.index), tuple(findings))


def _judge(check: Check, compared: Diff, base: RankSamples, new: RankSamples) -> Finding:
    def finding(status: str, message: str, value: float | None = None, evidence: Sequence[str] = ()) -> Finding:
        return Finding(check.text, status, message, new.rank, new.label, None, value, check.limit, tuple(evidence))

    assert check.limit is not None
    scope = _scope(check, base)
    for side, rank in (("base", base), ("new", new)):
        if rank.incomplete:
            return finding("inconclusive", f"records are missing from the {side} trace: {rank.incomplete[0]}")
        if compare(rank, rank, scope, check.metric, check.unit) is None:
            return finding("inconclusive", f"{check.metric} of {scope} is not known in the {side} run")
    fails = OPERATORS[check.compare]
    change, *might_be = [
        found
        for a, b in itertools.product((base, at_best(base)), (new, at_best(new)))
        if (found := compare(a, b, scope, check.metric, check.unit))
    ]
    failed = fails(change.value, check.limit)
    if any(fails(other.value, check.limit) != failed for other in might_be):
        doubts = (s.too_busy for rank in (new, base) for s in rank.scopes[scope] if s.at_best)
        return finding("inconclusive", f"{change.in_words()}; {next(doubts)}", change.value)
    if not failed:
        return finding("pass", change.in_words(), change.value)
    if change.beyond_noise is False:
        doubt = (
            f"{change.in_words()}: windows of both runs lie among each other, so this may be noise; profile more steps"
        )
        return finding("inconclusive", doubt, change.value)
    worst = sorted((u for u in compared.units if _is_in(u.exposed, new, scope)), key=lambda u: u.exposed.gain)
    cost = [u.in_words() for u in worst[:MOST_EVIDENCE] if u.exposed.gain < 0]
    return finding("fail", change.in_words(), change.value, cost)


def _scope(check: Check, rank: RankSamples) -> str:
    """The scope that a check means, by the name that samples have."""
    if check.by_default and not any(f"{phase}.{check.op}" in rank.scopes for phase in PHASES):
        return check.op  # as in `checks`: where no phase is known, all of them are meant
    return check.op if check.phase is None else f"{check.phase}.{check.op}"


def _is_in(change: Change, rank: RankSamples, scope: str) -> bool:
    return change.rank == rank.label and (scope == "communication" or change.scope.startswith(f"{scope} of "))


def headline(compared: Diff, verdict: Verdict | None) -> str:
    """What decides, in one line without the verdict's status."""
    if verdict is None:
        try_this = f"try --fail-on {DEFAULT_FAIL_ON[-1]!r}"
        return f"{plural(len(compared.pairs), 'rank')} compared; nothing was asked to fail on; {try_this}"
    deciding = [finding for finding in verdict.findings if finding.status == verdict.status]
    nearest_first = sorted(deciding, key=lambda f: abs((f.value or 0) - (f.limit or 0)))
    passed, total = verdict.status == "pass", len(verdict.findings)
    shown = nearest_first[0 if passed else -1]
    where = f"{shown.check}: {named(shown.trace)}: " if shown.check else ""
    agree = f"all {total} checks hold; this is the tightest" if passed else f"{len(deciding)} of {total} findings"
    return f"{where}{shown.message}" + (f" ({agree})" if total > 1 else "")
