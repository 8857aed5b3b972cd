"""Copies a database of Nsight Systems without what identifies people and machines: the tables' half of ``scrub``.

The idea: the copy is a new database with those columns that the reader selects, those rows that it wants, and those
strings that these refer to; so the reader cannot tell the copy from the original, and nobody else finds more in it.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from overlap_probe.errors import TraceError
from overlap_probe.readers.nsys_export import as_database
from overlap_probe.readers.nsys_nvtx import PUSH_POP, START_END
from overlap_probe.readers.nsys_quality import is_about_loss
from overlap_probe.readers.nsys_schema import COLUMNS, DIAGNOSTICS, NVTX, STRINGS, Database

_ROWS = {
    NVTX: f"eventType IN ({PUSH_POP}, {START_END})",
    DIAGNOSTICS: "about_loss(CAST(text AS BLOB))",
}
"""Which rows of a table the reader wants, if not all."""

_REFERENCES = ("demangledName", "shortName", "nameId", "textId")
"""Columns that hold ids of StringIds."""

_TYPES = frozenset({"INTEGER", "REAL", "TEXT"})


def scrub_nsys(path: Path, out: Path, without_paths: Callable[[str], str]) -> None:
    """Write the copy to ``out``, a new file. Raises TraceError if the original cannot be read."""
    with tempfile.TemporaryDirectory(prefix="overlap_probe_") as folder:
        try:
            source = as_database(path, Path(folder))
            with Database(source), closing(sqlite3.connect(out.resolve().as_uri(), uri=True)) as copy:
                copy.create_function("without_paths", 1, lambda text: without_paths(_decoded(text)))
                copy.create_function("about_loss", 1, lambda text: is_about_loss(_decoded(text)))
                copy.execute("ATTACH ? AS source", (f"{source.resolve().as_uri()}?mode=ro&immutable=1",))
                _copy_tables(copy)
                copy.commit()
        except sqlite3.Error as error:
            raise TraceError(
                path, f"a damaged database of Nsight Systems (nsys): {error}", "export it again"
            ) from error
        except TraceError as error:
            raise TraceError(path, error.problem, error.hint) from error


def _copy_tables(copy: sqlite3.Connection) -> None:
    present = {name for (name,) in copy.execute("SELECT name FROM source.sqlite_master WHERE type = 'table'")}
    used_strings = []
    for table in sorted(present & set(COLUMNS) - {STRINGS}):
        columns = _copy_table(copy, table, _ROWS.get(table, "TRUE"))
        used_strings += [f"SELECT {column} FROM main.{table}" for column in columns if column in _REFERENCES]
    if STRINGS in present:
        _copy_table(copy, STRINGS, f"id IN ({' UNION '.join(used_strings) or 'NULL'})")


def _copy_table(copy: sqlite3.Connection, table: str, condition: str) -> list[str]:
    """Copy the columns that the reader wants, of the rows that fulfil a condition; gives the names of the columns."""
    columns = copy.execute("SELECT name, type, pk FROM pragma_table_info(?, 'source')", (table,)).fetchall()
    columns = [(name, kind if kind in _TYPES else "", key) for name, kind, key in columns if name in COLUMNS[table]]
    if not columns:
        return []
    declared = (f'"{name}" {kind}{" PRIMARY KEY" if key else ""}' for name, kind, key in columns)
    copy.execute(f"CREATE TABLE main.{table} ({', '.join(declared)})")
    # As bytes, because a text that is not UTF-8 would stop the function.
    values = (
        f'CASE typeof("{name}") WHEN \'text\' THEN without_paths(CAST("{name}" AS BLOB)) ELSE "{name}" END'
        for name, _, _ in columns
    )
    copy.execute(f"INSERT INTO main.{table} SELECT {', '.join(values)} FROM source.{table} WHERE {condition}")
    return [name for name, _, _ in columns]


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
