"""What the gathers really run: copies, and nothing but copies, between the labels of the gathers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

from .conftest import GATHERS, SHARED, WORLD
from .models import make

Event = dict[str, Any]


def _profiled(mesh: DeviceMesh, gather: str, tmp_path: Path) -> Path:
    model = make(mesh, gather=gather)
    x = torch.randn(8, 512, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        model(x).sum().backward()
        torch.cuda.synchronize()
    path = tmp_path / f"rank{mesh.get_local_rank()}.json"
    profiler.export_chrome_trace(str(path))
    return path


def _gathers(path: Path) -> dict[str, list[Event]]:
    """By label: the device rows that were launched inside it."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    labels = [
        e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("fsdp_runtime::all_gather")
    ]
    found: dict[str, list[Event]] = {label["name"]: [] for label in labels}
    for row in (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")):
        launch = launches.get(row["args"].get("correlation"))
        for label in labels:
            inside = launch is not None and label["tid"] == launch["tid"]
            if inside and label["ts"] <= launch["ts"] < label["ts"] + label["dur"]:
                found[label["name"]].append(row)
    return found


@pytest.mark.parametrize("gather", [name for name in GATHERS if name != "process_group" and WORLD > 1])
def test_a_gather_is_copies_and_nothing_else(mesh: DeviceMesh, gather: str, tmp_path: Path) -> None:
    gathers = _gathers(_profiled(mesh, gather, tmp_path))
    assert len(gathers) == 5 + 4  # the root and 4 children forward; the root is still there for the backward
    for label, rows in gathers.items():
        parameters = 1 if "<root>" in label else 2
        assert {row["cat"] for row in rows} == {"gpu_memcpy"}, [row["name"] for row in rows]
        assert len({row["args"]["stream"] for row in rows}) == 1
        peers = [row for row in rows if "PtoP" in row["name"]]
        if gather == "copy_engine":
            assert len(rows) == WORLD * parameters
        if not SHARED:
            assert len(peers) == (WORLD - 1) * parameters, [row["name"] for row in rows]
        if not SHARED and gather == "zero_cta":
            assert len(rows) == len(peers), "in place: no copy inside the device"


@pytest.mark.parametrize("gather", [name for name in GATHERS if name != "process_group" and WORLD > 1])
def test_overlap_probe_sees_one_copy_engine_collective_a_gather(mesh: DeviceMesh, gather: str, tmp_path: Path) -> None:
    import overlap_probe as op

    analysis = op.analyze(op.read_trace(_profiled(mesh, gather, tmp_path)))
    frame = analysis.to_frame()
    forward = frame[(frame["window"] == "whole") & (frame["op"] == "all_gather") & (frame["phase"] == "forward")]
    assert sorted(forward["unit"]) == ["<root>", "layers.0", "layers.1", "layers.2", "layers.3"]
    assert set(forward["mechanism"]) == {"copy_engine"}
