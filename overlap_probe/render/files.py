"""Writes a rendered report: all of it, or nothing.

The idea: whatever goes wrong with an output, and as early as it can be told, is one error that names the file; that a
reader never sees half of one is `whole_file`'s.
"""

from __future__ import annotations

from pathlib import Path

from overlap_probe.errors import OverlapProbeError
from overlap_probe.whole_file import whole_file


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
    try:
        with whole_file(path) as unfinished:
            unfinished.write_bytes(data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OverlapProbeError(f"{path}: cannot be written: {reason}; choose another file or folder") from error
