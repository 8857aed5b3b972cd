"""Turns a run and its verdict into the few plain rows that every format for people shows.

The idea: a row of a table is a *scope* that a check can name (``forward.all_gather``) in one window on one rank. Text,
Markdown and HTML print the same rows, so they cannot disagree, and tests look at rows instead of pages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from overlap_probe.render.words import clean, file_name, plural, without_folders
from overlap_probe.results import (
    PHASES,
    SEVERITY,
    Analysis,
    Collective,
    Finding,
    RunAnalysis,
    Totals,
    Verdict,
    Window,
)

_Place: TypeAlias = tuple[int | None, int | None, int | None, str, str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One scope in one window on one rank. ``overlapped`` is of ``expected`` where there is one, else of all."""

    rank: str
    window: str
    scope: str
    totals: Totals
    expected: int | None
    overlapped: int
    status: str | None
    """The worst finding on exactly this row; None where no check looked at it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective, where it was found, and when it started, counted from the first of its window."""

    rank: str
    window: str
    collective: Collective
    since_ns: int


@dataclass(frozen=True, slots=True)
class CauseCount:
    """How often a cause of exposure occurs, and its longest case."""

    cause: str
    count: int
    longest: Entry


def rank_labels(run: RunAnalysis) -> tuple[str, ...]:
    """A short name for each entry: its rank, else process and device, else file; with the file where two share it."""
    plain = [_label(analysis) for analysis in run.ranks]
    seen = Counter(plain)
    return tuple(
        f"{label} ({file_name(analysis.path)})" if seen[label] > 1 else label
        for label, analysis in zip(plain, run.ranks, strict=True)
    )


def _label(of: Analysis | Finding) -> str:
    if of.rank is not None:
        return str(of.rank)
    parts = (("process", of.process), ("device", of.device))
    path = of.path if isinstance(of, Analysis) else of.trace
    return " ".join(f"{word} {value}" for word, value in parts if value is not None) or file_name(path)


def named(label: str) -> str:
    """A label of `rank_labels` in a sentence: ``rank 0``, but ``process 12 device 1``."""
    return f"rank {label}" if label.split()[0].isdigit() else label


def where(entry: Entry) -> str:
    """Which collective an entry is, as far as its trace says: ``layers.3, backward, rank 0, step2``."""
    c = entry.collective
    phase = None if c.phase == "unknown" else c.phase
    return clean(", ".join(filter(None, (c.unit, phase, named(entry.rank), entry.window))))


def rows(run: RunAnalysis, verdict: Verdict | None = None, *, whole: bool = False) -> list[Row]:
    """The rows of every rank, in order of rank and time; ``whole`` adds the whole trace where there are steps."""
    made = []
    findings = _by_place(verdict)
    for label, analysis in zip(rank_labels(run), run.ranks, strict=True):
        windows = analysis.steps | ({"whole": analysis.whole} if whole else {})
        for window in windows.values():
            here = findings.get((analysis.rank, analysis.process, analysis.device, analysis.path, window.name), [])
            default: str | None = ""  # a check without a scope looks at the first row of a window
            for scope, totals, expected, overlapped in _scopes(window):
                on_row = [f.status for f in here if _scope_of(f.check) in (scope, default)]
                status = max(on_row, key=SEVERITY.index, default=None)
                made.append(Row(label, clean(window.name), scope, totals, expected, overlapped, status))
                default = None
    return made


def _scopes(window: Window) -> Iterator[tuple[str, Totals, int | None, int]]:
    """Scope, totals, expected, overlapped; the first is what a check without a scope looks at."""
    forward, backward = window.forward, window.backward
    if forward.all_gather.count or backward.all_gather.count:
        yield _counted("forward.all_gather", forward.all_gather, forward.expected, forward.found)
        if backward.all_gather.count:
            yield _counted("backward.all_gather", backward.all_gather, backward.expected, backward.found)
    else:
        yield _counted("all_gather", window.all_gather)
    if backward.reduce_scatter.count:
        reduced = backward.reduce_expected, backward.reduce_found
        yield _counted("backward.reduce_scatter", backward.reduce_scatter, *reduced)
    phased = {"all_gather"} | ({"reduce_scatter"} if backward.reduce_scatter.count else set())
    for op, totals in window.by_op.items():
        if op not in phased and totals.count:
            yield _counted(op, totals)


def _counted(
    scope: str, totals: Totals, expected: int | None = None, found: int = 0
) -> tuple[str, Totals, int | None, int]:
    """Overlaps as a check counts them: of what is expected, else of all."""
    return scope, totals, expected, totals.overlapped_by_gemm if expected is None else found


def _by_place(verdict: Verdict | None) -> dict[_Place, list[Finding]]:
    """The findings by rank, process, device, trace and window."""
    places: dict[_Place, list[Finding]] = {}
    for f in verdict.findings if verdict else ():
        places.setdefault((f.rank, f.process, f.device, f.trace, f.window), []).append(f)
    return places


def _scope_of(check: str) -> str:
    """``backward.all_gather`` of ``backward.all_gather.hidden >= 80%`` and ``backward.hidden > 0``; else empty."""
    scope = re.split(r"[^\w.]", check.strip())[0].rpartition(".")[0]
    return f"{scope}.all_gather" if scope in PHASES else scope


def worst_rows(rows: list[Row], most: int) -> list[Row]:
    """At most that many rows, in their order: failed ones first, then those with the most exposed time."""
    severity = {status: at for at, status in enumerate((None, *SEVERITY))}
    order = sorted(range(len(rows)), key=lambda i: (-severity[rows[i].status], -rows[i].totals.exposed_ns))
    return [rows[i] for i in sorted(order[:most])]


