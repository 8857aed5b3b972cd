"""GPUs in a database of Nsight Systems: what they are, and how busy their SMs were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from nsys_databases import VM, NsysDatabase
from test_nsys import GATHER, GEMM, read_one

from overlap_probe import analyze
from overlap_probe.intervals import Intervals
from overlap_probe.render import text, to_dict
from overlap_probe.render.document import from_dict
from overlap_probe.render.page import page
from overlap_probe.results import RunAnalysis
from overlap_probe.sm_activity import activity_of
from overlap_probe.tables import Device, SmSamples


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


KIND = 1 << 56
"""High bits of a ``typeId``: the kind of the event; the GPU is in the low ones."""


def sample(database: NsysDatabase, us: float, percent: int, gpu: int = 0, metric: int = 8) -> None:
    database.add("GPU_METRICS", timestamp=round(us * 1000), typeId=KIND | gpu, metricId=metric, value=percent)


def name_metrics(database: NsysDatabase, *gpus: int) -> None:
    for gpu in gpus:
        for metric, name in ((7, "GR Active [Throughput %]"), (8, "SMs Active [Throughput %]")):
            database.add(
                "TARGET_INFO_GPU_METRICS", typeId=KIND | gpu, typeName="gh100", metricId=metric, metricName=name
            )


def test_samples_of_the_gpu_that_the_trace_ran_on_are_read_in_order(tmp_path: Path) -> None:
    database = with_two_gpus()
    database.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=580)
    name_metrics(database, 0, 1)
    for us, value in ((30, 20), (10, 100), (20, 60)):
        sample(database, us, value, gpu=1)
        sample(database, us, 1, gpu=1, metric=7)
        sample(database, us, 2, gpu=0)
    samples = read_one(database, tmp_path).sm_samples
    assert samples.time_ns.tolist() == [10_000, 20_000, 30_000]
    assert samples.percent.tolist() == [100, 60, 20]


def with_two_gathers() -> NsysDatabase:
    """A gather [100, 200) and one [300, 400) us."""
    database = NsysDatabase()
    for start in (100, 300):
        database.kernel(GATHER, start, start + 100, start - 20, streamId=21)
    return database


def test_each_collective_says_how_busy_the_sms_were_while_it_ran(tmp_path: Path) -> None:
    database = with_two_gathers()
    name_metrics(database, 0)
    # [100, 200) holds the samples at 100 and 150, mean (10 + 45) / 2 = 27.5; 99, 200 and 250 lie in neither.
    for us, percent in ((99, 90), (100, 10), (150, 45), (200, 80), (250, 100)):
        sample(database, us, percent)
    run = RunAnalysis((analyze(read_one(database, tmp_path)),))
    first, second = run.ranks[0].whole.collectives
    assert (first.sm_active_percent, first.sm_samples) == (27.5, 2)
    assert (second.sm_active_percent, second.sm_samples) == (None, 0)
    assert from_dict(json.loads(json.dumps(to_dict(run))))[0].ranks[0].whole == run.ranks[0].whole
    assert text.render_collectives(run).count("27.5 % of SMs active (2 samples)") == 1
    assert [c["evidence"].endswith("27.5 % of SMs active (2 samples)") for c in page(run)["collectives"]] == [
        True,
        False,
    ]


def test_samples_between_the_copies_of_one_collective_are_not_inside_it() -> None:
    # Two copies [0, 10) and [20, 30) are collective 1; the sample at 15 is in the gap. (2 + 6) / 2 = 4.
    samples = SmSamples(ns(5, 15, 25), np.array([2, 90, 6], np.int64))
    pieces = Intervals(ns(0, 20), ns(10, 30))
    assert activity_of(samples, np.array([1, 1]), pieces, 2) == [(None, 0), (4.0, 2)]


def test_without_metrics_nothing_is_said_of_the_sms(tmp_path: Path) -> None:
    analysis = analyze(read_one(with_two_gathers(), tmp_path))
    assert {(c.sm_active_percent, c.sm_samples) for c in analysis.whole.collectives} == {(None, None)}
    assert "SMs" not in text.render_collectives(RunAnalysis((analysis,)))


def percents(database: NsysDatabase, folder: Path) -> list[int]:
    return read_one(database, folder).sm_samples.percent.tolist()


def test_what_is_no_time_or_no_percentage_is_no_sample(tmp_path: Path) -> None:
    database = with_two_gathers()
    name_metrics(database, 0)
    for us, value in enumerate((0, -1, 100, 101, 2**62, None, "x", 40)):
        database.add("GPU_METRICS", timestamp=us, typeId=KIND, metricId=8, value=value)
    database.add("GPU_METRICS", timestamp=None, typeId=KIND, metricId=8, value=50)
    assert percents(database, tmp_path) == [0, 100, 40]


def test_of_two_metrics_of_that_name_one_is_taken_and_they_are_not_mixed(tmp_path: Path) -> None:
    database = with_two_gathers()
    name_metrics(database, 0)
    other = {"typeId": KIND | 256, "typeName": "gh100", "metricId": 9, "metricName": "SM Active"}
    database.add("TARGET_INFO_GPU_METRICS", **other)
    database.add("TARGET_INFO_GPU_METRICS", **other | {"typeId": KIND})
    for us, of_first in ((10, 30), (20, 40), (20, 40)):  # the last one twice
        sample(database, us, of_first)
    sample(database, 15, 99, metric=9)
    sample(database, 16, 98, gpu=256, metric=9)
    assert percents(database, tmp_path) == [30, 40]
