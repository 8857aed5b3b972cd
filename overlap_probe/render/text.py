"""Shows a run in a terminal: the table, the causes, the doubts, and the verdict as the last line.

The idea: the text is made before it is printed, in a width in which no number is wrapped or cut, so a log file, a pipe
and a terminal show the same characters; colour is only added to them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_probe.render import summary
from overlap_probe.render.advice import CAUSE_ADVICE, WAITED_FOR, WHAT_IF, WHAT_IF_ASSUMES
from overlap_probe.render.predictions import predictions
from overlap_probe.render.words import ABSENT, clean, duration, milliseconds, number, percent, plural
from overlap_probe.results import Collective, RunAnalysis, Verdict

WIDTH = 100
"""Columns to which prose is wrapped where no terminal says otherwise; a table takes what its numbers need."""

MAX_ROWS = 96
"""Rows of a table in a terminal; beyond them only the worst rows are shown, and said to be."""

STYLES = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}
_MARKS = {"pass": "ok", "fail": "FAIL", "inconclusive": "?", None: ""}


def render(run: RunAnalysis, verdict: Verdict | None = None, *, colour: bool = False, width: int = WIDTH) -> str:
    """The report as text; its last line is the verdict's only line. ``colour`` adds ANSI escapes."""
    console = make_console(colour)
    _print_rows(console, summary.rows(run, verdict))
    for line in summary.denominators(run):
        console.print(line, style="dim")
    print_list(console, width, "Why all-gathers were exposed:", _cause_lines(run))
    print_list(console, width, "What if (each change by itself, replayed on the timeline):", _what_if_lines(run))
    print_list(console, width, "Doubts about these numbers:", summary.doubts(run))
    console.print()
    console.print(_verdict_line(run, verdict))
    return text_of(console)


def render_collectives(run: RunAnalysis, *, colour: bool = False) -> str:
    """Every collective of the step windows, one line each, in order of rank and time.

    Starts count from the window's first collective.
    """
    what_head = ("rank", "window", "start, ms", "op", "phase", "unit", "by")
    head = (*what_head, "queue", "time", "hidden", "exposed", "stalled", "why")
    cells = []
    for entry in summary.collectives(run):
        c = entry.collective
        what = (c.op, c.phase, ABSENT if c.unit is None else clean(c.unit), c.mechanism)
        times = (duration(c.queue_ns), duration(c.time_ns), percent(c.hidden_ns, c.time_ns))
        costs = (duration(c.exposed_ns), duration(c.stalled_ns))
        cells.append((entry.rank, entry.window, milliseconds(entry.since_ns), *what, *times, *costs, _why(c)))
    console = make_console(colour)
    print_table(console, head, cells, right={2, 7, 8, 9, 10, 11})
    return text_of(console)


def _why(c: Collective) -> str:
    """Cause, what it waited for, and the numbers that show it, as far as there are any; and how busy the SMs were."""
    waited = f"waited {WAITED_FOR.get(c.waited_for, c.waited_for)}" if c.waited_for else None
    why = ": ".join(filter(None, (c.cause or waited, c.evidence and clean(c.evidence))))
    return "; ".join(filter(None, (why, summary.sm_activity(c))))


def make_console(colour: bool) -> Console:
    """A console that keeps what is printed, wider than any line, so that it never wraps or cuts one by itself."""
    return Console(
        file=io.StringIO(),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        width=1_000_000,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def print_table(console: Console, head: Sequence[str], cells: Sequence[Sequence[str]], right: set[int]) -> None:
    """Print a table as wide as its widest cells ask for; columns ``right`` are aligned right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at, title in enumerate(head):
        table.add_column(title, justify="right" if at in right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _print_rows(console: Console, rows: list[summary.Row]) -> None:
    shown = summary.worst_rows(rows, MAX_ROWS)
    head = ("window", "rank", "scope", "count", "expected", "overlap", "hidden", "exposed", "stalled", "")
    cells = []
    for row in shown:
        totals = row.totals
        counts = (number(totals.count), number(row.expected), number(row.overlapped))
        times = (percent(totals.hidden_ns, totals.time_ns), duration(totals.exposed_ns), duration(totals.stalled_ns))
        cells.append((row.window, row.rank, row.scope, *counts, *times, _MARKS[row.status]))
    print_table(console, head, cells, right={3, 4, 5, 6, 7, 8})
    if len(shown) < len(rows):
        console.print(f"... the {len(shown)} worst of {plural(len(rows), 'row')}; a report (-o) has them all.")


def _cause_lines(run: RunAnalysis) -> list[str]:
    lines = []
    for c in summary.causes(run):
        case = f"longest {duration(c.longest.collective.exposed_ns)} exposed ({summary.where(c.longest)})"
        lines.append(f"{c.count} x {c.cause}, {case}. {CAUSE_ADVICE.get(c.cause, '')}")
    waits = [f"{count} {WAITED_FOR.get(what, what)}" for what, count in summary.waits(run).items()]
    return [*lines, f"Launched early and waited, exposed or not: {', '.join(waits)}."] if waits else lines


def _what_if_lines(run: RunAnalysis) -> list[str]:
    lines = []
    for p in predictions(run):
        would = ", ".join(f"{duration(ns)} with {WHAT_IF[change]}" for change, ns in p.would_ns.items())
        now = f"{summary.named(p.rank)}, {p.phase}: {duration(p.now_ns)} a window"
        lines.append(
            f"{now}; it would take {would}. Worth most: {p.in_words()}." if would else f"{now}; {p.in_words()}."
        )
    return [*lines, WHAT_IF_ASSUMES] if lines else []


def print_list(console: Console, width: int, title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"\n{title}", style="bold")
    for line in lines:
        bullet = Table.grid(padding=(0, 1, 0, 0))
        bullet.add_row("  -", Text(line.rstrip(), overflow="fold"))
        console.print(bullet, width=width)


def _verdict_line(run: RunAnalysis, verdict: Verdict | None) -> Text:
    status = verdict.status if verdict else None
    word = status.upper() if status else "NO VERDICT"
    return Text.assemble((word, STYLES.get(status or "", "bold")), f"  {summary.headline(run, verdict)}")
