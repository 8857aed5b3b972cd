"""`overlap_probe analyze`: numbers for traces that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from overlap_probe.commands.common import (
    load,
    output_options,
    paths_argument,
    rank_option,
    reading_options,
    show,
    write_outputs,
)
from overlap_probe.commands.files import FilesCommand


@click.command(cls=FilesCommand)
@paths_argument
@reading_options
@rank_option
@output_options
@click.option("--collectives", is_flag=True, help="Also list every collective.")
def analyze(json_file: Path | None, junit: Path | None, report: Path | None, collectives: bool, **about: Any) -> int:
    """Numbers for traces that exist.

    PATHS are traces, or folders with one trace a rank: torch.profiler (JSON, gzipped or not), Nsight Systems (SQLite),
    or a result that --json wrote.
    """
    run, verdict = load(**about)
    write_outputs(run, verdict, json_file, junit, report)
    if collectives:
        from overlap_probe.render import text

        click.echo(text.render_collectives(run, colour=sys.stdout.isatty()))
    show(run, verdict)
    return 0
