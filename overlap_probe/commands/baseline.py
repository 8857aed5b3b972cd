"""`overlap_probe baseline`: numbers of a good run that are committed, and compared with later runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import overlap_probe as op
from overlap_probe.baseline import is_baseline, load_samples, read_baseline, write_baseline
from overlap_probe.commands.common import EXIT_CODES, meaning_options, take_reading
from overlap_probe.commands.comparing import comparison_options, fail_on_option, show_comparison
from overlap_probe.commands.files import INPUT, OUTPUT, RUN, FilesCommand
from overlap_probe.diff import diff as compare
from overlap_probe.fail_on import DEFAULT_FAIL_ON, judge, parse_change


@click.group()
def baseline() -> None:
    """Save numbers of a good run, and hold later runs against them."""


@baseline.command(cls=FilesCommand)
@click.argument("run", type=RUN)
@click.option(
    "-o", "--output", type=OUTPUT, required=True, metavar="FILE", help="Where to write it; meant to be committed."
)
@fail_on_option
@meaning_options
def save(run: Path, output: Path, fail_on: tuple[str, ...], **options: Any) -> int:
    """Write the baseline of RUN: a run folder, a result or a trace.

    What to fail on is kept with the numbers. [default: 'overlaps < 0' and 'hidden < -5%'] Exit code 3 if RUN itself
    cannot answer that; then nothing is written.
    """
    asked = fail_on or DEFAULT_FAIL_ON
    checks = [parse_change(text) for text in asked]
    samples = load_samples(run, take_reading(options))
    verdict = judge(compare(samples, samples), checks)
    if verdict.status != "pass":
        finding = next(f for f in verdict.findings if f.status == verdict.status)
        click.echo(f"overlap_probe: {run}: no baseline for {finding.check or 'this run'}: {finding.message}", err=True)
        return EXIT_CODES[verdict.status]
    write_baseline(replace(samples, fail_on=tuple(asked)), output)
    click.echo(f"wrote {output}: fails on {', '.join(asked)}")
    return 0


@baseline.command(cls=FilesCommand)
@click.argument("run", type=RUN)
@click.argument("file", type=INPUT)
@fail_on_option
@meaning_options
@comparison_options
def check(run: Path, file: Path, fail_on: tuple[str, ...], **options: Any) -> int:
    """Compare RUN with the baseline FILE; the exit code is the verdict.

    --fail-on replaces what the baseline says. Without a baseline there is nothing to compare with: exit code 2.
    """
    asked = [parse_change(text) for text in fail_on]
    reading = take_reading(options)
    if not is_baseline(file):
        raise op.TraceError(
            file,
            "no baseline" if file.exists() else "there is no such baseline",
            "save one of a good run with `overlap_probe baseline save RUN -o FILE`",
        )
    base = read_baseline(file)
    asked = asked or [parse_change(text) for text in base.fail_on]
    if not asked:
        problem, hint = "names nothing to fail on, so nothing is checked", "give --fail-on, or save it again"
        raise op.TraceError(file, problem, hint)
    return show_comparison(base, load_samples(run, reading), asked, **options)
