"""`overlap_probe diff`: what changed between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from overlap_probe.baseline import load_samples
from overlap_probe.commands.common import meaning_options, take_reading
from overlap_probe.commands.comparing import comparison_options, fail_on_option, show_comparison
from overlap_probe.commands.files import RUN, FilesCommand
from overlap_probe.fail_on import parse_change


@click.command(cls=FilesCommand)
@click.argument("base", type=RUN)
@click.argument("new", type=RUN)
@fail_on_option
@meaning_options
@comparison_options
def diff(base: Path, new: Path, fail_on: tuple[str, ...], **options: Any) -> int:
    """What changed from BASE to NEW, beside the noise.

    For each metric the median over windows, and their range. BASE and NEW are run folders, results, traces, or
    baselines. With --fail-on the exit code is the verdict of the worst rank: 1 if a change is one to fail on, 3
    if that cannot be told.
    """
    asked = [parse_change(text) for text in fail_on]
    reading = take_reading(options)
    return show_comparison(load_samples(base, reading), load_samples(new, reading), asked, **options)
