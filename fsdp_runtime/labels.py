"""Names of the profiler ranges, and the one function that opens them.

One grammar, so that a timeline can be read without knowing the runtime::

    fsdp_runtime::EVENT PHASE (UNIT)        fsdp_runtime::all_gather forward (layers.0)

EVENT is ``all_gather``, ``reduce_scatter``, ``all_reduce`` (each encloses exactly the calls that move bytes),
``compute`` (a unit's forward; nested units nest) or ``release``. PHASE is ``forward`` or ``backward``; a forward that
activation checkpointing repeats inside the backward is ``backward``. UNIT is the module's dotted name below the
outermost unit, which itself is ``<root>``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Event = Literal["all_gather", "reduce_scatter", "all_reduce", "compute", "release"]
Phase = Literal["forward", "backward"]

ROOT = "<root>"
"""UNIT of the outermost unit, whose dotted name is empty."""

NVTX_VARIABLE = "OVERLAP_PROBE_NVTX"
"""Environment variable that is ``1`` where Nsight Systems records: then each range is an NVTX range too."""

_EMITS_NVTX = torch._C._profiler.ActiveProfilerType.NVTX
"""What torch says where ``emit_nvtx`` is on: then it makes an NVTX range of each ``record_function`` by itself."""

_SILENT: AbstractContextManager[None] = nullcontext()


def label(event: Event, phase: Phase, unit: str) -> str:
    """The text of one range."""
    return f"fsdp_runtime::{event} {phase} ({unit})"


def annotate(event: Event, phase: Phase, unit: str) -> AbstractContextManager[object]:
    """Opens a range for whoever listens: torch.profiler, Nsight Systems, both or nobody.

    Where nobody listens it costs well under a microsecond: ``record_function`` alone takes several, on every call.
    """
    nvtx_range = _nvtx_range()
    if nvtx_range is not None and torch._C._autograd._profiler_type() != _EMITS_NVTX:
        return _annotate_nvtx(nvtx_range, label(event, phase, unit))
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(label(event, phase, unit))
    return _SILENT


@contextlib.contextmanager
def _annotate_nvtx(nvtx_range: Callable[[str], AbstractContextManager[object]], text: str) -> Iterator[None]:
    with torch.profiler.record_function(text), nvtx_range(text):
        yield


@functools.cache
def _nvtx_range() -> Callable[[str], AbstractContextManager[object]] | None:
    """Opens an NVTX range, or None where Nsight Systems does not record.

    torch's own NVTX comes first: Nsight Systems 2024.2 keeps its ranges, and those of the ``nvtx`` package up to
    0.2.11, but loses those of 0.2.12 to 0.2.17 without a word. A torch built without CUDA has none of its own.
    """
    if os.environ.get(NVTX_VARIABLE) != "1":
        return None
    if torch.cuda.is_available():
        return torch.cuda.nvtx.range
    try:
        import nvtx
    except ImportError:
        return None
    annotate_nvtx: Callable[[str], AbstractContextManager[object]] = nvtx.annotate
    return annotate_nvtx
