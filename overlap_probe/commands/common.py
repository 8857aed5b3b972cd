"""Options that several commands share, and what becomes of them.

The idea: an option is declared once and parsed into an object before any file is touched; a command then only says
which of the groups below it takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

import overlap_probe as op
from overlap_probe.checks import METRICS, AtLeast, parse_duration_ns
from overlap_probe.commands.files import INPUT, OUTPUT, REPORT, STEP_SUMMARY, SUMMARY
from overlap_probe.render import is_result, read_result, render, write_text
from overlap_probe.results import RunAnalysis, Verdict

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 3}

Command = TypeVar("Command", bound=Callable[..., Any])


def options_of(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


paths_argument = click.argument("paths", nargs=-1, required=True, type=INPUT)

meaning_options = options_of(
    [
        click.option(
            "--rule",
            "rules",
            multiple=True,
            metavar="KIND=REGEX",
            help="Activities whose name matches are collectives of this kind, before all else. Repeatable.",
        ),
        click.option(
            "--window",
            metavar="REGEX",
            help="Ranges whose whole name matches are the windows. [default: ProfilerStep#N, else stepN]",
        ),
        click.option(
            "--min-overlap",
            metavar="DURATION",
            default="0",
            help="A collective overlaps a GEMM if it does so for longer than this, e.g. 5us. [default: 0]",
        ),
        click.option(
            "--unit-label",
            "unit_labels",
            multiple=True,
            metavar="REGEX",
            help="A label grammar of your own: groups named unit, phase, op, or the first is the unit. Repeatable.",
        ),
    ]
)
"""What a timeline's names mean: all that a comparison needs to be told."""

reading_options = options_of(
    [
        meaning_options,
        click.option(
            "--what-if",
            is_flag=True,
            help="Replay each pass with one thing different: all gathers hidden, no waits, no slowdown, host in time.",
        ),
    ]
)

READING = ("rules", "window", "min_overlap", "unit_labels", "what_if")
"""Names of what `reading_options` give; `meaning_options` give all but the last."""

rank_option = click.option(
    "--rank", type=click.IntRange(min=0), help="The rank of a single trace that does not say it."
)

output_options = options_of(
    [
        click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the result as JSON."),
        click.option("--junit", type=OUTPUT, metavar="FILE", help="Write the verdict as JUnit XML."),
        click.option(
            "--report", type=REPORT, metavar="FILE", help="Write a report: .html, .md, .txt, .csv, .svg, .json or .xml."
        ),
    ]
)


summary_option = click.option(
    "--github-summary",
    is_flag=False,
    flag_value=STEP_SUMMARY,
    type=SUMMARY,
    metavar="[FILE]",
    help=f"Append verdict, table and causes as Markdown to the summary of a CI job. [default FILE: {STEP_SUMMARY}]",
)


def append_summary(file: Path | None, markdown: str) -> None:
    """What `summary_option` asks for: what others have written to the file stays."""
    if file is not None:
        before = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        write_text(file, before + markdown + "\n")


def _default_operator(metric: str) -> str:
    return "<=" if metric in ("exposed", "stalled", "slowdown") else ">="


def _short_form(metric: str) -> Callable[[Any], Any]:
    example = "auto" if metric == "overlaps" else "80%" if "hidden" in metric else "100us"
    return click.option(
        "--" + metric.replace("_", "-"),
        metavar="VALUE",
        help=f"Short for --check '{metric} {_default_operator(metric)} VALUE', e.g. {example}; "
        "VALUE may begin with an operator.",
    )


check_options = options_of(
    [
        click.option(
            "--check",
            "checks",
            multiple=True,
            metavar="EXPRESSION",
            help="[SCOPE.]METRIC OP VALUE, e.g. 'backward.all_gather.hidden >= 80%'. Repeatable.",
        ),
        *(_short_form(metric) for metric in METRICS),
        click.option("--at-least", metavar="K/N", help="Of every N windows K must hold. [default: all]"),
    ]
)


@dataclass(frozen=True, slots=True)
class Checks:
    """The checks of a command line, parsed."""

    checks: tuple[op.Check, ...]
    at_least: AtLeast | None

    @classmethod
    def take(cls, options: dict[str, Any], default: Sequence[str] = ()) -> Checks:
        """Take `check_options` out of a command's options; raises CheckSyntaxError."""
        texts = list(options.pop("checks"))
        for metric in METRICS:
            value = options.pop(metric)
            if value is not None:
                operator = "" if value.lstrip()[:1] in "<>=!" else _default_operator(metric)
                texts.append(f"{metric} {operator} {value}")
        at_least = options.pop("at_least")
        return cls(
            tuple(op.parse_check(text) for text in texts or default), AtLeast.parse(at_least) if at_least else None
        )


def take_reading(options: dict[str, Any]) -> op.Options:
    """Take `reading_options` out of a command's options; raises CheckSyntaxError."""
    return parse_reading(**{name: options.pop(name) for name in READING if name in options})


def parse_reading(
    rules: Sequence[str], window: str | None, min_overlap: str, unit_labels: Sequence[str], what_if: bool = False
) -> op.Options:
    """`reading_options` as an object; raises CheckSyntaxError."""
    return op.Options.parse(rules, window, parse_duration_ns("--min-overlap", min_overlap), unit_labels, what_if)


def load(paths: Sequence[Path], rank: int | None = None, **reading: Any) -> tuple[RunAnalysis, Verdict | None]:
    """Traces analysed, or a result of ours read back with its verdict."""
    options = parse_reading(**reading)
    if len(paths) == 1 and is_result(paths[0]):
        if rank is not None or options != op.Options():
            raise click.UsageError(f"{paths[0]} is a result: options on how to read traces need the traces")
        return read_result(paths[0])
    run = op.analyze_run(paths, options)
    if rank is not None:
        if len(run.ranks) != 1:
            raise click.UsageError(f"--rank names the rank of one trace, and there are {len(run.ranks)}")
        said, world = run.ranks[0].rank, run.ranks[0].world_size
        if said not in (None, rank) or (world is not None and rank >= world):
            is_of = f"the trace is of rank {said}" if said is not None else f"the trace is of a world of {world}"
            raise click.UsageError(f"--rank {rank}: {is_of}; leave the option out")
        run = replace(run, ranks=(replace(run.ranks[0], rank=rank),))
    return run, None


def write_outputs(
    run: RunAnalysis, verdict: Verdict | None, json_file: Path | None, junit: Path | None, report: Path | None
) -> None:
    """What `output_options` ask for."""
    for file, form in ((json_file, "json"), (junit, "xml")):
        if file is not None:
            write_text(file, render(run, verdict, form))
    if report is not None:
        op.write_report(run, report, verdict)


def show(run: RunAnalysis, verdict: Verdict | None) -> None:
    """The table on the terminal, the verdict its last line."""
    from overlap_probe.render import text

    click.echo(text.render(run, verdict, colour=sys.stdout.isatty()), nl=False)
