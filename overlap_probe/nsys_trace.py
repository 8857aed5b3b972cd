"""Makes a rank's trace of the report that Nsight Systems left: exported, checked, and without what identifies people.

The idea: a report without its ranges looks like any other, and its analysis would only be inconclusive. So here, where
it is known who emitted them and which ``nsys`` was to see them, it is an error that says what to do.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

from overlap_probe.errors import LaunchError
from overlap_probe.job import Job
from overlap_probe.nsys_command import ENDING, export, last_words, nsys_version
from overlap_probe.progress import PROGRESS
from overlap_probe.readers.nsys_nvtx import Names, read_ranges
from overlap_probe.readers.nsys_schema import Database
from overlap_probe.scrub import scrub

REPORT = "recording"
"""Name of the report, without its ending."""

LOST = (
    "nvtx 0.2.12 to 0.2.17 lose all ranges under Nsight Systems 2024.2, and say nothing: try pip install nvtx==0.2.11, "
    "or a newer Nsight Systems"
)


def keep(
    job: Job, rank: int, scratch: Path, recorded: dict[str, Any], environment: dict[str, str], limit_s: float
) -> None:
    """Make the rank's trace, whole or not at all, of the report that is in ``scratch``.

    ``recorded`` is what the rank said of it (`NsysRecording.write`). Raises LaunchError if there is no report, it
    cannot be exported within ``limit_s`` or ranges are missing, and TraceError if the database cannot be read.
    """
    report, database = scratch / f"{REPORT}.nsys-rep", scratch / f"{REPORT}{ENDING}"
    whose = f"of {recorded['nvtx']}, under Nsight Systems {nsys_version()}"
    if not report.is_file():
        said = last_words((job.logs / f"rank{rank}.nsys.log").read_bytes())
        raise LaunchError(f"nsys recorded nothing: no range {whose}, arrived; {LOST} (nsys said: {said})")
    PROGRESS.report("state", "exporting what nsys recorded")
    export(report, database, environment, limit_s)
    _check_ranges(database, whose, builtin=job.options.builtin)
    if recorded["unfinished"] is not None:
        rename_range(database, recorded["unfinished"], "unfinished step")
    PROGRESS.report("wrote", scrub(database, job.folder / f"rank{rank}{ENDING}").name)


def _check_ranges(database: Path, whose: str, *, builtin: bool) -> None:
    """Raise LaunchError unless the database has the steps and, of the built-in workload, the labels of its units."""
    names = Names()
    with Database(database) as opened:
        read_ranges(opened, names)
    wanted = {"the steps": r"ProfilerStep#\d+"} | ({"the units": "fsdp_runtime::.*"} if builtin else {})
    for what, pattern in wanted.items():
        if not any(re.fullmatch(pattern, name) for name in names):
            raise LaunchError(f"the ranges of {what}, {whose}, did not arrive; {LOST}")


def rename_range(database: Path, name: str, new: str) -> None:
    """Give a range another name: it is in its row, or once for all rows in the table of strings."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = ? WHERE text = ?", (new, name))
        connection.execute("UPDATE StringIds SET value = ? WHERE value = ?", (new, name))
        connection.commit()
