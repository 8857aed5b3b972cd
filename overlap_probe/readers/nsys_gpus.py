"""Reads what a database of Nsight Systems knows of the GPUs: what they are, and how busy their SMs were.

The idea: CUDA numbers the devices of each process anew (``CUDA_VISIBLE_DEVICES``), the profiler numbers those of the
machine. The file says which is which; only where it does not are the two numbers taken to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import sqlalchemy as sa

from overlap_probe.readers.nsys_schema import (
    COLUMNS,
    CUDA_DEVICES,
    GPUS,
    METRIC_NAMES,
    METRICS,
    Columns,
    Database,
    Expression,
    with_one_of,
)
from overlap_probe.tables import Device, SmSamples

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


def read_sm_samples(database: Database) -> Callable[[int | None, int], SmSamples]:
    """A function from (process id, CUDA's device number) to the samples of how busy that device's SMs were.

    There are some where it was recorded with ``nsys profile --gpu-metrics-devices``. Of several metrics of that name
    those of one are taken, the one with the most samples: each is an account of its own.
    """
    gpu_of = read_gpu_ids(database)
    metrics = sorted(
        {(kind, metric) for kind, metric, name in database.rows(METRIC_NAMES) if _SM_ACTIVE.match(name or "")}
    )
    rows = database.numbers(METRICS, *COLUMNS[METRICS], where=lambda column: _is_sample(column, metrics))
    samples_of: dict[int, SmSamples] = {}
    for kind, metric in metrics:
        mine = (rows["typeId"] == kind) & (rows["metricId"] == metric)
        time_ns, first = np.unique(rows["timestamp"][mine], return_index=True)
        gpu = kind & _GPU_BITS
        if len(time_ns) > len(samples_of.get(gpu, ())):
            samples_of[gpu] = SmSamples(time_ns, rows["value"][mine][first])
    none: SmSamples = SmSamples.from_columns(0)
    return lambda process, device: samples_of.get(gpu_of(process, device), none)


def _is_sample(column: Columns, metrics: Sequence[tuple[int, int]]) -> Expression:
    """Whether a row has a time and a percentage, and may be of one of some (``typeId``, ``metricId``)."""
    of_these = with_one_of(typeId={kind for kind, _ in metrics}, metricId={metric for _, metric in metrics})
    return sa.and_(of_these(column), column("timestamp").is_not(None), column("value").between(0, 100))
