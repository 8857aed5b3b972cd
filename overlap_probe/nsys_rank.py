"""What torch's launcher starts for a rank that Nsight Systems records: `worker` under ``nsys``, and keeps its trace.

The idea: each rank has an ``nsys`` of its own. One around torch's launcher would record all ranks into one file, but
the first rank to end its steps would end the recording of the others, a file of several processes does not say which
rank is which, and a rank's exit code would be lost in it. So each rank gets a keeper, this process. It passes on what
the worker reports and how it ends; when both are done it exports, checks that the ranges arrived, and leaves the
database in the run's folder, without the environment, process list and paths that Nsight Systems puts into one. The
report (``.nsys-rep``) has all of these and cannot be cleaned, so it is not kept.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlap_probe.errors import LaunchError, OverlapProbeError
from overlap_probe.job import STACK_SIGNAL, Job, command, end_with_parent, signal_group
from overlap_probe.nsys_command import (
    ENDING,
    PROFILE_ENVIRONMENT,
    end_recording,
    last_words,
    profile_arguments,
)
from overlap_probe.nsys_recording import NVTX_VARIABLE
from overlap_probe.nsys_trace import REPORT, keep
from overlap_probe.progress import PROGRESS, Event, Follower, to_file
from overlap_probe.whole_file import remove_unfinished
from overlap_probe.worker import redirect_output

POLL_S = 0.05
ATTEMPTS = 3
"""``nsys`` is started again if it ended before its rank began."""
SHUTDOWN_S = 0.6
"""What ``nsys`` gets to end by itself when its rank was killed: less than torch's launcher waits."""
LEAST_LIMIT_S = 60.0
"""``nsys`` has at least this long to write its report, and as long again to export it, however short ``--timeout``."""


def main() -> None:
    """Entry of a keeper's process: reports to the launcher, ends with it, and exits as its worker did."""
    job = Job.take()
    rank = int(os.environ["RANK"])
    redirect_output(job.logs / f"rank{rank}.log")
    faulthandler.register(STACK_SIGNAL)
    PROGRESS.listener = to_file(job.reports_of(rank))
    PROGRESS.report("pid", {"pid": os.getpid(), "token": job.token})

    def end() -> None:
        clean_up(job, rank)
        signal_group(os.getpgrp(), signal.SIGKILL)

    end_with_parent(job.parent, end)
    try:
        code = record(job, rank)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except OverlapProbeError as error:
        PROGRESS.report("error", str(error))
        code = 1
    _exit_as(code)


