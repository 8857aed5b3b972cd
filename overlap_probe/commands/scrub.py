"""`overlap_probe scrub`: a trace without what it says of its machine."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_probe.commands.files import INPUT, OUTPUT, FilesCommand
from overlap_probe.scrub import scrub as scrub_file


@click.command(cls=FilesCommand)
@click.argument("trace", type=INPUT)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="Where the scrubbed trace goes.")
def scrub(trace: Path, output: Path) -> int:
    """Copy a trace without what tells of its machine, to share it.

    Environment, process list, host name and paths are left out. What the analysis reads is kept, so its numbers stay
    the same. Labels of your own are kept as they are.
    """
    click.echo(f"wrote {scrub_file(trace, output)}")
    return 0
