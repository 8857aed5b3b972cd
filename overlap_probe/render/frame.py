"""One row a collective, for pandas and for spreadsheets.

The idea: the columns are the keys of a collective in the JSON, after the rank and window that it belongs to; both forms
are made of the same rows, and no integer becomes a float because another row lacks it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from overlap_probe.results import Analysis, Collective, RunAnalysis, Verdict

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("rank", "window", *(f.name for f in fields(Collective)))
"""``rank``, ``window``, then every field of a Collective in its order."""

_NULLABLE_INTEGERS = ("rank", "launch_ns", "queue_ns", "wait_ns", "transfer_ns", "starved_ns", "sm_samples")


def to_frame(analysis: Analysis) -> pd.DataFrame:
    """One row a collective of the step windows (of ``whole`` where there are none), columns COLUMNS, times in ns.

    Columns of integers that a row may lack are of pandas' nullable ``Int64``; texts that a row lacks are None.
    """
    import pandas as pd

    records = list(_records(analysis))
    columns: dict[str, Any] = {}
    for position, name in enumerate(COLUMNS):
        values = [record[position] for record in records]
        if name in _NULLABLE_INTEGERS:
            dtype = "Int64"
        elif name.endswith("_ns") or name in ("pass_index", "index"):
            dtype = "int64"
        elif name.endswith("_percent"):
            dtype = "float64"
        else:
            dtype = "bool" if name == "overlapped" else "object"
        columns[name] = pd.Series(values, dtype=dtype)
    return pd.DataFrame(columns, columns=list(COLUMNS))


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """The same rows of every rank as CSV with a header; an absent value is empty, streams are joined by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for analysis in run.ranks:
        writer.writerows(
            [" ".join(map(str, value)) if isinstance(value, tuple) else value for value in record]
            for record in _records(analysis)
        )
    return text.getvalue()


def _records(analysis: Analysis) -> Iterable[tuple[Any, ...]]:
    for window in analysis.steps.values():
        for collective in window.collectives:
            yield (analysis.rank, window.name, *(getattr(collective, name) for name in COLUMNS[2:]))
