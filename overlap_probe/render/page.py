"""Makes what the page shows as plain data: texts and numbers in the order in which they are read.

The idea: tests look at these lists, and the template decides nothing. What a large run has too much of is cut down to
the worst, and the page says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from markupsafe import Markup

from overlap_probe.render import advice, summary
from overlap_probe.render.predictions import Prediction, predictions
from overlap_probe.render.words import (
    clean,
    duration,
    file_name,
    milliseconds,
    number,
    percent,
    plural,
    typeset,
    without_folders,
)
from overlap_probe.results import Analysis, Finding, RunAnalysis, Totals, Verdict, Window

MAX_COLLECTIVES = 1500
"""Rows of the table of collectives; beyond them only the most exposed are shown, and said to be."""

MAX_ROWS = 600
"""Rows of the table of windows, likewise."""

MAX_FINDINGS = 40
"""Findings that do not hold, likewise."""

MAX_PICTURES = 8
"""Timelines; beyond them only those of the ranks with the most exposed time are drawn."""

STATUS = {
    "pass": ("PASS", "✓"),
    "fail": ("FAIL", "✗"),
    "inconclusive": ("INCONCLUSIVE", "?"),
    None: ("NOT CHECKED", "·"),
}
"""Word and mark of each status."""


def page(run: RunAnalysis, verdict: Verdict | None = None) -> dict[str, Any]:
    """All that the template shows: texts and numbers in the order in which they are read."""
    word, mark = STATUS[verdict.status if verdict else None]
    rows = summary.rows(run, verdict, whole=True)
    shown = summary.worst_rows(rows, MAX_ROWS)
    listed = listed_collectives(run)
    not_held = summary.not_held(verdict)
    return {
        "status": verdict.status if verdict else "none",
        "word": word,
        "mark": mark,
        "headline": summary.headline(run, verdict),
        "findings": [_finding(run, finding) for finding in not_held[:MAX_FINDINGS]],
        "not_held": len(not_held),
        "held": sum(f.status == "pass" for f in verdict.findings) if verdict else 0,
        "doubts": summary.doubts(run),
        "denominators": summary.denominators(run),
        "groups": _grouped(shown),
        "has_steps": any(row.window != "whole" for row in rows),
        "row_count": len(rows),
        "shown_count": len(shown),
        "pictures": _pictures(run),
        "causes": [_cause(count) for count in summary.causes(run)],
        "what_if": [_prediction(p) for p in predictions(run)],
        "changes": list(advice.WHAT_IF.values()),
        "assumes": advice.WHAT_IF_ASSUMES,
        "gathers": sum(window.all_gather.count for a in run.ranks for window in a.steps.values()),
        "waits": [(count, advice.WAITED_FOR.get(what, what)) for what, count in summary.waits(run).items()],
        "collectives": [_collective(entry) for entry in listed],
        "collective_count": sum(len(w.collectives) for a in run.ranks for w in a.steps.values()),
        "traces": [_trace(*pair) for pair in zip(summary.rank_labels(run), run.ranks, strict=True)],
        "record": [(key, without_folders(text)) for key, text in _flat(run.record)],
        "definitions": advice.DEFINITIONS,
    }


def listed_collectives(run: RunAnalysis) -> list[summary.Entry]:
    """The collectives that the page lists, in order of rank and time: all, or the MAX_COLLECTIVES most exposed."""
    entries = summary.collectives(run)
    order = sorted(range(len(entries)), key=lambda i: -entries[i].collective.exposed_ns)
    return [entries[i] for i in sorted(order[:MAX_COLLECTIVES])]


def _finding(run: RunAnalysis, finding: Finding) -> dict[str, Any]:
    paths = [a.path for a in run.ranks]
    return {
        "status": finding.status,
        "mark": STATUS[finding.status][1],
        "check": finding.check or "run",
        "place": summary.place(finding),
        "message": summary.message(run, finding),
        "evidence": [without_folders(line, paths) for line in finding.evidence],
    }


def _grouped(rows: list[summary.Row]) -> list[dict[str, Any]]:
    """The rows of each window on each rank together."""
    groups = groupby(rows, key=lambda row: (row.rank, row.window))
    return [{"rank": rank, "window": window, "rows": [_row(row) for row in group]} for (rank, window), group in groups]


def _row(row: summary.Row) -> dict[str, Any]:
    totals = row.totals
    return {
        "scope": row.scope,
        "count": number(totals.count),
        "expected": number(row.expected),
        "overlapped": number(row.overlapped),
        "time": duration(totals.time_ns),
        "hidden": percent(totals.hidden_ns, totals.time_ns),
        "exposed": duration(totals.exposed_ns),
        "stalled": duration(totals.stalled_ns),
        "slowdown": duration(totals.slowdown_ns),
        "net_hidden": duration(totals.net_hidden_ns),
        "bar": _bar(totals),
        "status": row.status or "none",
        "mark": STATUS[row.status][1] if row.status else "",
        "word": STATUS[row.status][0] if row.status else "",
    }


def _bar(totals: Totals) -> list[tuple[str, str, float]]:
    """Kind, words and share of the time in percent, of the parts of a collective's time; no part is empty."""
    parts = (
        ("gemm", "hidden by GEMMs", totals.hidden_by_gemm_ns),
        ("compute", "hidden by other compute", totals.hidden_ns - totals.hidden_by_gemm_ns),
        ("exposed", "exposed beside other work of the compute streams", totals.exposed_ns - totals.stalled_ns),
        ("stalled", "stalled", totals.stalled_ns),
    )
    time_ns = totals.time_ns
    return [(kind, f"{percent(ns, time_ns)} {words}", round(100 * ns / time_ns, 2)) for kind, words, ns in parts if ns]


