"""Records when the threads of this process were ready to run and had no core.

The idea: on a CPU two threads run side by side only if both get a core, so a busy machine can take an overlap from code
that is right. Linux counts how long each thread was ready and waited (``schedstat``, its second number); a thread that
is blocked, because it waits for a gather, is not ready. So read the counters every few milliseconds beside the steps:
where one has grown, that thread had no core. The count grows when a wait ends, which can be right after the look before
(on a busy machine the looks are late, too), so the wait may have begun as long before that look as it lasted; but not
before the wait that was counted before it had ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

METADATA_KEY = "overlap_probe"
"""Key of a trace under which a capture says what the profiler cannot."""

PERIOD_SECONDS = 0.005
"""Between two looks: shorter than any gather or GEMM that is long enough to be tested on a CPU."""
MOST_SHARE = 0.01
"""Of a core, for looking: with many threads it looks less often."""


class RunQueueSampler:
    """Samples from `start` to `stop`, on a thread of its own. Where the system does not count, it records nothing."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._files: dict[str, int] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        """When each thread was looked at last (Unix time, ns), its count then, and since when all of that may have been
        counted: nothing that is counted later began before."""
        self._waits: dict[str, list[tuple[int, int, int]]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run_queue", daemon=True)

    def start(self) -> None:
        self._look()
        if self._seen:
            self._thread.start()

    def stop(self) -> dict[str, Any] | None:
        """What is to be written under METADATA_KEY: for each thread its waits, as [start, end, waited], ns.

        Times are Unix times, the clock of the profiler. In an interval a thread waited so long, nobody knows where in
        it; what is not in one it did not wait. None where the system does not count. A second call gives the same.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
            self._look()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        if not self._seen:
            return None
        return {"process": os.getpid(), "waits": {task: waits for task, waits in self._waits.items() if waits}}

    def _run(self) -> None:
        pause = PERIOD_SECONDS
        while not self._stopped.wait(pause):
            began = time.thread_time()
            self._look()
            pause = max(PERIOD_SECONDS, (time.thread_time() - began) / MOST_SHARE)

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # no such folder: another system
            for task in os.listdir(self._tasks):
                if task not in self._files:
                    with contextlib.suppress(OSError):  # ended meanwhile, or not counted here
                        self._files[task] = os.open(self._tasks / task / "schedstat", os.O_RDONLY)
        for task, file in list(self._files.items()):
            looked = time.time_ns()  # this thread may wait for a core, too, between a look and the next line
            try:
                waited = int(os.pread(file, 100, 0).split()[1])
            except (OSError, ValueError, IndexError):  # the thread has ended
                os.close(self._files.pop(task))
                continue
            now = time.time_ns()
            before, waited_before, counted = self._seen.get(task, (looked, waited, 0))
            if waited > waited_before:
                started = max(before - (waited - waited_before), counted)
                self._waits.setdefault(task, []).append((started, now, waited - waited_before))
                counted = before
            self._seen[task] = looked, waited, counted
