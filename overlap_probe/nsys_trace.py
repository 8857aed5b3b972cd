"""Makes a rank's trace of the report that Nsight Systems left: exported, checked, and without what identifies people.

The idea: a report without its ranges looks like any other, and its analysis would only be inconclusive. So here, where
it is known who emitted them and which ``nsys`` was to see them, it is an error that says what to do. A cause is named
only where it is known: an import that failed has lost no range, and is tried once more.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

from overlap_probe.errors import LaunchError, TraceError
from overlap_probe.job import Job
from overlap_probe.nsys_command import ENDING, export, import_stream, last_words, nsys_version
from overlap_probe.progress import PROGRESS
from overlap_probe.readers.nsys_nvtx import Names, read_ranges
from overlap_probe.readers.nsys_schema import Database, damage_is_an_error
from overlap_probe.scrub import scrub

REPORT = "recording"
"""Name of the report, without its ending."""

LOSING = re.compile(r"the package nvtx 0\.2\.1[2-7]\b")
LOST = (
    "nvtx 0.2.12 to 0.2.17 lose all ranges under Nsight Systems 2024.2, and say nothing: try pip install nvtx==0.2.11, "
    "or a newer Nsight Systems"
)
BEGAN = "Capture range started"
"""``nsys profile`` says so when the range that begins the recording has arrived."""


def keep(
    job: Job, rank: int, scratch: Path, recorded: dict[str, Any], environment: dict[str, str], limit_s: float
) -> None:
    """Make the rank's trace, whole or not at all, of the report that is in ``scratch``.

    ``recorded`` is what the rank said of it (`NsysRecording.write`). Raises LaunchError if there is no report, it
    cannot be exported within ``limit_s``, the export cannot be read or ranges are missing, and TraceError if the trace
    cannot be written.
    """
    report, database = scratch / f"{REPORT}.nsys-rep", scratch / f"{REPORT}{ENDING}"
    nsys = f"Nsight Systems {nsys_version()}"
    whose = f"of {recorded['nvtx']}, under {nsys}"
    log = (job.logs / f"rank{rank}.nsys.log").read_bytes()
    said = last_words(log)
    if not report.is_file():
        stream = next(scratch.glob("*.qdstrm"), None)
        if stream is None:
            lost = f"no report, {whose}" if BEGAN.encode() in log else f"no range {whose}, arrived{_advice(whose)}"
            raise LaunchError(f"nsys recorded nothing: {lost} (nsys said: {said})")
        PROGRESS.report("state", "importing again what nsys recorded")
        try:
            import_stream(stream, report, environment, limit_s)
        except LaunchError as error:
            failed = f"{nsys} could not import what it had recorded; run again"
            raise LaunchError(f"{failed} (nsys said: {said}; then {error})") from error
    PROGRESS.report("state", "exporting what nsys recorded")
    export(report, database, environment, limit_s)
    try:
        _check_ranges(database, whose, said, builtin=job.options.builtin)
        if recorded["unfinished"] is not None:
            rename_range(database, recorded["unfinished"], "unfinished step")
        trace = scrub(database, job.folder / f"rank{rank}{ENDING}")
    except TraceError as error:
        if error.path != str(database):
            raise
        raise LaunchError(
            f"what nsys export wrote of rank {rank} cannot be read ({nsys}): {error.problem}; run again, and if it "
            "stays so, try another version of Nsight Systems"
        ) from error
    PROGRESS.report("wrote", trace.name)


def _check_ranges(database: Path, whose: str, said: str, *, builtin: bool) -> None:
    """Raise LaunchError unless the database has the steps and, of the built-in workload, the labels of its units."""
    names = Names()
    with Database(database) as opened:
        read_ranges(opened, names)
    wanted = {"the steps": r"ProfilerStep#\d+"} | ({"the units": "fsdp_runtime::.*"} if builtin else {})
    for what, pattern in wanted.items():
        if not any(re.fullmatch(pattern, name) for name in names):
            raise LaunchError(f"the ranges of {what}, {whose}, did not arrive{_advice(whose)} (nsys said: {said})")


def _advice(whose: str) -> str:
    """What helps where ranges are lost by a package that is known to lose them."""
    return f"; {LOST}" if LOSING.search(whose) else ""


def rename_range(database: Path, name: str, new: str) -> None:
    """Give a range another name: it is in its row, or once for all rows in the table of strings.

    Raises TraceError if the database is damaged.
    """
    with damage_is_an_error(database), contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE NVTX_EVENTS SET text = ? WHERE text = ?", (new, name))
        connection.execute("UPDATE StringIds SET value = ? WHERE value = ?", (new, name))
        connection.commit()
