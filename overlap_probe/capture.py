"""Profile a few steps of a training loop, on each rank, into one trace a rank (design, section 7).

The idea: a `Recorder` counts steps. It profiles `steps` of them after `warmup`, waits for the device while the profiler
is still on (else the last kernels are lost), writes the trace under a temporary name, and from then on does nothing.
With `capture` the loop calls it; `capture_optimizer_steps` calls it after each optimizer step of an unchanged script.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overlap_probe.errors import OverlapProbeError
from overlap_probe.progress import PROGRESS
from overlap_probe.record import describe_rank

OUT_VARIABLE = "OVERLAP_PROBE_OUT"
"""Environment variable that names the folder of traces; `overlap_probe run` sets it for the scripts that it runs."""


class CaptureError(OverlapProbeError):
    """A trace could not be recorded or written."""


@contextlib.contextmanager
def capture(out: str | os.PathLike[str], *, warmup: int = 2, steps: int = 3) -> Iterator[Callable[[], None]]:
    """Profile a loop of one's own on each rank: call what this gives at the end of each step.

    Writes ``rank{R}.json.gz`` into ``out`` (into the run's folder under `overlap_probe run`), as soon as ``warmup``
    + ``steps`` steps are done; later calls cost nothing. R is the process group's rank, else that of the environment,
    else 0. A loop that ends too soon gives a warning and the steps that there were; one that raises writes nothing.

    Raises:
        ValueError: ``warmup`` is negative or ``steps`` is less than 1.
        CaptureError: the trace cannot be written, or another capture of this process is still recording.
    """
    recorder = Recorder(Path(os.environ.get(OUT_VARIABLE) or out), warmup=warmup, steps=steps)
    _Automatic.stand_down()
    with _in_use(recorder):
        yield recorder.step


@contextlib.contextmanager
def capture_optimizer_steps(out: Path, *, warmup: int, steps: int) -> Iterator[None]:
    """Profile whatever runs inside, with an optimizer's step as the end of a step; yields to a `capture` inside.

    The first optimizer that steps counts, so that a loop with several of them is not counted twice.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    recorder = Recorder(out, warmup=warmup, steps=steps)
    recorder.kind_of_step = "optimizer step"
    recorder.other_way = ", or mark the steps with overlap_probe.capture"
    automatic = _Automatic(recorder)
    handle = register_optimizer_step_post_hook(automatic.after_step)
    try:
        with _in_use(recorder):
            yield
    finally:
        handle.remove()
        _Automatic.stand_down()


class _Automatic:
    """The capture that finds its steps itself; at most one a process, and it makes way for an explicit one."""

    current: _Automatic | None = None

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._counted: Callable[[], object | None] = lambda: None
        _Automatic.current = self

    def after_step(self, optimizer: object, args: Any, kwargs: Any) -> None:
        if self._counted() is None:
            self._counted = weakref.ref(optimizer)
        if self._counted() is optimizer:
            self.recorder.step()

    @classmethod
    def stand_down(cls) -> None:
        if cls.current is not None:
            cls.current.recorder.cancel()
            cls.current = None


@contextlib.contextmanager
def _in_use(recorder: Recorder) -> Iterator[None]:
    recorder.start()
    try:
        yield
    except BaseException:
        recorder.cancel()
        raise
    recorder.finish()


class Recorder:
    """Counts steps, profiles the ones that are wanted, writes the trace. Used once: start, steps, finish or cancel."""

    _active: Recorder | None = None

    kind_of_step = "step"
    other_way = ""
    """What else to try if there are too few of these steps."""

    def __init__(self, folder: Path, *, warmup: int, steps: int) -> None:
        if warmup < 0:
            raise ValueError(f"warmup: expected 0 or more steps, got {warmup}")
        if steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {steps}")
        self.folder, self.warmup, self.steps = folder, warmup, steps
        self.lead_in = 1 if warmup > 1 else 0
        """Steps of the warm-up that are recorded, too: recording begins on an idle device, so the host is late in the
        first step, as it never is in training. That step is in the trace, but is no window."""
        self.count = 0
        self._profile: Any = None

    def start(self) -> None:
        """Begin to count; recording itself begins after the warm-up.

        The last but one step of the warm-up runs with the profiler already warm; the last one is the lead-in.
        """
        from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

        if Recorder._active is not None:
            raise CaptureError("capture: another capture of this process is still recording; end it first")
        self._check_is_alone(recording=False)
        supported = supported_activities()  # type: ignore[no-untyped-call]
        warm = min(self.warmup, 1)
        wait, active = self.warmup - warm - self.lead_in, self.steps + self.lead_in
        self._profile = profile(
            activities=supported & {ProfilerActivity.CPU, ProfilerActivity.CUDA},
            schedule=schedule(wait=wait, warmup=warm, active=active, repeat=1),
            record_shapes=True,
        )
        Recorder._active = self
        self._profile.start()
        PROGRESS.report("state", "warm-up" if self.warmup else f"step 1/{self.steps}")

    def step(self) -> None:
        """End a step. Waits for the device where recording begins and ends, and nowhere else."""
        PROGRESS.beat()
        if self._profile is None:
            return
        self.count += 1
        done = self.count - self.warmup
        if done in (-self.lead_in, self.steps):
            _wait_for_device()
        self._check_is_alone(recording=done > -self.lead_in)
        self._profile.step()
        if done == self.steps:
            self._end(write=True)
        elif done >= 0:
            PROGRESS.report("state", f"step {done + 1}/{self.steps}")

    def _check_is_alone(self, *, recording: bool) -> None:
        """Only one profiler can record; torch lets a second one empty the first without a word."""
        import torch

        if torch.autograd._profiler_enabled() != recording:  # type: ignore[attr-defined]
            self.cancel()
            raise CaptureError("capture: another profiler works in this process; leave it out while capturing")

    def finish(self) -> None:
        """The loop is over. Without enough steps, writes those there were and says so."""
        if self._profile is None:
            return
        done = self.count - self.warmup
        note = (
            f"{max(done, 0)} of {self.steps} steps captured: {self.count} {self.kind_of_step}s seen, of which "
            f"the first {self.warmup} are the warm-up; run more of them, lower warmup or steps{self.other_way}"
        )
        _wait_for_device()
        self._end(write=done >= 1)
        PROGRESS.report("note", note)
        warnings.warn(note, stacklevel=4)

    def cancel(self) -> None:
        """Stop without writing anything."""
        if self._profile is not None:
            self._end(write=False)

    def _end(self, *, write: bool) -> None:
        profile, self._profile = self._profile, None
        Recorder._active = None
        profile.stop()
        if write:
            PROGRESS.report("state", "writing")
            no_windows = {"lead-in step": self.warmup - 1 if self.lead_in else None}
            no_windows["unfinished step"] = self.count if self.count < self.warmup + self.steps else None
            path = _write_trace(profile, self.folder, no_windows)
            PROGRESS.report("info", describe_rank())
            PROGRESS.report("wrote", path.name)


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def current_rank() -> int:
    """This process's rank: the process group's, else the environment's, else 0."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _write_trace(profile: Any, folder: Path, no_windows: dict[str, int | None]) -> Path:
    """Write what ``profile`` recorded as ``rank{R}.json.gz``, whole or not at all.

    The profiler opens a range for each step, whether it counts or not. ``no_windows`` gives another name to the range
    of some step, by number, so that nobody takes it for a window.
    """
    path = folder / f"rank{current_rank()}.json.gz"
    exported = folder / f".{path.stem}.{os.getpid()}.tmp"
    packed = exported.with_suffix(".gz.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(os.path.relpath(exported))
        _check_is_whole(exported)
        names = {
            b'"ProfilerStep#%d"' % step: b'"%s"' % name.encode()
            for name, step in no_windows.items()
            if step is not None
        }
        with exported.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            for line in source:  # the exporter writes an event in a few lines
                for old, new in names.items():
                    line = line.replace(old, new) if b"ProfilerStep#" in line else line
                target.write(line)
        os.replace(packed, path)
    except OSError as error:
        reason = error.strerror or error
        raise CaptureError(f"{path}: cannot be written: {reason}; free some space or choose another folder") from error
    finally:
        for leftover in (exported, packed):
            with contextlib.suppress(OSError):
                leftover.unlink()
    return path


def _check_is_whole(exported: Path) -> None:
    """The profiler's own writer says nothing when the disk is full: the file just ends early."""
    with exported.open("rb") as file:
        file.seek(max(0, exported.stat().st_size - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"the profiler wrote only {exported.stat().st_size} bytes of it")
