"""`overlap_probe assert`: checks become an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import overlap_probe as op
from overlap_probe.commands.common import (
    EXIT_CODES,
    Checks,
    append_summary,
    check_options,
    load,
    output_options,
    paths_argument,
    rank_option,
    reading_options,
    show,
    summary_option,
    write_outputs,
)
from overlap_probe.commands.files import FilesCommand
from overlap_probe.render import render


@click.command("assert", cls=FilesCommand)
@paths_argument
@check_options
@reading_options
@rank_option
@output_options
@summary_option
def assert_(
    json_file: Path | None, junit: Path | None, report: Path | None, github_summary: Path | None, **options: Any
) -> int:
    """Hold traces against checks: the exit code is the verdict.

    0 pass; 1 a check failed; 2 bad usage or an unreadable trace; 3 the trace cannot answer. Every rank and window must
    hold.
    """
    asked = Checks.take(options)
    if not asked.checks:
        raise click.UsageError("no check was given; try --overlaps auto")
    run, _ = load(**options)
    verdict = op.evaluate(run, asked.checks, at_least=asked.at_least)
    write_outputs(run, verdict, json_file, junit, report)
    append_summary(github_summary, render(run, verdict, "md"))
    show(run, verdict)
    return EXIT_CODES[verdict.status]
