"""Marks steps for Nsight Systems, which records this process from outside: the other way to record (`capture`).

The idea: one NVTX range, `CAPTURE`, is opened when recording is to begin and closed when it is to end, and ``nsys``
waits for it (``--capture-range=nvtx``); steps are ranges inside it, named as torch.profiler names them. Opening it
returns when ``nsys`` has started, closing it when that has everything. Unlike ``cudaProfilerStart`` it works without
CUDA, too, and where NVTX is lost there is no report at all, rather than one without ranges. On GPUs torch turns
operators and ``record_function`` ranges (FSDP2's labels, a script's own) into NVTX (``emit_nvtx``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from overlap_probe.progress import PROGRESS
from overlap_probe.torch_recording import CaptureError

NVTX_VARIABLE = "OVERLAP_PROBE_NVTX"
"""Environment variable that is ``1`` where Nsight Systems records; `fsdp_runtime.labels` knows it, too."""

CAPTURE = "overlap_probe.capture"
"""Name of the range that starts and ends the recording."""


class NsysRecording:
    """Used once, as `torch_recording.TorchRecording` is."""

    def __init__(self, *, warmup: int, steps: int, lead_in: int) -> None:
        self._names = {step: f"ProfilerStep#{step}" for step in range(warmup, warmup + steps)}
        if lead_in:
            self._names[warmup - 1] = "lead-in step"
        self._step = -1
        self._nvtx = Nvtx()
        self._capture: Any = None
        self._in_step: Any = None
        self._operators: Any = None

    def is_alone(self, *, recording: bool) -> bool:
        """Whether no profiler of torch works, which would use what ``nsys`` uses."""
        import torch

        return recording or not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]

    def start(self) -> None:
        """Begin the first step."""
        self.step()

    def step(self) -> None:
        """End a step and begin the next one; the first and the last that are recorded wait for ``nsys``."""
        self._end_step()
        self._step += 1
        name = self._names.get(self._step)
        if name is not None:
            self._begin_capture()
            self._in_step = self._nvtx.start(name)

    def stop(self) -> None:
        """End the recording, if it has begun."""
        self._end_step()
        if self._operators is not None:
            self._operators.__exit__(None, None, None)
        if self._capture is not None:
            self._nvtx.end(self._capture)
        self._operators = self._capture = None

    def write(self, folder: Path, unfinished: int | None) -> None:
        """Tell the launcher that what ``nsys`` has recorded is worth keeping."""
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            PROGRESS.report("note", "Nsight Systems records nothing of what a CPU computes; leave out --profiler nsys")
        step = self._names.get(unfinished) if unfinished is not None else None
        PROGRESS.report("recorded", {"nvtx": self._nvtx.name, "unfinished": step})

    def _begin_capture(self) -> None:
        import torch

        if self._capture is not None:
            return
        self._capture = self._nvtx.start(CAPTURE)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._operators = torch.autograd.profiler.emit_nvtx()  # type: ignore[no-untyped-call]
            self._operators.__enter__()

    def _end_step(self) -> None:
        if self._in_step is not None:
            self._nvtx.end(self._in_step)
            self._in_step = None


class Nvtx:
    """Opens and closes NVTX ranges: torch's own where it was built with them, else those of the package ``nvtx``."""

    name: str
    """Whose ranges they are, with its version."""
    start: Callable[[str], Any]
    end: Callable[[Any], object]

    def __init__(self) -> None:
        """Raises CaptureError if there is neither."""
        import torch

        if hasattr(torch._C, "_nvtx"):
            self.name = f"torch {torch.__version__}"
            self.start, self.end = torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end
            return
        try:
            import nvtx
        except ImportError as error:
            raise CaptureError(
                "--profiler nsys: this torch is a build without NVTX; pip install nvtx==0.2.11, or leave the option out"
            ) from error
        self.name = "the package nvtx"
        with contextlib.suppress(PackageNotFoundError):
            self.name += f" {version('nvtx')}"
        self.start, self.end = nvtx.start_range, nvtx.end_range


def nsys_records() -> bool:
    """Whether this process was told that Nsight Systems records it."""
    return os.environ.get(NVTX_VARIABLE) == "1"
