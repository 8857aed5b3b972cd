"""Shows a run as Markdown, for the summary of a CI job.

The idea: the same rows as in the terminal, as tables of GitHub's dialect; a text of the trace is escaped so that it can
neither end a cell nor become a link, an image, a mention or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from overlap_probe.render import summary
from overlap_probe.render.advice import CAUSE_ADVICE, WHAT_IF, WHAT_IF_ASSUMES
from overlap_probe.render.predictions import Prediction, predictions
from overlap_probe.render.words import clean, duration, number, percent, plural, without_folders
from overlap_probe.results import RunAnalysis, Verdict

MAX_ROWS = 96
"""Rows of the table; beyond them only the worst are shown, and said to be."""

MAX_FINDINGS = 20
"""Findings that do not hold and are shown with their evidence."""

_MARKS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", None: ""}


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """A heading with the verdict, what does not hold, the rows, the causes and the doubts."""
    word = f"{_MARKS[verdict.status]} {verdict.status.upper()}" if verdict else "not checked"
    parts = [f"### overlap_probe: {word}", escape(summary.headline(run, verdict))]
    if verdict:
        parts += _findings(run, verdict)
    rows = summary.rows(run, verdict)
    shown = summary.worst_rows(rows, MAX_ROWS)
    head = ("", "window", "rank", "scope", "count", "overlapped", "expected", "hidden", "exposed", "stalled")
    parts.append(_table(head, map(_cells, shown), right_from=4))
    if len(shown) < len(rows):
        parts.append(f"The {len(shown)} worst of {plural(len(rows), 'row')}.")
    parts.append(escape(" ".join(summary.denominators(run))))
    if causes := summary.causes(run):
        cells = [
            (c.cause, str(c.count), duration(c.longest.collective.exposed_ns), CAUSE_ADVICE.get(c.cause, ""))
            for c in causes
        ]
        parts.append(_table(("cause of exposure", "all-gathers", "longest", "what to do"), cells))
    if predicted := predictions(run):
        titles = ("what if: a window's", "rank", "now", *WHAT_IF.values(), "worth most")
        parts.append(_table(titles, map(_prediction, predicted), right_from=2, right_to=3 + len(WHAT_IF)))
        parts.append(escape(WHAT_IF_ASSUMES))
    if doubts := summary.doubts(run):
        parts.append("**Doubts about these numbers**\n\n" + _list(doubts))
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """The text so that Markdown shows it as it is, on one line."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", text).replace("://", ":\u200b//")


def _findings(run: RunAnalysis, verdict: Verdict) -> list[str]:
    open_ones = summary.not_held(verdict)
    lines = []
    paths = [a.path for a in run.ranks]
    for finding in open_ones[:MAX_FINDINGS]:
        where = f" on {escape(summary.place(finding))}" if summary.place(finding) else ""
        lines.append(f"- **{escape(finding.check or 'run')}**{where}: {escape(summary.message(run, finding))}")
        lines += [f"  - {escape(without_folders(line, paths))}" for line in finding.evidence]
    if len(open_ones) > MAX_FINDINGS:
        lines.append(f"- and {len(open_ones) - MAX_FINDINGS} more")
    return ["\n".join(lines)] if lines else []


def _cells(row: summary.Row) -> tuple[str, ...]:
    totals = row.totals
    counts = (number(totals.count), number(row.overlapped), number(row.expected))
    times = (percent(totals.hidden_ns, totals.time_ns), duration(totals.exposed_ns), duration(totals.stalled_ns))
    return (_MARKS[row.status], row.window, row.rank, row.scope, *counts, *times)


def _prediction(p: Prediction) -> tuple[str, ...]:
    would = (duration(p.would_ns.get(change)) for change in WHAT_IF)
    return (p.phase, p.rank, duration(p.now_ns), *would, p.in_words())


def _table(head: Sequence[str], cells: Iterable[Sequence[str]], right_from: int = 99, right_to: int = 99) -> str:
    rule = ["--:" if right_from <= at < right_to else "---" for at in range(len(head))]
    lines = [head, rule, *([escape(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)
