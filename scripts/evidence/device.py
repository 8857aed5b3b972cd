"""The device that a rank measures on: its clock, its memory, and a way to let the host run ahead of it.

The idea: the numbers are about GPUs, but the same code runs on a CPU with everything ``SCALE`` times smaller, so that
it is known to work before a GPU is there. What a CPU cannot say (device time beside host time, memory) is None.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

CYCLES_PER_US = 1980
"""Of an H200's clock: only how long the device sleeps depends on it, no measurement."""

LEAST_AHEAD_US, MOST_AHEAD_US = 15_000.0, 90_000.0

REPEATS, WARMUP = 20, 4

TYPE = os.environ.get("EVIDENCE_DEVICE", "cuda")
SCALE = 1 if TYPE == "cuda" else 32
DTYPE = torch.bfloat16 if TYPE == "cuda" else torch.float32


def start() -> None:
    """Joins the process group, with this rank's device the current one."""
    if TYPE == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))


def device() -> torch.device:
    """This rank's."""
    return torch.device("cuda", torch.cuda.current_device()) if TYPE == "cuda" else torch.device("cpu")


def synchronize() -> None:
    """Waits for everything that was issued."""
    if TYPE == "cuda":
        torch.cuda.synchronize()


def sleep(microseconds: float) -> None:
    """Keeps the current stream busy, so that what is issued meanwhile finds its stream full. For 0, does nothing."""
    if TYPE == "cuda" and microseconds:
        torch.cuda._sleep(int(microseconds * CYCLES_PER_US))  # type: ignore[no-untyped-call]


def used_bytes() -> int | None:
    """Memory in use on the whole device: caching allocator, symmetric memory, communicators, everything."""
    if TYPE != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def largest(value: float) -> float:
    """Of all ranks: so that all of them pass a check, or none, and wait as long for each other."""
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def ahead_us(host_us: float) -> float:
    """How long every rank's device must sleep to let the slowest host issue work that took this one ``host_us``."""
    return largest(min(MOST_AHEAD_US, max(LEAST_AHEAD_US, 1.5 * host_us)))


def times(work: Callable[[], Any], ahead: bool = True) -> dict[str, Any]:
    """Medians of ``REPEATS`` runs on this rank, us, and the memory that they took, bytes.

    ahead: the device sleeps before each for longer than the host needs to issue it, as measured in the warm-up, so that
    what is timed is the device and not the host. ``slept_us`` is how long. ``peak_bytes`` is what the caching allocator
    handed out at most beyond what it had before.
    """
    device_us: list[float] = []
    host_us: list[float] = []
    resting = 0
    slept_us = LEAST_AHEAD_US if ahead else 0.0
    for at in range(WARMUP + REPEATS):
        if at == WARMUP and ahead:
            slept_us = ahead_us(max(host_us[-2:]))  # the first ones allocate, and make communicators
        dist.barrier()
        synchronize()
        if at == WARMUP and TYPE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
        on_device, on_host = once(work, slept_us)
        device_us.append(on_device)
        host_us.append(on_host)
    measured = {
        "device_us": statistics.median(device_us[WARMUP:]),
        "device_us_all": [round(t, 1) for t in device_us[WARMUP:]],
        "host_us": statistics.median(host_us[WARMUP:]),
        "slept_us": slept_us,
    }
    if TYPE == "cuda":
        measured["resting_bytes"] = resting
        measured["peak_bytes"] = torch.cuda.max_memory_allocated() - resting
        measured["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return measured


def once(work: Callable[[], Any], sleep_us: float) -> tuple[float, float]:
    """Microseconds on the device, which first sleeps, and on the host."""
    if TYPE != "cuda":
        began = time.perf_counter()
        work()
        took = (time.perf_counter() - began) * 1e6
        return took, took
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    sleep(sleep_us)
    start.record()
    began = time.perf_counter()
    work()
    host = (time.perf_counter() - began) * 1e6
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, host
