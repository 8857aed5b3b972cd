"""Profile a few steps of a training loop, on each rank, into one trace a rank (design, section 7).

The idea: a `Recorder` counts steps. It profiles `steps` of them after `warmup`, waits for the device while the profiler
is still on (else the last kernels are lost), has the trace written, and from then on does nothing. It does not care who
records: `TorchRecording` and, where Nsight Systems records this process, `NsysRecording` have the same methods.
With `capture` the loop calls it; `capture_optimizer_steps` calls it after each optimizer step of an unchanged script.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overlap_probe.nsys_recording import NsysRecording, nsys_records
from overlap_probe.progress import PROGRESS
from overlap_probe.record import describe_rank
from overlap_probe.torch_recording import NOT_ALONE, CaptureError, TorchRecording

__all__ = ["OUT_VARIABLE", "CaptureError", "capture", "capture_optimizer_steps"]

OUT_VARIABLE = "OVERLAP_PROBE_OUT"
"""Environment variable that names the folder of traces; `overlap_probe run` sets it for the scripts that it runs."""


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
        self._recording: TorchRecording | NsysRecording | None = None

    def start(self) -> None:
        """Begin to count; recording itself begins after the warm-up."""
        if Recorder._active is not None:
            raise CaptureError("capture: another capture of this process is still recording; end it first")
        kind = NsysRecording if nsys_records() else TorchRecording
        recording = kind(warmup=self.warmup, steps=self.steps, lead_in=self.lead_in)
        self._check_is_alone(recording, begun=False)
        self._recording = recording
        Recorder._active = self
        recording.start()
        PROGRESS.report("state", "warm-up" if self.warmup else f"step 1/{self.steps}")

    def step(self) -> None:
        """End a step. Waits for the device where recording begins and ends, and nowhere else."""
        PROGRESS.beat()
        recording = self._recording
        if recording is None:
            return
        self.count += 1
        done = self.count - self.warmup
        if done in (-self.lead_in, self.steps):
            _wait_for_device()
        self._check_is_alone(recording, begun=done > -self.lead_in)
        recording.step()
        if done == self.steps:
            self._end(write=True)
        elif done >= 0:
            PROGRESS.report("state", f"step {done + 1}/{self.steps}")

    def _check_is_alone(self, recording: TorchRecording | NsysRecording, *, begun: bool) -> None:
        if not recording.is_alone(recording=begun):
            self.cancel()
            raise CaptureError(NOT_ALONE)

    def finish(self) -> None:
        """The loop is over. Without enough steps, writes those there were and says so."""
        if self._recording is None:
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
        if self._recording is not None:
            self._end(write=False)

    def _end(self, *, write: bool) -> None:
        recording, self._recording = self._recording, None
        Recorder._active = None
        assert recording is not None
        recording.stop()
        if write:
            PROGRESS.report("state", "writing")
            recording.write(self.folder, self.count if self.count < self.warmup + self.steps else None)
            PROGRESS.report("info", describe_rank())


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
