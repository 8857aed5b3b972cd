"""Removes from a timeline what identifies people and machines, so that it can be shared.

The idea: keep what the readers read and nothing else. A list of what to remove would have to know every table, column
and key that any version of a profiler ever writes; the list of what the readers want exists (``nsys_schema.COLUMNS``,
``kineto_events.Args``). So environment, command lines, process and host names, and whatever the next version adds are
gone by construction, and the analysis is the same. The file is written anew, so that no freed page keeps anything.
In the texts that stay, the names of kernels, calls and ranges, every path becomes a number.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from overlap_probe.errors import TraceError
from overlap_probe.readers.bytes_source import SQLITE_MAGIC, first_bytes
from overlap_probe.readers.nsys_export import is_report
from overlap_probe.scrub_kineto import scrub_kineto
from overlap_probe.scrub_nsys import scrub_nsys
from overlap_probe.whole_file import whole_file

_PATH = re.compile(r"""(?<![\w.<])(?:[A-Za-z]:[\\/]|\\\\|~/|/(?=[^\s/]+/))[^\s"'`<>|,;()\[\]{}]+""")
"""An absolute path of at least two parts."""


def scrub(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a copy of a timeline without anything that identifies people or machines; gives the path of the copy.

    ``path`` is a trace of torch.profiler, plain or gzip, or what Nsight Systems exported. The copy is of the same kind;
    a trace named ``*.gz`` is compressed. Raises TraceError if the timeline cannot be read, or would be overwritten.
    """
    path, out = Path(path), Path(out)
    if out.exists() and path.exists() and out.samefile(path):
        raise TraceError(path, "the copy without identifying data would replace it", "give another name for the copy")
    is_database = first_bytes(path, len(SQLITE_MAGIC)) == SQLITE_MAGIC or is_report(path)
    without_paths = _NumberedPaths()
    try:
        with whole_file(out) as unfinished:
            if is_database:
                scrub_nsys(path, unfinished, without_paths)
            else:
                scrub_kineto(path, unfinished, without_paths, packed=out.suffix == ".gz")
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise TraceError(out, problem, "give a name in a folder that exists") from error
    return out


class _NumberedPaths:
    """Replaces each path in a text by a number: the same by the same, so that different labels stay different."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return _PATH.sub(lambda path: f"<path {self._numbers.setdefault(path[0], len(self._numbers) + 1)}>", text)
