"""Makes a run from start to end: launch, analyse, judge, and leave everything in the run's folder.

The idea: the folder is the run. It holds each rank's trace, the result (with how it was made), the report and the
verdict for a CI, and any of them can be made again from the traces alone. A run that a busy machine kept from a
verdict (`starvation`) is no evidence of anything, so it is made again; one that failed is, and never is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from overlap_probe.checks import AtLeast, Check, evaluate
from overlap_probe.job import REPORTS, LaunchOptions
from overlap_probe.options import Options
from overlap_probe.ranks import analyze_run
from overlap_probe.render import render, write_text
from overlap_probe.results import Analysis, RunAnalysis, Verdict, Window


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

    Raises as `Attempts` does.
    """
    attempts = Attempts(launch_options, options, on_progress)
    if not attempts.record():
        return None
    verdict = attempts.judge(checks, at_least)
    for name, form in REPORTS.items():
        write_text(attempts.folder / name, render(attempts.run, verdict, form))
    return Run(attempts.run, verdict, attempts.folder)


class Attempts:
    """Launches and analyses a run, and does it again while a busy machine keeps the run from a verdict.

    Raises, whenever it records:
        LaunchError: the ranks did not end well.
        TraceError: what they left cannot be read.
        LaunchInterrupted: the user had enough; while the traces are analysed it says where they are.
    """

    run: RunAnalysis
    """The ranks joined, and how they were made."""
    folder: Path

    def __init__(
        self,
        launch_options: LaunchOptions,
        options: Options | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """around: entered for each recording and its analysis."""
        self._launch_options = launch_options
        self._options = options
        self._on_progress = on_progress
        self._around = around
        self._retried = 0
        self._surroundings = Surroundings.now()

    def record(self) -> bool:
        """Launch and analyse; False where another process of the run has rank 0, and judges."""
        with self._around():
            return self._record()

    def _record(self) -> bool:
        from overlap_probe import launch

        record = launch.run(self._launch_options, self._on_progress)
        if not record.leads:
            return False
        self.folder = record.folder
        self._on_progress("analysing")
        try:
            run = analyze_run(record.folder, self._options)
        except KeyboardInterrupt as interrupt:
            safe = f"the traces in {record.folder} are complete; try overlap_probe analyze {record.folder}"
            raise launch.LaunchInterrupted(signal.SIGINT, f"interrupted while analysing: {safe}") from interrupt
        if self._retried:
            note = f"recorded again, the machine was too busy to judge: {self._retried} x"
            record = replace(record, notes=[*record.notes, note])
        self.run = replace(run, ranks=tuple(_relative(rank) for rank in run.ranks), record=record.to_dict())
        return True

    def judge(self, checks: Sequence[Check | str], at_least: AtLeast | str | None = None) -> Verdict:
        """The verdict on what was recorded; if only the want of a core kept it from one, on a new recording.

        That is made in the same folder, at most ``LaunchOptions.retries`` times over all calls, and never where others
        start ranks of the run, too. What failed is never tried again.
        """
        from overlap_probe import launch

        retries = self._launch_options.retries if launch.starts_all_ranks(self._launch_options) else 0
        while True:
            verdict = evaluate(self.run, checks, at_least=at_least)
            if verdict.status != "inconclusive" or self._retried == retries:
                return verdict
            blamed = evaluate(_without_excuses(self.run), checks, at_least=at_least)
            if any(finding.status == "inconclusive" for finding in blamed.findings):
                return verdict
            self._retried += 1
            self._on_progress(f"this machine was too busy to judge: recording again ({self._retried} of {retries})")
            self._launch_options = replace(self._launch_options, out=str(self.folder))
            try:
                with self._surroundings.restored():
                    self.record()
            except launch.LaunchInterrupted:
                raise
            except launch.LaunchError as error:
                why = "the machine was too busy to judge the recording before this one; --retries 0 makes only one"
                raise launch.LaunchError(f"{error} ({why})") from error


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run takes from the process that starts it: another recording of the run has to have the same."""

    folder: str
    environment: dict[str, str]
    search_path: tuple[str, ...]

    @classmethod
    def now(cls) -> Surroundings:
        return cls(os.getcwd(), dict(os.environ), tuple(sys.path))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which they are as they were, and then as now again."""
        here = Surroundings.now()
        self._restore()
        try:
            yield
        finally:
            here._restore()

    def _restore(self) -> None:
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.search_path


def _without_excuses(run: RunAnalysis) -> RunAnalysis:
    """The run as if no thread had been without a core: what it misses, it misses."""

    def blamed(window: Window) -> Window:
        return replace(window, collectives=tuple(replace(c, starved_ns=None) for c in window.collectives))

    ranks = (replace(rank, windows={name: blamed(w) for name, w in rank.windows.items()}) for rank in run.ranks)
    return replace(run, ranks=tuple(ranks))


def _relative(rank: Analysis) -> Analysis:
    """The rank with the path of its trace from the run's folder on: a result is read on other machines, too."""
    return replace(rank, path=Path(rank.path).name)