def collectives(run: RunAnalysis) -> list[Entry]:
    """Every collective of the step windows, in order of rank and time."""
    made = []
    for label, analysis in zip(rank_labels(run), run.ranks, strict=True):
        for window in analysis.steps.values():
            origin = min((c.start_ns for c in window.collectives), default=0)
            made += [Entry(label, clean(window.name), c, c.start_ns - origin) for c in window.collectives]
    return made


def causes(run: RunAnalysis) -> list[CauseCount]:
    """The causes of exposure in the step windows, most frequent first."""
    by_cause: dict[str, list[Entry]] = {}
    for entry in collectives(run):
        if entry.collective.cause is not None:
            by_cause.setdefault(entry.collective.cause, []).append(entry)
    counts = [
        CauseCount(cause, len(entries), max(entries, key=lambda e: e.collective.exposed_ns))
        for cause, entries in by_cause.items()
    ]
    return sorted(counts, key=lambda c: (-c.count, c.cause))


def sm_activity(c: Collective) -> str:
    """How busy the SMs were while it ran, in words; empty where the trace has no sample of that time."""
    if c.sm_active_percent is None or c.sm_samples is None:
        return ""
    return f"{c.sm_active_percent:g} % of SMs active ({plural(c.sm_samples, 'sample')})"


def waits(run: RunAnalysis) -> dict[str, int]:
    """How many all-gathers of the step windows waited in a long queue, by what they waited for."""
    found = (entry.collective.waited_for for entry in collectives(run))
    return dict(sorted(Counter(what for what in found if what is not None).items()))


def denominators(run: RunAnalysis) -> list[str]:
    """What was counted and what was left out, one line each."""
    windows = [window for analysis in run.ranks for window in analysis.steps.values()]
    counted = plural(sum(w.communication.count for w in windows), "collective")
    lines = [f"Counted: {counted} in {plural(len(windows), 'window')} on {plural(len(run.ranks), 'rank')}."]
    for label, analysis in zip(rank_labels(run), run.ranks, strict=True):
        steps = analysis.steps.values()
        inside, total = sum(w.communication.count for w in steps), analysis.whole.communication.count
        placed = sum(w.forward.all_gather.count + w.backward.all_gather.count for w in steps)
        gathers = sum(w.all_gather.count for w in steps)
        left_out = []
        if inside < total:
            left_out.append(f"{total - inside} of {plural(total, 'collective')} outside of every window")
        if 0 < placed < gathers:
            left_out.append(f"{gathers - placed} of {plural(gathers, 'all-gather')} in neither forward nor backward")
        if left_out:
            lines.append(f"Left out on {named(label)}: {', '.join(left_out)}.")
    if len(lines) == 1:
        lines[0] = f"{lines[0][:-1]}; nothing left out."
    return lines


def doubts(run: RunAnalysis) -> list[str]:
    """Everything that makes the numbers less than certain, one line each, without folders."""
    paths = [a.path for a in run.ranks]
    lines = [without_folders(problem, paths) for problem in run.problems]
    for label, analysis in zip(rank_labels(run), run.ranks, strict=True):
        notes = dict.fromkeys(analysis.incomplete + analysis.notes)
        lines += [f"{named(label)}: {without_folders(note, paths)}" for note in notes]
    return lines


def worst(verdict: Verdict) -> Finding | None:
    """The finding that decides: of the verdict's status, and the furthest on the wrong side of its limit."""
    deciding = [f for f in verdict.findings if f.status == verdict.status]
    return min(deciding, key=_margin, default=None)


def not_held(verdict: Verdict | None) -> list[Finding]:
    """The findings that do not pass, worst first."""
    found = [f for f in (verdict.findings if verdict else ()) if f.status != "pass"]
    return sorted(found, key=lambda f: (-SEVERITY.index(f.status), _margin(f)))


def _margin(finding: Finding) -> float:
    """How far the value is on the right side of the limit, relative to the limit; negative for a failed check."""
    if finding.value is None or finding.limit is None:
        return 0.0
    distance = finding.value - finding.limit
    return (-distance if "<" in finding.check else distance) / max(abs(finding.limit), 1)


def place(finding: Finding) -> str:
    """``rank 1, ProfilerStep#0``: where a finding was made."""
    parts = []
    if finding.rank is not None or finding.trace:
        parts.append(named(_label(finding)))
    if finding.window is not None:
        parts.append(clean(finding.window))
    return ", ".join(parts)


def message(run: RunAnalysis, finding: Finding) -> str:
    """The finding's own line, without folders."""
    return without_folders(finding.message, [a.path for a in run.ranks])


def headline(run: RunAnalysis, verdict: Verdict | None) -> str:
    """The verdict in one line without its status: what the worst rank and window shows, and how much agrees."""
    if verdict is None:
        return "no check was asked for"
    finding = worst(verdict)
    if finding is None:
        return without_folders(run.problems[0], [a.path for a in run.ranks]) if run.problems else "nothing was checked"
    same = sum(f.status == verdict.status for f in verdict.findings)
    where = place(finding)
    if verdict.status == "pass":
        checked = "every check holds" if same == 1 else f"all {same} checks hold"
        return f"{message(run, finding)} ({checked}; tightest: {where})" if where else message(run, finding)
    counted = f" ({same} of {plural(len(verdict.findings), 'finding')})" if len(verdict.findings) > 1 else ""
    return f"{where}: {message(run, finding)}{counted}" if where else f"{message(run, finding)}{counted}"
