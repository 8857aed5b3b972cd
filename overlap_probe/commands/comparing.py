"""What `diff` and `baseline check` share: options for a comparison, and what becomes of one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from overlap_probe.baseline import Samples
from overlap_probe.checks import Check
from overlap_probe.commands.common import EXIT_CODES, append_summary, options_of, summary_option
from overlap_probe.commands.files import OUTPUT
from overlap_probe.diff import diff
from overlap_probe.fail_on import judge
from overlap_probe.render import changes, render, write_text
from overlap_probe.results import RunAnalysis

fail_on_option = click.option(
    "--fail-on",
    "fail_on",
    multiple=True,
    metavar="EXPRESSION",
    help="[SCOPE.]METRIC OP CHANGE, e.g. 'hidden < -5%' (points of the time) or 'exposed > 100us'. Repeatable.",
)

comparison_options = options_of(
    [
        click.option("--windows", is_flag=True, help="Also list the number of every window."),
        click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the comparison as JSON."),
        click.option("--junit", type=OUTPUT, metavar="FILE", help="Write the verdict as JUnit XML."),
        summary_option,
    ]
)


def show_comparison(
    base: Samples,
    new: Samples,
    fail_on: Sequence[Check],
    *,
    windows: bool,
    json_file: Path | None,
    junit: Path | None,
    github_summary: Path | None,
) -> int:
    """Compare, write what was asked for, print the table; the exit code.

    Without anything to fail on it is 0, or 3 where the two have nothing in common.
    """
    compared = diff(base, new)
    verdict = judge(compared, fail_on) if fail_on else None
    if json_file is not None:
        write_text(json_file, changes.render_json(compared, verdict))
    if junit is not None:
        write_text(junit, render(RunAnalysis(()), verdict, "xml"))
    append_summary(github_summary, changes.render_markdown(compared, verdict))
    click.echo(changes.render(compared, verdict, windows=windows, colour=sys.stdout.isatty()), nl=False)
    if verdict is None:
        return 0 if compared.changes else EXIT_CODES["inconclusive"]
    return EXIT_CODES[verdict.status]
