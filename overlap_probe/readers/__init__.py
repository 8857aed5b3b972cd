"""Reads any trace that the package knows: ``read_trace`` and ``read_traces``.

The idea: the content says what a file is, never its name. A reader for one format is only imported when it is needed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from overlap_probe.errors import TraceError
from overlap_probe.readers.bytes_source import SQLITE_MAGIC, first_bytes
from overlap_probe.readers.nsys_export import is_report
from overlap_probe.tables import Trace

__all__ = ["read_trace", "read_traces"]


def read_trace(path: str | os.PathLike[str], *, rank: int | None = None) -> Trace:
    """The one trace of a file, with its own rank, or with ``rank`` if that is given.

    Raises TraceError if the file cannot be read, or holds several processes or devices.
    """
    traces = read_traces(path)
    if len(traces) != 1:
        raise TraceError(path, f"there are {len(traces)} processes or devices in it", "use read_traces")
    return traces[0] if rank is None else replace(traces[0], rank=rank)


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """The traces of a file, one for each process and device (at least one). Raises TraceError."""
    file = Path(path)
    if first_bytes(file, len(SQLITE_MAGIC)) == SQLITE_MAGIC or is_report(file):
        from overlap_probe.readers.nsys import read_nsys

        return read_nsys(file)
    from overlap_probe.readers.kineto import read_kineto

    return read_kineto(file)
