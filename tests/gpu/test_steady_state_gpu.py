"""Memory and host: how much is allocated in a forward, what stays after it, and that the host waits for nothing."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_runtime import Implicit, Prefetch, Schedule, fully_shard

from .conftest import GATHERS, SHARED

DIM, UNITS = 2048, 8
UNIT_BYTES = DIM * DIM * 4
RESTING_BYTES = 1 << 20
WAITING_CALLS = {
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cuMemCreate",
    "cuMemUnmap",
}
"""Of the CUDA API: what waits for the device, or may."""


def _make(mesh: DeviceMesh, gather: str, schedule: Schedule, target_length: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False, device="cuda") for _ in range(UNITS)])
    for unit in model:
        fully_shard(unit, mesh, gather=gather, schedule=schedule, target_length=target_length)  # type: ignore[arg-type]
    return fully_shard(model, mesh, gather=gather, schedule=schedule, target_length=target_length)  # type: ignore


def _allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


FEW = [(Prefetch(1), 1), (Prefetch(2), 3)]
ALL = [(schedule, length) for schedule in (Implicit(), Prefetch(1), Prefetch(2), Prefetch(3)) for length in range(4)]
CASES = [(gather, *case) for gather in GATHERS for case in (FEW if gather == "zero_cta" else ALL)]


@pytest.mark.parametrize(("gather", "schedule", "target_length"), CASES)
def test_forward_memory_is_bounded_and_returns_to_resting(
    mesh: DeviceMesh, gather: str, schedule: Schedule, target_length: int
) -> None:
    gc.collect()
    model = _make(mesh, gather, schedule, target_length)
    x = torch.randn(8, DIM, device="cuda")
    for _ in range(2):  # the first records the order; cuBLAS takes its workspaces
        model(x).sum().backward()
        model.zero_grad()
    resting = _allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        output = model(x)
    assert _allocated() - resting < RESTING_BYTES
    peak = torch.cuda.max_memory_allocated() - resting
    assert UNIT_BYTES <= peak < (target_length + 1 + max(1, schedule.depth)) * UNIT_BYTES
    del output

    torch.cuda.reset_peak_memory_stats()
    loss = model(x).sum()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - resting
    assert UNIT_BYTES <= peak < (target_length + 1 + max(1, schedule.depth)) * UNIT_BYTES
    loss.backward()
    del loss
    model.zero_grad()
    assert _allocated() - resting < RESTING_BYTES


@pytest.mark.parametrize("schedule", [Implicit(), Prefetch(1)])
@pytest.mark.parametrize("gather", [] if SHARED else GATHERS)  # gloo waits on the host
def test_the_host_waits_for_nothing_in_the_steady_state(
    mesh: DeviceMesh, gather: str, schedule: Schedule, tmp_path: Path
) -> None:
    model = _make(mesh, gather, schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randn(8, DIM, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()  # what the profiler does when it begins
        with record_function("steady"):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
    path = tmp_path / f"rank{mesh.get_local_rank()}.json"
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    (steady,) = [e for e in events if e["name"] == "steady" and e.get("cat") == "user_annotation"]
    calls = [
        event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and steady["ts"] <= event["ts"] < steady["ts"] + steady["dur"]
    ]
    assert any(call.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for call in calls)
    assert [call for call in calls if call in WAITING_CALLS] == []
