"""Writes a rendered report: all of it, or nothing.

The idea: the text goes to a temporary name in the same folder and is renamed when it is complete, so a reader never
sees half a file, and a failure leaves what was there before. What is not a regular file (a pipe, a terminal) is written
directly.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from overlap_probe.errors import OverlapProbeError


def check_target(path: str | Path) -> None:
    """Raise OverlapProbeError where it can be told before there is anything to write: no file can have this name.

    No folder is made: one that is not there was mistyped more often than it was meant to be made.
    """
    if str(path) == "-":
        raise OverlapProbeError("-: expected the name of a file; /dev/stdout prints it")
    try:
        is_folder, has_folder = Path(path).is_dir(), Path(path).parent.is_dir()
    except (OSError, ValueError):  # writing it will say why
        return
    if is_folder or not has_folder:
        reason = "it is a folder" if is_folder else f"there is no folder {Path(path).parent}"
        raise OverlapProbeError(f"{path}: cannot be written: {reason}; choose another file or folder")


def write_text(path: str | Path, text: str) -> None:
    """Write the text as UTF-8, replacing the file at once; lone surrogates become escapes.

    Raises OverlapProbeError where the file cannot be written; then no file has changed.
    """
    check_target(path)
    data = text.encode("utf-8", errors="backslashreplace")
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(target)), data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OverlapProbeError(f"{path}: cannot be written: {reason}; choose another file or folder") from error


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{os.getpid()}.{target.name}"[:200] + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
