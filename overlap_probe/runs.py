"""Makes a run from start to end: launch, analyse, judge, and leave everything in the run's folder.

The idea: the folder is the run. It holds each rank's trace, the result (with how it was made), the report and the
verdict for a CI, and any of them can be made again from the traces alone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from overlap_probe.checks import AtLeast, Check, evaluate
from overlap_probe.job import LaunchOptions
from overlap_probe.options import Options
from overlap_probe.ranks import analyze_run
from overlap_probe.render import render, write_text
from overlap_probe.results import Analysis, RunAnalysis, Verdict

REPORTS = {"result.json": "json", "report.html": "html", "junit.xml": "xml"}


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its ranks joined, its verdict, and the folder that holds it."""

    run: RunAnalysis
    verdict: Verdict
    folder: Path


def make_run(
    launch_options: LaunchOptions,
    checks: Sequence[Check | str],
    at_least: AtLeast | str | None = None,
    options: Options | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Run | None:
    """Launch and judge; None where another process of the run (its rank 0) does the judging.

    Raises LaunchError if the ranks did not end well, TraceError if what they left cannot be read.
    LaunchInterrupted if the user had enough while they are analysed: it says where they are.
    """
    from overlap_probe.launch import LaunchInterrupted
    from overlap_probe.launch import run as launch

    record = launch(launch_options, on_progress)
    if not record.leads:
        return None
    on_progress("analysing")
    try:
        analysed = analyze_run(record.folder, options)
    except KeyboardInterrupt as interrupt:
        safe = f"the traces in {record.folder} are complete; try overlap_probe analyze {record.folder}"
        raise LaunchInterrupted(signal.SIGINT, f"interrupted while analysing: {safe}") from interrupt
    ranks = tuple(_by_name(rank) for rank in analysed.ranks)
    run = replace(analysed, ranks=ranks, record=record.to_dict())
    verdict = evaluate(run, checks, at_least=at_least)
    for name, form in REPORTS.items():
        write_text(record.folder / name, render(run, verdict, form))
    return Run(run, verdict, record.folder)


def _by_name(rank: Analysis) -> Analysis:
    """A rank whose path holds where its trace lies from the run's folder: a result is read on other machines, too."""
    return replace(rank, path=Path(rank.path).name)
