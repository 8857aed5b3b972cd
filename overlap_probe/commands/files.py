"""The files of a command line: those that are read, those that are written, and that these are not the same.

The idea: the type of a parameter says what becomes of its file, so one check serves every command. What cannot be read
or written as asked is refused before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import overlap_probe as op
from overlap_probe.ranks import RESULT, trace_files
from overlap_probe.render import check_target, format_of

STEP_SUMMARY = "$GITHUB_STEP_SUMMARY"
"""Stands for the file that GitHub names in this variable."""


class InputFile(click.Path):
    """A file or folder to read. An empty text, which a path would take for the current folder, is refused."""

    def __init__(self, *, result_first: bool = False) -> None:
        super().__init__(path_type=Path)
        self.result_first = result_first
        """A folder stands for the result in it, if there is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty; name a file or a folder, and see whether a variable is not set", param, ctx)
        return super().convert(value, param, ctx)

    def files(self, path: Path) -> list[Path]:
        """The files that may be read for a path."""
        try:
            files = trace_files(path)
        except op.TraceError:  # reading it will say so
            files = []
        return [*files, path / RESULT] if self.result_first and path.is_dir() else files


class OutputFile(click.Path):
    """A file to write. What cannot be written is refused before any trace is read."""

    def __init__(self, *, by_extension: bool = False) -> None:
        super().__init__(path_type=Path)
        self.by_extension = by_extension
        """The file's extension chooses its format, and has to be a known one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        check_target(path)
        if self.by_extension:
            format_of(path)
        return path


class SummaryFile(OutputFile):
    """The file that `summary_option` asks for: that of the job's step, where it is not named."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == STEP_SUMMARY and not (value := os.environ.get(STEP_SUMMARY[1:])):
            self.fail(f"{STEP_SUMMARY} is not set: this is no step of a GitHub job; give a FILE", param, ctx)
        return super().convert(value, param, ctx)


INPUT, RUN = InputFile(), InputFile(result_first=True)
OUTPUT, REPORT = OutputFile(), OutputFile(by_extension=True)
SUMMARY = SummaryFile()


class FilesCommand(click.Command):
    """A command that reads files and writes others: an output that is one of its inputs is refused.

    Only a regular file can be overwritten, whatever it is called: a pipe or a terminal can be both.
    """

    def invoke(self, ctx: click.Context) -> Any:
        given = [(param.type, path) for param in self.params for path in _paths(ctx.params.get(param.name or ""))]
        written = [path for kind, path in given if isinstance(kind, OutputFile) and path.is_file()]
        # To know what a folder stands for, its files are opened: only where there is something to overwrite.
        inputs = [(kind, path) for kind, path in given if isinstance(kind, InputFile)] if written else []
        read = [file for kind, path in inputs for file in kind.files(path)]
        for path in written:
            if any(file.is_file() and path.samefile(file) for file in read):
                raise op.OverlapProbeError(f"{path}: is what is read, and would be overwritten; write to another file")
        return super().invoke(ctx)


def _paths(value: object) -> Iterator[Path]:
    """The paths that a parameter's value is or holds."""
    yield from (path for path in (value if isinstance(value, tuple) else [value]) if isinstance(path, Path))