def record(job: Job, rank: int) -> int:
    """Run the rank under ``nsys`` and leave ``rank{R}.sqlite`` in the run's folder, whole or not at all.

    Gives the exit code of the rank, 128 + N if signal N killed it. A rank that captured no step leaves nothing. From
    here on SIGTERM raises SystemExit in this process, so that nothing is left behind.

    Raises:
        LaunchError: ``nsys`` cannot record or export, with its last words; or the ranges did not arrive.
        TraceError: the trace cannot be written.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    scratch = Path(tempfile.gettempdir(), _name(job, rank))
    scratch.mkdir(mode=0o700)
    worker = _Worker(Follower(scratch / "reports.jsonl"))
    inner = replace(job, parent=os.getpid(), reports=str(worker.follower.path))
    # What nsys leaves in its temporary folder when it is killed goes with the scratch folder; the rank keeps its own.
    own = [f"TMPDIR={os.environ['TMPDIR']}"] if "TMPDIR" in os.environ else ["-u", "TMPDIR"]
    environment = {
        **os.environ,
        **inner.environment(),
        **PROFILE_ENVIRONMENT,
        NVTX_VARIABLE: "1",
        "TMPDIR": str(scratch),
    }
    arguments = [
        *profile_arguments(_name(job, rank), scratch / REPORT),
        "env",
        *own,
        *command("overlap_probe.worker"),
    ]
    log = job.logs / f"rank{rank}.nsys.log"
    limit_s = max(job.options.timeout, LEAST_LIMIT_S)
    nsys = None
    try:
        with log.open("wb") as output:
            for _ in range(ATTEMPTS):
                with _alone(job.logs):
                    nsys = subprocess.Popen(
                        arguments, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                    worker.wait_for_begin(nsys)
                if worker.process is not None:
                    break
                end_recording(_name(job, rank))  # its daemon stays, and so does the name
        assert nsys is not None
        code = _wait(nsys, worker, limit_s)
        if worker.process is None or (code and worker.ended):
            said = last_words(log.read_bytes())
            when = "before the rank began" if worker.process is None else "after the rank had ended"
            raise LaunchError(f"nsys profile ended with exit code {code} {when}: {said}")
        if code or worker.recorded is None:
            return code
        keep(job, rank, scratch, worker.recorded, environment, limit_s)
        return 0
    finally:
        if nsys is not None and nsys.poll() is None:
            if worker.process is not None:
                signal_group(worker.process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                nsys.wait(SHUTDOWN_S)
        clean_up(job, rank)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one keeper of a run after another start its ``nsys``: some that start at once fail (one in 30, in pairs)."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: there are further attempts
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def clean_up(job: Job, rank: int) -> None:
    """End what is left of a rank's recording, and remove what is not finished."""
    end_recording(_name(job, rank))
    shutil.rmtree(Path(tempfile.gettempdir(), _name(job, rank)), ignore_errors=True)
    remove_unfinished(job.folder / f"rank{rank}{ENDING}")


@dataclass(slots=True)
class _Worker:
    """The rank's own process, as far as it has reported."""

    follower: Follower
    process: int | None = None
    """Its process id, and that of its group."""
    recorded: dict[str, Any] | None = None
    """What `NsysRecording` says of a recording that is worth keeping."""
    ended: bool = False
    """It ended well."""
    _seen_ns: int = 0

    def wait_for_begin(self, nsys: subprocess.Popen[bytes]) -> None:
        """Wait until it reports that it has begun, or ``nsys`` has ended without it."""
        while self.process is None and nsys.poll() is None:
            time.sleep(POLL_S)
            self.pass_on()

    def pass_on(self) -> None:
        """Pass its new reports and heartbeats on to whoever listens to this process."""
        for event in self.follower.new_events():
            self._take(event)
            if PROGRESS.listener is not None:
                PROGRESS.listener(event)
        with contextlib.suppress(FileNotFoundError):
            touched_ns = self.follower.path.stat().st_mtime_ns
            if touched_ns != self._seen_ns:
                self._seen_ns = touched_ns
                PROGRESS.beat()

    def _take(self, event: Event) -> None:
        if event.kind == "pid":
            self.process = event.value["pid"]
        elif event.kind == "recorded":
            self.recorded = event.value
        elif event.kind == "end":
            self.ended = True


def _wait(nsys: subprocess.Popen[bytes], worker: _Worker, limit_s: float) -> int:
    """Wait for the end of ``nsys``, which comes after the rank's; gives its exit code."""
    limit = float("inf")
    while (code := nsys.poll()) is None:
        worker.pass_on()
        if worker.ended and limit == float("inf"):
            limit = time.monotonic() + limit_s
        if time.monotonic() > limit:
            raise LaunchError(f"nsys profile did not end within {limit_s:g} s after its rank; is its daemon stuck?")
        time.sleep(POLL_S)
    worker.pass_on()
    return code if code >= 0 else 128 - code


def _name(job: Job, rank: int) -> str:
    """Names the recording and its scratch folder; short, because paths of sockets in it are."""
    return f"overlap_probe_{job.token[:16]}_{rank}"


def _exit_as(code: int) -> None:
    """Exit as the worker did: torch's launcher is to see which signal killed it."""
    number = code - 128
    if number in signal.valid_signals():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # there is no other handler for SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(code)
