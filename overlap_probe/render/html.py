"""Shows a run as one self-contained page.

The idea: `page.page` makes everything that is shown as plain data, and the template only lays it out; every text goes
through one escape, and the inline script is fed by one JSON payload. The page loads nothing.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from overlap_probe.render import summary
from overlap_probe.render.page import listed_collectives, page
from overlap_probe.render.words import clean, typeset
from overlap_probe.results import RunAnalysis, Verdict

COLUMNS = (
    *("rank", "window", "unit", "op", "phase", "mechanism"),
    *("start", "queue", "time", "hidden", "exposed", "stalled", "wait", "cause"),
)
"""Columns of the table of collectives, as the payload names them."""

FILTERS = ("rank", "window", "op", "phase", "cause")
"""Those of them that the page offers a choice of."""


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """The page as HTML text."""
    environment = Environment(
        loader=PackageLoader("overlap_probe.render", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template("report.html.j2").render(page(run, verdict), payload=Markup(_payload(run)))


def _printable(value: Any) -> Any:
    """Every text that the template prints is on one line, encodable and typeset; what is markup already stays."""
    return typeset(clean(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def _payload(run: RunAnalysis) -> str:
    """JSON for the script: by row, what its columns sort and filter by. Cannot end the element that it stands in."""
    rows = [_keys(entry) for entry in listed_collectives(run)]
    data = {"columns": COLUMNS, "filters": FILTERS, "rows": rows}
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _keys(entry: summary.Entry) -> list[str | int | float | None]:
    c = entry.collective
    hidden = c.hidden_ns / c.time_ns if c.time_ns else None
    texts = (entry.rank, entry.window, c.unit or "", c.op, c.phase, c.mechanism)
    times = (entry.since_ns, c.queue_ns, c.time_ns, hidden, c.exposed_ns, c.stalled_ns, c.wait_ns)
    return [*texts, *times, c.cause or ""]
