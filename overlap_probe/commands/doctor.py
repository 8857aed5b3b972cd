"""`overlap_probe doctor`: what this machine can do for overlaps."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from overlap_probe.commands.files import OUTPUT
from overlap_probe.doctor import EXIT_CODES, diagnose, worst
from overlap_probe.machine import examine
from overlap_probe.render import write_text

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


@click.command()
@click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the diagnoses as JSON.")
def doctor(json_file: Path | None) -> int:
    """What this machine can measure, and how to mend what it cannot.

    The exit code is that of the worst line: 0 for ok and note, 3 for a warning (something cannot be measured, or would
    not be what it seems), 1 for an error (run and capture cannot work).
    """
    diagnoses = diagnose(examine())
    status = worst(diagnoses)
    if json_file is not None:
        content = {"kind": "overlap_probe doctor", "status": status, "diagnoses": [asdict(d) for d in diagnoses]}
        write_text(json_file, json.dumps(content, indent=1) + "\n")
    width = max(len(d.topic) for d in diagnoses)
    for d in diagnoses:
        mark = click.style(f"{d.status:7}", fg=_COLOURS[d.status]) if sys.stdout.isatty() else f"{d.status:7}"
        click.echo(f"{mark}  {d.topic:{width}}  {d.found}")
        if d.advice:
            click.echo(f"{'':7}  {'':{width}}  -> {d.advice}")
    return EXIT_CODES[status]
