"""Opens a database that Nsight Systems exported and hands out its columns as numpy arrays.

The idea: versions of Nsight Systems add and drop tables and columns, and a table without rows is not written at all. So
the columns that this package wants are one literal table, ``COLUMNS``; whatever the file lacks reads as NULL, and NULL
reads as ``NO_TIME`` (times), -1 (other numbers) or None (texts). Nothing after this module asks what a file contains.
Source of the names: the schema that ``nsys export --type sqlite`` documents (versions 3.0 to 3.25).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from overlap_probe.errors import TraceError
from overlap_probe.tables import I64, NO_TIME

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
STRINGS = "StringIds"
DIAGNOSTICS = "DIAGNOSTIC_EVENT"
GPUS = "TARGET_INFO_GPU"
CUDA_DEVICES = "TARGET_INFO_CUDA_DEVICE"
METRICS = "GPU_METRICS"
METRIC_NAMES = "TARGET_INFO_GPU_METRICS"

DEVICE_ROW = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
COLUMNS: dict[str, tuple[str, ...]] = {
    KERNELS: (
        *DEVICE_ROW,
        *("demangledName", "shortName", "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
        *("staticSharedMemory", "dynamicSharedMemory"),
    ),
    COPIES: (*DEVICE_ROW, "bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"),
    MEMSETS: (*DEVICE_ROW, "bytes", "memKind"),
    GRAPHS: ("start", "end", "deviceId", "globalPid"),
    CALLS: ("start", "end", "globalTid", "correlationId", "nameId", "returnValue"),
    NVTX: ("start", "end", "eventType", "globalTid", "textId", "text"),
    STRINGS: ("id", "value"),
    DIAGNOSTICS: ("severity", "globalPid", "text"),
    GPUS: ("id", "name", "smCount", "maxRegistersPerSm", "maxShmemPerSm", "maxWarpsPerSm", "threadsPerWarp"),
    CUDA_DEVICES: ("gpuId", "cudaId", "pid"),
    METRICS: ("timestamp", "typeId", "metricId", "value"),
    METRIC_NAMES: ("typeId", "metricId", "metricName"),
}
"""Everything that is wanted of a database; ``scrub`` keeps exactly this."""

Expression: TypeAlias = "sa.ColumnElement[Any]"
Columns: TypeAlias = Callable[[str], Expression]
Where: TypeAlias = Callable[[Columns], Expression]


def every_row(column: Columns) -> Expression:
    """The condition that all rows fulfil."""
    return sa.true()


def with_one_of(**values: Iterable[int]) -> Where:
    """The condition that each of some columns has one of these values."""
    return lambda column: sa.and_(*(column(name).in_([int(v) for v in some]) for name, some in values.items()))


_TIMES = frozenset({"start", "end", "timestamp"})
_MAGIC = b"SQLite format 3\0"
_ROWS_AT_ONCE = 10_000
_VARIABLES_AT_ONCE = 500
_EXPORT_AGAIN = "give what this writes: nsys export --type sqlite REPORT.nsys-rep"


class Database:
    """A database of Nsight Systems, opened read-only; a context manager.

    No file is written beside it (``immutable``). Raises TraceError if the file is no database, cut off, or of another
    program, and while reading if it turns out to be damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_file(path)
        with ExitStack() as opened, damage_is_an_error(path):
            engine = sa.create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
            self._connection = opened.enter_context(engine.connect())
            inspector = sa.inspect(self._connection)
            present = set(inspector.get_table_names()) & set(COLUMNS)
            self._columns = {t: {str(c["name"]) for c in inspector.get_columns(t)} for t in present}
            if not present:
                raise TraceError(path, "a database, but not one that Nsight Systems (nsys) exported", _EXPORT_AGAIN)
            opened.pop_all()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        # Names come from anywhere: a text that is not UTF-8 must not stop the reader.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        return connection

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def numbers(
        self, table: str, *columns: str, where: Where = every_row, **computed: Callable[[Columns], Expression]
    ) -> dict[str, I64]:
        """Columns of a table that hold numbers, and what is computed from such columns: int64 arrays of equal length.

        Args:
            where: makes of the columns the condition that a row must fulfil.
            computed: by the name of the result, what SQL computes of the columns; as ever in SQL, it is NULL where a
                part of it is.
        """
        names = [*columns, *computed]
        column = self._column_of(table)
        wanted = [*(column(c) for c in columns), *(compute(column) for compute in computed.values())]
        with damage_is_an_error(self.path):
            # One stream of integers, from batches of rows that are gone before the next one comes.
            known = [_known(name, value) for name, value in zip(names, wanted, strict=True)]
            rows = chain.from_iterable(self._select(table, known, where(column)))
            flat = np.fromiter(chain.from_iterable(rows), np.int64)
        by_column = flat.reshape(-1, len(names)).T.copy()
        return dict(zip(names, by_column, strict=True))

    def batches(
        self, table: str, columns: Sequence[str], where: Where = every_row, *computed: Callable[[Columns], Expression]
    ) -> Iterator[Sequence[tuple[Any, ...]]]:
        """Rows of a table, many at once: numbers, and texts or None; then what SQL computes of the columns."""
        column = self._column_of(table)
        wanted = [column(c) if _is_text(table, c) else _known(c, column(c)) for c in columns]
        yield from self._select(table, [*wanted, *(compute(column) for compute in computed)], where(column))

    def rows(self, table: str, where: Where = every_row) -> list[list[Any]]:
        """Rows of a small table, with its columns in ``COLUMNS``."""
        kinds = [_text_or_none if _is_text(table, c) else int for c in COLUMNS[table]]
        with damage_is_an_error(self.path):
            rows = chain.from_iterable(self.batches(table, COLUMNS[table], where))
            return [[kind(value) for kind, value in zip(kinds, row, strict=True)] for row in rows]

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts of ids of StringIds; ids that the file does not have are left out."""
        wanted, found = sorted(set(ids)), dict[int, str]()
        for first in range(0, len(wanted), _VARIABLES_AT_ONCE):
            some = wanted[first : first + _VARIABLES_AT_ONCE]
            found.update({number: text or "" for number, text in self.rows(STRINGS, with_one_of(id=some))})
        return found

    def _column_of(self, table: str) -> Columns:
        """A function that gives a column of a table by its name, and NULL for one that the file does not have."""
        present = self._columns.get(table, set())
        return lambda name: sa.column(name, sa.Integer) if name in present else sa.literal_column("NULL", sa.Integer)

    def _select(
        self, table: str, wanted: Sequence[Expression], condition: Expression
    ) -> Iterator[Sequence[tuple[Any, ...]]]:
        if not self._columns.get(table):
            return
        query = sa.select(*wanted).select_from(sa.table(table)).where(condition)
        with damage_is_an_error(self.path):
            # The driver's plain tuples: a SQLAlchemy row costs several times what its numbers do.
            cursor = self._connection.execute(query).cursor
            assert cursor is not None
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield rows


def _check_file(path: Path) -> None:
    """Raise TraceError unless the file is a whole SQLite database. Source: the SQLite file format, section 1.3."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
        size = path.stat().st_size
        journal = path.with_name(path.name + "-wal")
        unfinished = journal.exists() and journal.stat().st_size > 0
    except OSError as error:
        raise TraceError(path, f"cannot be read ({error.strerror})", "check the path") from error
    if not header.startswith(_MAGIC):
        raise TraceError(path, "not a SQLite database, so no export of Nsight Systems (nsys)", _EXPORT_AGAIN)
    page_bytes, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    pages_are_valid = header[24:28] == header[92:96]
    if len(header) < 100 or (pages_are_valid and size < pages * page_bytes):
        raise TraceError(
            path,
            f"a database of Nsight Systems (nsys) that is cut off: {size} bytes of {pages * page_bytes}",
            _EXPORT_AGAIN,
        )
    if unfinished:
        raise TraceError(
            path, f"an unfinished write lies beside it ({journal.name})", "close the program that writes it"
        )


@contextmanager
def damage_is_an_error(path: Path) -> Iterator[None]:
    """Raise TraceError where the file's pages, or a value in one of its columns, are not what they should be."""
    try:
        yield
    except (DBAPIError, sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        reason = str(getattr(error, "orig", error))
        raise TraceError(path, f"a damaged database of Nsight Systems (nsys): {reason}", _EXPORT_AGAIN) from error


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_text(table: str, column: str) -> bool:
    return column in ("text", "name", "metricName") or (table == STRINGS and column == "value")


def _known(name: str, value: Expression) -> Expression:
    """The value, and what stands for NULL in a column of this name."""
    return sa.func.coalesce(value, sa.literal(NO_TIME if name in _TIMES else -1))