def _pictures(run: RunAnalysis) -> list[dict[str, Any]]:
    from overlap_probe.render.figures import timeline_svg

    labelled = [(label, a) for label, a in zip(summary.rank_labels(run), run.ranks, strict=True) if a.lanes]
    exposed = [_pictured_window(analysis).all_gather.exposed_ns for _, analysis in labelled]
    chosen = sorted(range(len(labelled)), key=lambda at: -exposed[at])[:MAX_PICTURES]
    drawn = []
    for at in sorted(chosen):
        label, analysis = labelled[at]
        window = _pictured_window(analysis)
        gathers = window.all_gather
        share = f"{duration(gathers.exposed_ns)} of {duration(gathers.time_ns)} exposed"
        words = f"{plural(gathers.count, 'all-gather')}, {share}"
        title = clean(f"{summary.named(label)}, {window.name}")
        track = "thread" if any(c.mechanism == "cpu" for c in window.collectives) else "stream"
        svg = timeline_svg(analysis.lanes, f"t{at}", typeset(f"Timeline of {title}: {words}"), track=track)
        drawn.append({"title": title, "words": words, "svg": Markup(svg)})
    return drawn


def _pictured_window(analysis: Analysis) -> Window:
    """The window that the lanes of an analysis show."""
    return analysis.windows[analysis.pictured]


def _cause(count: summary.CauseCount) -> dict[str, str]:
    longest = count.longest.collective
    return {
        "cause": count.cause,
        "count": str(count.count),
        "meaning": advice.CAUSE_MEANING.get(count.cause, ""),
        "advice": advice.CAUSE_ADVICE.get(count.cause, ""),
        "longest": duration(longest.exposed_ns),
        "where": summary.where(count.longest),
        "evidence": longest.evidence or "",
    }


def _prediction(p: Prediction) -> dict[str, Any]:
    would = [(duration(p.would_ns.get(change)), change == p.best) for change in advice.WHAT_IF]
    return {"rank": p.rank, "phase": p.phase, "now": duration(p.now_ns), "would": would, "best": p.in_words()}


def _collective(entry: summary.Entry) -> dict[str, str]:
    c = entry.collective
    return {
        "rank": entry.rank,
        "window": entry.window,
        "unit": number(None) if c.unit is None else c.unit,
        "op": c.op,
        "phase": c.phase,
        "mechanism": c.mechanism,
        "name": c.name,
        "found_by": c.found_by,
        "start": milliseconds(entry.since_ns),
        "queue": duration(c.queue_ns),
        "time": duration(c.time_ns),
        "hidden": percent(c.hidden_ns, c.time_ns),
        "exposed": duration(c.exposed_ns),
        "stalled": duration(c.stalled_ns),
        "wait": duration(c.wait_ns),
        "cause": c.cause or "",
        "waited_for": advice.WAITED_FOR.get(c.waited_for, c.waited_for) if c.waited_for else "",
        "evidence": "; ".join(filter(None, (c.evidence, summary.sm_activity(c)))),
    }


def _trace(label: str, analysis: Analysis) -> dict[str, str]:
    return {
        "rank": label,
        "world": number(analysis.world_size),
        "file": file_name(analysis.path),
        "format": analysis.format,
        "device": analysis.device_name or number(None),
        "process": number(analysis.process),
        "quality": analysis.quality,
    }


def _flat(value: Any, key: str = "") -> list[tuple[str, str]]:
    """Nested values as ``a.b: text`` pairs in order; a list is one text."""
    if isinstance(value, Mapping):
        return [pair for k, v in value.items() for pair in _flat(v, f"{key}.{k}" if key else str(k))]
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return [] if value is None else [(key, text)]
