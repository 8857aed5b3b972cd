"""Finds the database in what Nsight Systems wrote: itself, in a gzip file, or in a report that ``nsys`` exports.

The idea: the format of a report (``.nsys-rep``) is not public and changes with each version, so only ``nsys`` itself
reads one; where it is not installed, the error is the command to run where it is.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from overlap_probe.errors import TraceError
from overlap_probe.readers.bytes_source import GZIP_MAGIC, SQLITE_MAGIC, first_bytes, read_pieces

_REPORTS = (".nsys-rep", ".qdrep")
_PIECE_BYTES = 1 << 20


def is_report(path: Path) -> bool:
    """Whether a file is a report of Nsight Systems: it is named so, and is not the database that one exports to."""
    return path.suffix in _REPORTS and path.is_file() and first_bytes(path) != SQLITE_MAGIC


def as_database(path: Path, folder: Path) -> Path:
    """The path of the database: ``path`` itself, or a file in ``folder`` to which it was exported or unpacked.

    Raises TraceError where it cannot be exported or unpacked.
    """
    if is_report(path):
        return export_nsys_rep(path, folder)
    if first_bytes(path) != SQLITE_MAGIC or _raw_beginning(path) != GZIP_MAGIC:
        return path
    unpacked = folder / "unpacked.sqlite"
    with unpacked.open("wb") as file:
        for piece in read_pieces(path, _PIECE_BYTES):
            file.write(piece)
    return unpacked


def export_nsys_rep(path: Path, folder: Path) -> Path:
    """Export a report into a folder and give the path of the database.

    Raises TraceError if ``nsys`` is not on the PATH (the message says how to export) or cannot export it.
    """
    by_hand = f"where Nsight Systems is installed run nsys export --type sqlite {path.name}, and give its .sqlite file"
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(path, "a report of Nsight Systems, and there is no nsys on the PATH to export it", by_hand)
    made = folder / f"{path.stem}.sqlite"
    command = [
        nsys,
        "export",
        "--type",
        "sqlite",
        "--force-overwrite",
        "true",
        "--output",
        str(made),
        str(path.resolve()),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        )
    except OSError as error:
        raise TraceError(path, f"nsys could not be started ({error.strerror})", by_hand) from error
    if done.returncode or not made.is_file():
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise TraceError(path, f"nsys export failed with exit code {done.returncode}: {said[-1]}", by_hand)
    return made


def _raw_beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC))
