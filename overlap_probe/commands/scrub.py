"""`overlap_probe scrub`: a trace without what it says of its machine."""

from __future__ import annotations

from pathlib import Path

import click

from overlap_probe.commands.common import FILE
from overlap_probe.scrub import scrub as scrub_file


@click.command()
@click.argument("trace", type=FILE)
@click.option("-o", "--output", type=FILE, required=True, metavar="FILE", help="Where the scrubbed trace goes.")
def scrub(trace: Path, output: Path) -> int:
    """Copy TRACE without environment, process list, host name and paths, before it is shared.

    What the analysis reads is kept, so its numbers stay the same. Labels of your own are kept as they are.
    """
    if str(output) == "-":
        raise click.UsageError("-o -: expected the name of a file")
    click.echo(f"wrote {scrub_file(trace, output)}")
    return 0
