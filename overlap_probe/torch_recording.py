"""Records steps with torch.profiler and writes them as the rank's trace: one of two ways to record (`capture`).

The idea: torch.profiler opens a range for each step, whether it counts or not; those that are no windows get another
name while the trace is packed. The trace has its own name only when all of it is written.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_probe.errors import OverlapProbeError
from overlap_probe.progress import PROGRESS
from overlap_probe.run_queue import METADATA_KEY, RunQueueSampler
from overlap_probe.whole_file import whole_file

ENDING = ".json.gz"


NOT_ALONE = "capture: another profiler works in this process; leave it out while capturing"


class CaptureError(OverlapProbeError):
    """A trace could not be recorded or written."""


class TorchRecording:
    """Used once: start, a `step` at the end of each step, stop, and `write` if it is worth keeping."""

    def __init__(self, *, warmup: int, steps: int, lead_in: int) -> None:
        """Record ``steps`` steps after ``warmup``, and the last ``lead_in`` (0 or 1) of the warm-up as no windows.

        The step before the first that is recorded runs with the profiler already warm, if there is one.
        """
        from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

        supported = supported_activities()  # type: ignore[no-untyped-call]
        warm = min(warmup, 1)
        self._first, self._last = warmup - lead_in, warmup + steps
        self._ended = 0
        self._sampler: RunQueueSampler | None = None
        self._no_windows = {warmup - 1: "lead-in step"} if lead_in else {}
        self._profile = profile(
            activities=supported & {ProfilerActivity.CPU, ProfilerActivity.CUDA},
            schedule=schedule(wait=warmup - warm - lead_in, warmup=warm, active=steps + lead_in, repeat=1),
            record_shapes=True,
        )

    def is_alone(self, *, recording: bool) -> bool:
        """Whether no other profiler works. Only one can; torch lets a second one empty the first without a word."""
        import torch

        return bool(torch.autograd._profiler_enabled() == recording)  # type: ignore[attr-defined]

    def start(self) -> None:
        """Begin the first step."""
        self._profile.start()
        self._sample_if_recorded()

    def step(self) -> None:
        """End a step and begin the next one."""
        self._ended += 1
        if self._ended == self._last:
            self._add_waits()
        self._profile.step()
        self._sample_if_recorded()

    def stop(self) -> None:
        """Stop the profiler. Raises CaptureError if another one did (torch 2.9 says so, a newer one does not)."""
        self._add_waits()
        try:
            self._profile.stop()
        except RuntimeError as error:
            raise CaptureError(f"{NOT_ALONE} ({error})") from error

    def _sample_if_recorded(self) -> None:
        """From the first step that is recorded on, record who waits for a core, unless a GPU computes.

        There the sampler could only make the host late.
        """
        import torch

        if self._ended == self._first and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._sampler = RunQueueSampler()
            self._sampler.start()

    def _add_waits(self) -> None:
        """Add those waits to the trace, which takes them only while it records."""
        if self._sampler is not None:
            waits, self._sampler = self._sampler.stop(), None
            if waits is not None:
                self._profile.add_metadata_json(METADATA_KEY, json.dumps(waits))

    def write(self, folder: Path, unfinished: int | None) -> None:
        """Write ``rank{R}.json.gz``; ``unfinished`` is the number of a step that was begun and does not count.

        Raises CaptureError.
        """
        if unfinished is not None:
            self._no_windows[unfinished] = "unfinished step"
        PROGRESS.report("wrote", _write_trace(self._profile, folder, self._no_windows).name)


def current_rank() -> int:
    """This process's rank: the process group's, else the environment's, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _write_trace(profile: Any, folder: Path, no_windows: Mapping[int, str]) -> Path:
    """Write what ``profile`` recorded, whole or not at all.

    ``no_windows`` gives another name to the range of some step, by number, so that nobody takes it for a window.
    """
    path = folder / f"rank{current_rank()}{ENDING}"
    names = {b'"ProfilerStep#%d"' % step: b'"%s"' % name.encode() for step, name in no_windows.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as packed:
            exported = packed.with_name("exported")
            profile.export_chrome_trace(os.path.relpath(exported))
            _check_is_whole(exported)
            with exported.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                for line in source:  # the exporter writes an event in a few lines
                    for old, new in names.items():
                        line = line.replace(old, new) if b"ProfilerStep#" in line else line
                    target.write(line)
    except OSError as error:
        reason = error.strerror or error
        raise CaptureError(f"{path}: cannot be written: {reason}; free some space or choose another folder") from error
    return path


def _check_is_whole(exported: Path) -> None:
    """The profiler's own writer says nothing when the disk is full: the file just ends early."""
    with exported.open("rb") as file:
        file.seek(max(0, exported.stat().st_size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"the profiler wrote only {exported.stat().st_size} bytes of it")
