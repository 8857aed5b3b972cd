"""`overlap_probe run`: launch, profile, analyse, report, assert."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from overlap_probe.commands.common import EXIT_CODES, Checks, check_options, reading_options, show, take_reading
from overlap_probe.job import DEVICES, PROFILER_NAMES, LaunchOptions
from overlap_probe.runs import make_run

DEFAULT_CHECKS = ("overlaps >= auto",)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("script", nargs=-1, type=click.UNPROCESSED)
@click.option("--nproc", type=int, default=2, show_default=True, help="Ranks on this host.")
@click.option(
    "-o",
    "--output",
    "out",
    metavar="FOLDER",
    help="Where traces, logs, result.json, report.html and junit.xml go. [default: overlap_probe_runs/TIME]",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default="auto",
    show_default=True,
    help="For the built-in workload; auto takes GPUs if there is one for each rank of this host.",
)
@click.option(
    "--schedule",
    type=click.Choice(["auto", "serial", "implicit", "prefetch"]),
    default="auto",
    show_default=True,
    help="When the built-in workload gathers: serial (the negative control), implicit, prefetch. [auto: prefetch]",
)
@click.option(
    "--gather",
    type=click.Choice(["auto", "process_group", "zero_cta", "copy_engine"]),
    default="auto",
    show_default=True,
    help="How the built-in workload moves bytes; zero_cta and copy_engine need GPUs. [auto: the best that works]",
)
@click.option(
    "--children", type=int, default=4, show_default=True, help="The built-in workload's units below the root."
)
@click.option("--dim", type=int, help="Rows and columns of each weight. [default: 2048 on a CPU, 4096 on a GPU]")
@click.option("--batch", type=int, help="Rows of the input. [default: 256 on a CPU, 32768 on a GPU]")
@click.option(
    "--profiler",
    type=click.Choice(PROFILER_NAMES),
    default="torch",
    show_default=True,
    help="Who records: torch.profiler in each rank, or Nsight Systems around each (needs nsys on the PATH).",
)
@click.option("--warmup", type=int, default=2, show_default=True, help="Steps before the profiler starts.")
@click.option("--steps", type=int, default=3, show_default=True, help="Steps that are profiled.")
@click.option(
    "--timeout",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds without a sign of life after which a rank counts as hanging (60 at least while ranks start).",
)
@click.option(
    "--retries",
    type=int,
    default=2,
    show_default=True,
    help="Times to record the run again, at most, if a busy CPU left no verdict. What failed is never tried again.",
)
@click.option(
    "--target",
    metavar="MODULE:FUNCTION",
    help="Call this function on every rank instead of a script; or FILE.py:FUNCTION.",
)
@click.option("--nnodes", type=int, default=1, show_default=True, help="Hosts, as in torchrun.")
@click.option("--node-rank", type=int, help="This host's number, as in torchrun.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where hosts meet, as in torchrun.")
@click.option("--rdzv-id", default="overlap_probe", show_default=True, help="Name of the run, as in torchrun.")
@check_options
@reading_options
def run(**options: Any) -> int:
    """Launch, profile, analyse, report, assert: the main job.

    Without SCRIPT it runs the built-in workload; with `run -- SCRIPT ARGS` your own, on every rank. Checks
    `overlaps >= auto` unless told otherwise; the exit code is the verdict, as that of `assert`.
    """
    asked = Checks.take(options, DEFAULT_CHECKS)
    reading = take_reading(options)
    made = make_run(LaunchOptions(**options), asked.checks, asked.at_least, reading, _progress())
    if made is None:
        return 0
    click.echo()
    show(made.run, made.verdict)
    click.echo(f"report: {made.folder / 'report.html'}")
    return EXIT_CODES[made.verdict.status]


def _progress() -> Any:
    """Prints each step of the way, with the seconds since the start."""
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.1f} s] {text}", err=True)
        sys.stderr.flush()

    return say
