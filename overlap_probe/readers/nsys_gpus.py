"""Reads what a database of Nsight Systems knows of the GPUs: what they are, and how busy their SMs were.

The idea: CUDA numbers the devices of each process anew (``CUDA_VISIBLE_DEVICES``), the profiler numbers those of the
machine. The file says which is which; only where it does not are the two numbers taken to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlap_probe.readers.nsys_schema import CUDA_DEVICES, GPUS, METRIC_NAMES, METRICS, Database, is_database
from overlap_probe.tables import I64, Device, Trace

_SM_ACTIVE = re.compile(r"SMs? Active\b")
_GPU_BITS = 0xFF
"""Part of ``typeId`` that is the GPU's id."""


def read_devices(database: Database) -> Callable[[int | None, int], Device]:
    """A function from (process id, CUDA's device number) to what the file knows of that device."""
    known = {gpu: _device(*rest) for gpu, *rest in database.rows(GPUS)}
    gpu_of = read_gpu_ids(database)
    return lambda process, device: known.get(gpu_of(process, device), Device())


def read_gpu_ids(database: Database) -> Callable[[int | None, int], int]:
    """A function from (process id, CUDA's device number) to the profiler's number of the GPU."""
    gpu_of = {(process, device): gpu for gpu, device, process in database.rows(CUDA_DEVICES)}
    return lambda process, device: gpu_of.get((-1 if process is None else process, device), device)


def _device(name: str | None, sms: int, registers: int, shared_bytes: int, warps: int, warp_threads: int) -> Device:
    def known(number: int) -> int | None:
        return number if number > 0 else None

    threads = warps * warp_threads if warps > 0 and warp_threads > 0 else None
    return Device(name, known(sms), known(registers), known(shared_bytes), threads)


@dataclass(frozen=True, slots=True)
class SmActivity:
    """Samples of the share of SMs that had work, in the order of time."""

    time_ns: I64
    percent: npt.NDArray[np.float64]

    def mean(self, start_ns: I64, end_ns: I64) -> npt.NDArray[np.float64]:
        """Mean of the samples inside each interval [start, end); NaN where there is none."""
        done = np.concatenate(([0.0], np.cumsum(self.percent)))
        first, last = np.searchsorted(self.time_ns, start_ns), np.searchsorted(self.time_ns, end_ns)
        means = np.full(len(start_ns), np.nan)
        np.divide(done[last] - done[first], last - first, out=means, where=last > first)
        return means


def read_gpu_metrics(trace: Trace) -> SmActivity | None:
    """How busy the SMs of the trace's device were; None where its file has no GPU metrics, or is no database.

    They are recorded with ``nsys profile --gpu-metrics-devices``. Raises TraceError if the file is damaged.
    """
    path = Path(trace.path)
    if trace.format != "nsys" or trace.device_index is None or not path.is_file() or not is_database(path):
        return None
    with Database(path) as database:
        gpu = read_gpu_ids(database)(trace.process, trace.device_index)
        metrics = [
            (kind, metric)
            for kind, metric, name in database.rows(METRIC_NAMES)
            if kind & _GPU_BITS == gpu and _SM_ACTIVE.match(name or "")
        ]
        if not metrics:
            return None
        kinds, numbers = zip(*metrics, strict=True)
        samples = database.numbers(METRICS, "timestamp", "value", only={"typeId": kinds, "metricId": numbers})
    order = np.argsort(samples["timestamp"], kind="stable")
    return SmActivity(samples["timestamp"][order], samples["value"][order].astype(np.float64))
