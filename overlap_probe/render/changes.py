"""Shows what changed between two runs: as a table for a terminal or a log, as Markdown, and as JSON.

The idea: a row is one metric of one scope, on the rank where it changed most for the worse, since a comparison is as
good as its worst rank; the JSON has every rank. What is within the noise says so beside the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from overlap_probe.diff import Change, Diff, Spread, UnitChange, amount
from overlap_probe.fail_on import headline
from overlap_probe.render.summary import named
from overlap_probe.render.text import STYLES, WIDTH, make_console, print_list, print_table, text_of
from overlap_probe.render.words import clean, plural
from overlap_probe.results import Verdict

SCHEMA = 1
"""Version of the JSON's layout."""

MOST_UNITS = 12
"""Units that the text lists; the JSON has all of them."""


def render(compared: Diff, verdict: Verdict | None = None, *, windows: bool = False, colour: bool = False) -> str:
    """The comparison as text; its last line is the verdict. ``windows`` adds the number of every window."""
    console = make_console(colour)
    head = ("scope", "metric", "rank", "base", "new", "change", "noise", "", *(("windows",) if windows else ()))
    rows = [_cells(change, windows) for change in worst_ranks(compared.changes)]
    print_table(console, head, rows, right={3, 4, 5, 6})
    counts = [len(side.windows) for change in compared.changes for side in (change.base, change.new)]
    most = f"up to {plural(max(counts), 'window')}" if counts else "no window"
    ranks = plural(len(compared.pairs), "rank")
    console.print(f"Medians over {most} of {ranks}; each row is of the rank that did worst.", style="dim")
    print_list(console, WIDTH, "Collectives whose exposed time changed most:", unit_lines(compared.units))
    print_list(console, WIDTH, "Made differently:", [clean(note) for note in compared.notes])
    print_list(console, WIDTH, "Why no comparison may pass:", [clean(problem) for problem in compared.problems])
    word = verdict.status.upper() if verdict else "NO VERDICT"
    console.print()
    style = STYLES[verdict.status] if verdict else "bold"
    console.print(Text.assemble((word, style), f"  {clean(headline(compared, verdict))}"))
    return text_of(console)


def worst_ranks(changes: Sequence[Change]) -> list[Change]:
    """Of each metric of each scope the rank with the least gain; a total over phases only where no phase is known."""
    chosen: dict[tuple[str, str], Change] = {}
    for change in changes:
        key = (change.scope, change.metric)
        if key not in chosen or change.gain < chosen[key].gain:
            chosen[key] = change
    phased = {scope.partition(".")[2] for scope, _ in chosen} - {""}
    return [change for (scope, _), change in chosen.items() if scope not in phased | {"communication"}]


def _cells(change: Change, windows: bool) -> tuple[str, ...]:
    sides = [amount(side.median, change.unit) for side in (change.base, change.new)]
    if change.beyond_noise is None:
        noise, mark = "-", "one window: noise unknown"
    else:
        noise = amount(change.noise, change.unit)
        mark = "within noise" if not change.beyond_noise else "better" if change.gain > 0 else "worse"
    if not change.value:
        mark = ""
    each = (f"{_each(change.base, change.unit)} -> {_each(change.new, change.unit)}",) if windows else ()
    return (
        change.scope,
        change.metric,
        change.rank,
        *sides,
        amount(change.value, change.unit, sign=True),
        noise,
        mark,
        *each,
    )


def _each(side: Spread, unit: str) -> str:
    return ", ".join(amount(value, unit) for value in side.windows.values())


def unit_lines(units: Sequence[UnitChange]) -> list[str]:
    """The units beyond the noise, the largest change first."""
    found = [unit for unit in units if unit.exposed.value and unit.exposed.beyond_noise is not False]
    found.sort(key=lambda unit: -abs(unit.exposed.value))
    lines = [f"{clean(unit.in_words())} ({named(unit.exposed.rank)})" for unit in found[:MOST_UNITS]]
    return [*lines, f"and {len(found) - MOST_UNITS} more"] if len(found) > MOST_UNITS else lines


def render_markdown(compared: Diff, verdict: Verdict | None = None) -> str:
    """The same text for a CI job's summary, in a fence that nothing in it can end."""
    text = render(compared, verdict)
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"### overlap_probe: what changed\n\n{fence}text\n{text}{fence}\n\n"


def render_json(compared: Diff, verdict: Verdict | None = None) -> str:
    """Every change on every rank: both sides' medians and windows, the change and the noise."""
    content = {
        "kind": "overlap_probe diff",
        "schema": SCHEMA,
        "notes": compared.notes,
        "problems": compared.problems,
        "changes": [_plain(change) for change in compared.changes],
        "units": [
            {**_plain(unit.exposed), "base_causes": unit.base_causes, "new_causes": unit.new_causes}
            for unit in compared.units
        ],
        "verdict": verdict and asdict(verdict),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _plain(change: Change) -> dict[str, Any]:
    sides = {
        name: {"median": side.median, "windows": dict(side.windows)}
        for name, side in (("base", change.base), ("new", change.new))
    }
    what = {"rank": change.rank, "scope": change.scope, "metric": change.metric, "unit": change.unit}
    return {**what, **sides, "change": change.value, "noise": change.noise, "beyond_noise": change.beyond_noise}
