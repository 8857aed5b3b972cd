"""`overlap_probe report`: one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import overlap_probe as op
from overlap_probe.commands.common import load, paths_argument, rank_option, reading_options
from overlap_probe.commands.files import REPORT, FilesCommand


@click.command(cls=FilesCommand)
@paths_argument
@reading_options
@rank_option
@click.option(
    "-o",
    "--output",
    type=REPORT,
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The extension chooses the format: .html, .md, .txt, .csv, .svg, .json or .xml.",
)
def report(output: Path, **about: Any) -> int:
    """One self-contained page of traces or a saved result."""
    run, verdict = load(**about)
    op.write_report(run, output, verdict)
    click.echo(f"wrote {output}")
    return 0
