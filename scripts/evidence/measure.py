"""Builds one case, checks its result against the unsharded model, times it and keeps a trace of it.

Device time is between two CUDA events around the work, on the stream that computes. The device sleeps before the first
one for longer than the host needs to issue the work, so that what is timed is the device and not the host.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from .cases import Case
from .models import DIM, Llama, linear_stack
from .shard import shard

REPEATS, WARMUP, TRACED = 20, 4, 3
AHEAD_CYCLES = 30_000_000
"""The device sleeps about 15 ms: longer than the slowest of the runtimes compared needs on the host for a forward."""

Result = dict[str, Any]


def measure(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    """``device_us`` and ``host_us``: medians on this rank. Raises AssertionError if the result is wrong."""
    return _KINDS[case.kind](case, mesh, traces)


def _gemm(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    model = linear_stack(_device())
    x = _batch(case.batch)
    with torch.no_grad():
        return _times(lambda: model(x))


def _gather(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    """All gathers of the forward without the matmuls: each layer returns its input."""
    model = linear_stack(_device())
    for layer in model:
        layer.forward = lambda x: x
    sharded = shard(case, model, list(model), mesh, mixed=False)
    x = torch.zeros(1, DIM, device=_device(), dtype=torch.bfloat16)
    with torch.no_grad():
        return _times(lambda: sharded(x))


def _linear(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    x = _batch(case.batch)
    model = linear_stack(_device())
    with torch.no_grad():
        expected = model(x)
        sharded = shard(case, model, list(model), mesh, mixed=False)
        for _ in range(3):
            torch.testing.assert_close(sharded(x), expected)
        result = _times(lambda: sharded(x))
        _trace(lambda: sharded(x), traces / f"rank{dist.get_rank()}.json.gz")
    return result


def _llama(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    torch.manual_seed(0)
    with torch.device(_device()):
        model = Llama()
        tokens = torch.randint(0, 32000, (4, 1024))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = float(F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()))
    sharded = shard(case, model, list(model.layers), mesh, mixed=True)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)
    losses = []

    def step() -> None:
        loss = F.cross_entropy(sharded(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()
    assert abs(float(losses[0]) - expected) < 0.02 * expected, f"loss {float(losses[0])}, unsharded {expected}"
    result = _times(step, ahead=False)
    assert float(losses[-1]) < float(losses[0])
    _trace(step, traces / f"rank{dist.get_rank()}.json.gz", ahead=False)
    return result


_KINDS: dict[str, Callable[[Case, DeviceMesh, Path], Result]] = {
    "gemm": _gemm,
    "gather": _gather,
    "linear": _linear,
    "llama": _llama,
}


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _batch(rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16, generator=generator)


def _times(work: Callable[[], Any], ahead: bool = True) -> Result:
    device, host = [], []
    for _ in range(WARMUP + REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        work()
        host.append((time.perf_counter() - began) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return {
        "device_us": statistics.median(device[WARMUP:]),
        "device_us_all": [round(t, 1) for t in device[WARMUP:]],
        "host_us": statistics.median(host[WARMUP:]),
    }


def _trace(work: Callable[[], Any], path: Path, ahead: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        for step in range(TRACED):
            if ahead:
                torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
            with record_function(f"step{step}"):
                work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def release() -> None:
    """Between cases: nothing of the last model is left on the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
