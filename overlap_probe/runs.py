"""Makes a run from start to end: launch, analyse, judge, and leave everything in the run's folder.

The idea: the folder is the run. It holds each rank's trace, the result (with how it was made), the report and the
verdict for a CI, and any of them can be made again from the traces alone. A run that a busy machine kept from a
verdict (`starvation`) is no evidence of anything, so it is made again; one that failed is, and never is.
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
from overlap_probe.starvation import starved_in

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

    Raises as `record_run` does.
    """

    def judge(run: RunAnalysis) -> Verdict:
        return evaluate(run, checks, at_least=at_least)

    def in_doubt(run: RunAnalysis) -> bool:
        return starved_in(run) and judge(run).status == "inconclusive"

    recorded = record_run(launch_options, options, in_doubt, on_progress)
    if recorded is None:
        return None
    run, folder = recorded
    run = replace(run, ranks=tuple(_by_name(rank) for rank in run.ranks))
    verdict = judge(run)
    for name, form in REPORTS.items():
        write_text(folder / name, render(run, verdict, form))
    return Run(run, verdict, folder)


def record_run(
    launch_options: LaunchOptions,
    options: Options | None,
    in_doubt: Callable[[RunAnalysis], bool],
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[RunAnalysis, Path] | None:
    """Launch and analyse; the ranks joined and the run's folder, or None where another process has rank 0.

    Does both again in the same folder while ``in_doubt`` says that the machine was too busy, ``launch_options.retries``
    times at most; not where others start ranks of the run, too.

    Raises LaunchError if the ranks did not end well, TraceError if what they left cannot be read.
    LaunchInterrupted if the user had enough while they are analysed: it says where they are.
    """
    from overlap_probe.launch import LaunchInterrupted, starts_all_ranks
    from overlap_probe.launch import run as launch

    again = 0
    while True:
        record = launch(launch_options, on_progress)
        if not record.leads:
            return None
        on_progress("analysing")
        try:
            run = analyze_run(record.folder, options)
        except KeyboardInterrupt as interrupt:
            safe = f"the traces in {record.folder} are complete; try overlap_probe analyze {record.folder}"
            raise LaunchInterrupted(signal.SIGINT, f"interrupted while analysing: {safe}") from interrupt
        if again == launch_options.retries or not starts_all_ranks(launch_options) or not in_doubt(run):
            break
        again += 1
        on_progress(f"this machine was too busy to judge: recording again ({again} of {launch_options.retries})")
        launch_options = replace(launch_options, out=str(record.folder))
    notes = [*record.notes, *([f"recorded again, the machine was too busy to judge: {again} x"] if again else [])]
    return replace(run, record=replace(record, notes=notes).to_dict()), record.folder


def _by_name(rank: Analysis) -> Analysis:
    """A rank whose path holds where its trace lies from the run's folder: a result is read on other machines, too."""
    return replace(rank, path=Path(rank.path).name)
