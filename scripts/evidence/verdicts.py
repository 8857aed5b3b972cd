"""Runs ``overlap_probe run`` again and again, as it is and as its negative control, and keeps each verdict.

The idea: a run spends many seconds on imports and a few on the GPU, so several can go at a time. A control must fail
whoever else is there. Default runs take turns at the GPU: the next one starts to import when the one before begins to
step. How many went at a time is kept with each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .results import write_json

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS: dict[str, tuple[str, ...]] = {"default": (), "serial": ("--schedule", "serial")}
WANTED = {"default": 0, "serial": 1}
"""Exit codes: the test passes, its control fails."""

RUN_S = 75
"""A run that takes this long is ended, and counts as an error."""
LEAST_S = 20.0
"""No run is begun with less than so many seconds left, or than the longest so far took."""
IN_TURN = {"default"}
STEPS = "warm-up"
"""What a run says when its ranks have joined and begin to step."""
POLL_S = 0.1

Runner = Callable[[str, Path, Callable[[], None]], dict[str, Any]]
"""Makes a run of a kind into a folder, and calls when it begins to step."""


def run_once(
    folder: Path,
    nproc: int,
    arguments: Sequence[str],
    seconds: float = RUN_S,
    on_steps: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One run, into ``folder``: its exit code (None if it had to be ended), and what each rank found and was to find in
    each window. on_steps: called when it begins to step; perhaps again."""
    command = [sys.executable, "-m", "overlap_probe", "run", "--nproc", str(nproc), "-o", str(folder), *arguments]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        while (code := process.poll()) is None and time.monotonic() < began + seconds:
            time.sleep(POLL_S)
            if STEPS in (folder / "output.txt").read_text():
                on_steps()
        if code is None:
            process.terminate()  # it ends its ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    made: dict[str, Any] = {"exit": code, "seconds": round(time.monotonic() - began, 1), "windows": {}}
    result = folder / "result.json"
    if result.exists():
        made["windows"] = windows_of(json.loads(result.read_text()))
    return made


def environment() -> dict[str, str]:
    """A process's in which ``overlap_probe`` is the one beside this script."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def windows_of(result: dict[str, Any]) -> dict[str, list[Any]]:
    """``[found, expected]`` by rank and window."""
    findings = result["verdict"]["findings"]
    return {f"rank {f['rank']} {f['window']}": [f["value"], f["limit"]] for f in findings}


@dataclass
class Ledger:
    """The runs so far, in a file that every run is added to at once."""

    file: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, file: Path) -> Ledger:
        return cls(file, json.loads(file.read_text())["runs"] if file.exists() else [])

    def count(self, kind: str) -> int:
        return sum(run["kind"] == kind for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        with self.lock:
            self.runs.append(run)
            write_json(self.file, {"summary": summary(self.runs), "runs": self.runs})


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each kind: how many runs, how many as wanted, and the largest number that ran at a time."""
    made: dict[str, dict[str, Any]] = {}
    for kind, wanted in WANTED.items():
        some = [run for run in runs if run["kind"] == kind]
        windows = [found for run in some for found in run["windows"].values()]
        made[kind] = {
            "runs": len(some),
            "as_wanted": sum(run["exit"] == wanted for run in some),
            "windows": len(windows),
            "windows_held": sum(found is not None and found >= expected for found, expected in windows),
            "at_once": max((run["at_once"] for run in some), default=0),
            "seconds": round(sum(run["seconds"] for run in some), 1),
        }
    return made


def collect(ledger: Ledger, kind: str, count: int, at_once: int, end: float, run: Runner) -> None:
    """Runs of a kind, until the ledger has ``count`` of it or, at ``end``, there is no time for one more.

    Of each kind the first folder is kept, and those of verdicts that were not wanted.
    """
    begun = ledger.count(kind)
    lock = threading.Lock()
    turns = _Turns()
    longest = max((r["seconds"] for r in ledger.runs if r["kind"] == kind), default=LEAST_S)

    def work() -> None:
        nonlocal begun
        while True:
            turn = turns.take() if kind in IN_TURN else lambda: None
            with lock:
                if begun >= count or time.monotonic() + longest > end:
                    return turn()
                number = begun = begun + 1
            folder = ledger.file.parent / f"{kind}{number}"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                made = {"kind": kind, "number": number, "at_once": workers, **run(kind, folder, turn)}
            finally:
                turn()
            if made["exit"] is None and time.monotonic() >= end:
                return  # stopped for want of time: says nothing
            ledger.add(made)
            if number > 1 and made["exit"] == WANTED[kind]:
                shutil.rmtree(folder, ignore_errors=True)

    workers = max(1, min(at_once, count - begun))
    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Turns:
    """A lock that whoever took it may give back more than once, so that it is surely given back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> Callable[[], None]:
        """Waits for the turn; what it returns ends it."""
        self._lock.acquire()
        ended = threading.Event()

        def end() -> None:
            if not ended.is_set():
                ended.set()
                self._lock.release()

        return end
