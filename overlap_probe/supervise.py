"""Watches over one launch: starts the agent, follows the ranks, ends everything, says what went wrong.

The idea: a launch is over when the agent is; a rank that failed or hangs only sets a limit to how long that may take.
Whatever the way out of the `with` block, no process is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from overlap_probe.errors import LaunchError
from overlap_probe.job import Job, command, signal_group
from overlap_probe.profilers import PROFILERS
from overlap_probe.progress import Follower
from overlap_probe.ranks_at_work import RanksAtWork, how_it_ended, last_lines, to_blame

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlap_probe.ranks_at_work import Rank

POLL_S = 0.05
GRACE_S = 2.0
"""From the first failure, or the order to stop, torch's launcher has this long to end the ranks in its own way."""
START_S = 60.0
"""A rank that starts (imports, joins its peers, warms up) has at least this long, however short ``--timeout`` is."""
STACK_S = 0.5
"""What a rank gets to print its stack."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchInterrupted(LaunchError):
    """A signal asked the launcher to stop; ``signal_number`` says which."""

    def __init__(self, signal_number: int, problem: str) -> None:
        self.signal_number = signal_number
        super().__init__(problem)


class Supervisor:
    """A context: entering starts the job's processes, leaving ends those that are left."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._work = RanksAtWork(job)
        self._agent_log = job.logs / f"{job.agent_name}.log"
        self._agent_reports = Follower(job.logs / f"{job.agent_name}.jsonl")
        self._agent_error: str | None = None
        self._exitcodes: dict[int, int] = {}
        self._suspects: list[Rank] = []
        self._stop_signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self.notes: list[str] = []

    def __enter__(self) -> Supervisor:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: signal.signal(number, self._on_signal)
                for number in STOP_SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
            }
        environment = {**os.environ, **self._job.environment()}
        if self._job.options.nproc > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        with self._agent_log.open("wb") as log:
            self._agent = subprocess.Popen(
                command("overlap_probe.agent"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._agent.terminate()
        try:
            self._agent.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            signal_group(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
        self._work.update()
        self._work.signal(signal.SIGKILL)
        for rank in self._work.all:
            PROFILERS[self._job.options.profiler].clean_up(self._job, rank.number)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None:
            self._check_signal()  # it came after the last look

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number

    def follow(self, on_progress: Callable[[str], None]) -> list[Rank]:
        """Wait until every rank has ended well.

        Raises:
            LaunchInterrupted: SIGINT, SIGTERM or SIGHUP came.
            LaunchError: a rank failed, hung, or left no trace; or torch's launcher could not start them.
        """
        limit = float("inf")
        while (code := self._agent.poll()) is None and not self._exitcodes:
            self._update(on_progress)
            self._check_signal()
            failed = [rank for rank in self._work.all if rank.failed]
            if failed and limit == float("inf"):
                limit = time.monotonic() + GRACE_S
            if time.monotonic() > limit and not self._suspects:
                self._suspects = failed
                self._work.signal(signal.SIGKILL)
            self._check_signs_of_life()
            time.sleep(POLL_S)
        self._update(on_progress)
        if code == 0 and len(self._work.all) == self._job.options.nproc and all(rank.wrote for rank in self._work.all):
            return self._work.all
        raise LaunchError(self._what_went_wrong(code))

    def _update(self, on_progress: Callable[[str], None]) -> None:
        for event in self._agent_reports.new_events():
            if event.kind == "note":
                self.notes.append(event.value)
                on_progress(event.value)
            elif event.kind == "error":
                self._agent_error = event.value
            elif event.kind == "failures":
                self._exitcodes = {int(number): code for number, code in event.value.items()}
        for rank, event in self._work.update():
            if event.kind == "note" or (event.kind == "state" and rank.number == 0):
                on_progress(f"rank {rank.number}: {event.value}")
        for rank in self._work.all:
            rank.exitcode = self._exitcodes.get(rank.number)

    def _check_signal(self) -> None:
        if self._stop_signal is not None:
            where = [rank.last_lines() for rank in self._work.all]
            name = signal.Signals(self._stop_signal).name
            raise LaunchInterrupted(self._stop_signal, "\n".join([f"stopped by {name}", *where]))

    def _check_signs_of_life(self) -> None:
        options = self._job.options
        starting = max(options.timeout, START_S)
        if not self._work.all and time.monotonic() - self._started > starting:
            meet = f"; {options.nnodes} hosts were to meet at {options.rdzv_endpoint}" if options.nnodes > 1 else ""
            raise LaunchError(f"no rank has started within {starting:g} s{meet}\n{self._agent_last_lines()}")
        for rank in self._work.all:
            limit = starting if rank.starting else options.timeout
            if rank.lives and rank.silent_s > limit:
                hung = self._most_behind(
                    [other for other in self._work.all if other.lives and other.silent_s > limit / 2]
                )
                names = " and ".join(f"rank {other.number}" for other in hung)
                what = f"{names} gave no sign of life for {limit:g} s (--timeout)"
                raise LaunchError("\n".join([what, *(other.last_lines() for other in hung)]))

    def _most_behind(self, silent: list[Rank]) -> list[Rank]:
        """Of ranks that are silent, perhaps because of each other, those to name; all of them print their stack."""
        for rank in silent:
            rank.ask_for_stack()
        time.sleep(STACK_S)
        fewest = min(rank.steps for rank in silent)
        behind = [rank for rank in silent if rank.steps == fewest]
        return [rank for rank in behind if not rank.waits_for_others] or behind

    def _what_went_wrong(self, code: int | None) -> str:
        if self._agent_error is not None:
            return self._agent_error
        rank = to_blame(self._suspects or self._work.all)
        if rank is not None:
            return f"rank {rank.number} {rank.fate()}\n{rank.last_lines()}"
        without = next((rank for rank in self._work.all if not rank.wrote), None)
        if code == 0 and without is not None:
            return f"rank {without.number} left no trace: {'; '.join(without.notes) or 'it captured no step'}"
        fates = [f"rank {number} {how_it_ended(exitcode)} at its start" for number, exitcode in self._exitcodes.items()]
        fates.append(f"torch's launcher {how_it_ended(code)}" if code is not None else "torch's launcher did not end")
        return f"{'; '.join(fates)}\n{self._agent_last_lines()}"

    def _agent_last_lines(self) -> str:
        return last_lines(self._agent_log, "torch's launcher's last lines")
