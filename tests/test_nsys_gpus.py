"""GPUs in a database of Nsight Systems: what they are, and how busy their SMs were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from nsys_databases import VM, NsysDatabase
from test_nsys import GEMM, read_one

from overlap_probe.readers.nsys_gpus import SmActivity, read_gpu_metrics
from overlap_probe.tables import Device


def with_two_gpus() -> NsysDatabase:
    database = NsysDatabase(pid=580)
    database.kernel(GEMM, 10, 20, 5, deviceId=0)
    for gpu, name, sms in ((0, "NVIDIA H100", 114), (1, "NVIDIA H200", 132)):
        database.add("TARGET_INFO_GPU", vmId=VM, id=gpu, name=name, smCount=sms, maxWarpsPerSm=64, threadsPerWarp=32)
    return database


def ns(*microseconds: float) -> np.ndarray:
    return np.array([us * 1000 for us in microseconds], np.int64)


def test_a_device_is_the_gpu_of_the_same_number(tmp_path: Path) -> None:
    trace = read_one(with_two_gpus(), tmp_path)
    assert trace.device == Device("NVIDIA H100", 114, threads_per_sm=2048)


def test_devices_that_the_process_numbers_anew_are_looked_up(tmp_path: Path) -> None:
    database = with_two_gpus()
    database.add("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=900)
    database.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=580)
    trace = read_one(database, tmp_path)
    assert (trace.device_index, trace.device.name) == (0, "NVIDIA H200")


def test_what_the_file_does_not_say_of_a_gpu_is_unknown(tmp_path: Path) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    database.add("TARGET_INFO_GPU", vmId=VM, id=0, smCount=0)
    assert read_one(database, tmp_path).device == Device()


def test_samples_of_the_gpu_that_the_trace_ran_on_are_read_in_order(tmp_path: Path) -> None:
    database = with_two_gpus()
    database.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=580)
    kind = 1 << 56
    for gpu in (0, 1):
        for metric, name in ((7, "GR Active [Throughput %]"), (8, "SMs Active [Throughput %]")):
            database.add(
                "TARGET_INFO_GPU_METRICS", typeId=kind | gpu, typeName="gh100", metricId=metric, metricName=name
            )
    for us, value in ((30, 20), (10, 100), (20, 60)):
        database.add("GPU_METRICS", timestamp=us * 1000, typeId=kind | 1, metricId=8, value=value)
        database.add("GPU_METRICS", timestamp=us * 1000, typeId=kind | 1, metricId=7, value=1)
        database.add("GPU_METRICS", timestamp=us * 1000, typeId=kind, metricId=8, value=2)
    samples = read_gpu_metrics(read_one(database, tmp_path))
    assert samples is not None
    assert samples.time_ns.tolist() == [10_000, 20_000, 30_000]
    assert samples.percent.tolist() == [100.0, 60.0, 20.0]


def test_the_mean_inside_an_interval_counts_the_samples_inside_it() -> None:
    samples = SmActivity(ns(10, 20, 30), np.array([100.0, 60.0, 20.0]))
    # [10, 30) has the samples 100 and 60; [30, 40) has 20; [11, 20) has none; an empty interval has none.
    means = samples.mean(ns(10, 30, 11, 20), ns(30, 40, 20, 20))
    assert means[:2].tolist() == [80.0, 20.0]
    assert np.isnan(means[2:]).all()


def test_a_trace_without_metrics_has_no_samples(tmp_path: Path) -> None:
    trace = read_one(with_two_gpus(), tmp_path)
    assert read_gpu_metrics(trace) is None
    assert read_gpu_metrics(replace(trace, format="kineto")) is None
