"""Shows a run: one pure function a format, and one function that writes.

The idea: a renderer turns plain records into a text and touches no file; the output's extension chooses the renderer. A
library that only one format needs is imported when that format is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from overlap_probe.errors import OverlapProbeError
from overlap_probe.render.document import from_dict, is_result, read_result, to_dict
from overlap_probe.render.files import check_target, write_text
from overlap_probe.results import RunAnalysis, Verdict

__all__ = [
    "FORMATS",
    "check_target",
    "format_of",
    "from_dict",
    "is_result",
    "read_result",
    "render",
    "to_dict",
    "write_report",
    "write_text",
]

FORMATS: dict[str, str] = {
    "json": "overlap_probe.render.document",
    "html": "overlap_probe.render.html",
    "xml": "overlap_probe.render.junit",
    "md": "overlap_probe.render.markdown",
    "txt": "overlap_probe.render.text",
    "csv": "overlap_probe.render.frame",
    "svg": "overlap_probe.render.picture",
}
"""Module of each format, by the extension of its files; its ``render(run, verdict) -> str`` makes the text."""


def render(run: RunAnalysis, verdict: Verdict | None = None, format: str = "txt") -> str:
    """The run and its verdict in one of FORMATS. Raises OverlapProbeError for another format."""
    if format not in FORMATS:
        raise OverlapProbeError(f"format {format!r}: not known; choose one of {', '.join(FORMATS)}")
    renderer: Callable[[RunAnalysis, Verdict | None], str] = import_module(FORMATS[format]).render
    return renderer(run, verdict)


def format_of(path: str | Path) -> str:
    """The format that a file's extension asks for. Raises OverlapProbeError for another extension."""
    extension = Path(path).suffix[1:].lower()
    if extension not in FORMATS:
        known = ", ".join(f".{e}" for e in FORMATS)
        raise OverlapProbeError(f"{path}: no format has this extension; choose one of {known}")
    return extension


def write_report(run: RunAnalysis, path: str | Path, verdict: Verdict | None = None) -> None:
    """Write the run in the format that the path's extension asks for, whole or not at all (design, section 7).

    Raises OverlapProbeError for an unknown extension and where the file cannot be written.
    """
    write_text(path, render(run, verdict, format_of(path)))
