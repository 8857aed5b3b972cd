"""What a profiler sees: the names of ranges, what they enclose, and gathers that really run beside matmuls."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import fully_shard, labels

from .conftest import OnRanks
from .models import Root, shard_children

LABEL = re.compile(r"fsdp_runtime::(all_gather|reduce_scatter|all_reduce|compute|release) (forward|backward) \((.+)\)")

Row = tuple[str, int, float, float]  # name, thread, start, end (us)


def _rows(path: str) -> list[Row]:
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    return [(e["name"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]


def _profiled(path: str, step: Any, warmup: int, steps: int) -> list[Row]:
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=steps)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
        acc_events=True,
    ) as profiler:
        for _ in range(warmup + steps):
            step()
            profiler.step()
    return _rows(path)


def _inside(inner: Row, outer: Row) -> bool:
    return inner[1] == outer[1] and outer[2] <= inner[2] and inner[3] <= outer[3]


def _step_ranges(rank: int, world: int, folder: str) -> list[Row]:
    model = shard_children(Root(children=2, bias=True))
    return _profiled(f"{folder}/{rank}.json", lambda: model(torch.randn(2, 16)).sum().backward(), warmup=2, steps=1)


def test_ranges_name_event_phase_and_unit_and_enclose_the_calls(on_ranks: OnRanks, tmp_path: Path) -> None:
    for rows in on_ranks(2, _step_ranges, str(tmp_path)):
        ranges = [row for row in rows if row[0].startswith("fsdp_runtime")]
        assert all(LABEL.fullmatch(name) for name, *_ in ranges)
        counted = Counter(name.removeprefix("fsdp_runtime::") for name, *_ in ranges)
        units = ["<root>", "layers.0", "layers.1"]
        expected = Counter(
            [f"{event} forward ({unit})" for event in ("all_gather", "compute") for unit in units]
            + [f"reduce_scatter backward ({unit})" for unit in units]
            # The root's storage stays for the backward, the children's does not.
            + [f"all_gather backward ({unit})" for unit in units[1:]]
            + [f"release forward ({unit})" for unit in units[1:]]
            + [f"release backward ({unit})" for unit in units]
        )
        assert counted == expected
        calls = [row for row in rows if row[0].startswith("c10d::")]
        communication = [row for row in ranges if "all_gather" in row[0] or "reduce_scatter" in row[0]]
        # One operation for all parameters of a unit, and none outside a range.
        assert [sum(_inside(call, outer) for call in calls) for outer in communication] == [1] * len(communication)
        assert len(calls) == len(communication)
        computes = {LABEL.fullmatch(row[0])[3]: row for row in ranges if "::compute" in row[0]}
        assert all(_inside(computes[unit], computes["<root>"]) for unit in units[1:])


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def _recomputed(rank: int, world: int, folder: str) -> list[Row]:
    model = _Checkpointed()
    for layer in model.layers:
        fully_shard(layer[0])
    shard_children(model)
    x = torch.randn(2, 4, requires_grad=True)
    return _profiled(f"{folder}/{rank}.json", lambda: model(x).sum().backward(), warmup=1, steps=1)


def test_a_forward_repeated_in_the_backward_is_labelled_backward(on_ranks: OnRanks, tmp_path: Path) -> None:
    for rows in on_ranks(2, _recomputed, str(tmp_path)):
        phases = Counter(m.groups() for m in (LABEL.fullmatch(row[0]) for row in rows) if m and m[1] != "release")
        for unit in ("layers.0", "layers.1", "layers.0.0", "layers.1.0"):
            assert phases["compute", "forward", unit] == 1
            assert phases["compute", "backward", unit] == 1
        for unit in ("layers.0.0", "layers.1.0"):
            assert phases["all_gather", "forward", unit] == 1
            assert phases["all_gather", "backward", unit] == 1


def _gathers_beside_matmuls(rank: int, world: int, folder: str, schedule: str) -> list[list[bool]]:
    """For each profiled step and child gathered in its forward: whether its gather ran beside a matmul."""
    dim, batch, children = 1536, 256, 4
    model = shard_children(Root(dim, children), schedule=schedule)

    def step() -> None:
        model(torch.randn(batch, dim)).square().mean().backward()
        model.zero_grad()

    rows = _profiled(f"{folder}/{rank}.json", step, warmup=2, steps=3)
    matmuls = [row for row in rows if row[0] in ("aten::mm", "aten::addmm")]
    gathers = sorted((row for row in rows if row[0] == "gloo:all_gather"), key=lambda row: row[2])
    result = []
    for window in sorted((row for row in rows if row[0].startswith("ProfilerStep")), key=lambda row: row[2]):
        in_step = [row for row in gathers if window[2] <= row[2] < window[3]]
        assert len(in_step) == 1 + 2 * children  # the root once, each child forward and backward
        forward = in_step[1 : 1 + children]
        result.append([any(max(g[2], m[2]) < min(g[3], m[3]) for m in matmuls) for g in forward])
    return result


def test_prefetch_hides_every_gather_but_the_first_and_serial_none(on_ranks: OnRanks, tmp_path: Path) -> None:
    overlapped = [
        step[1:] for steps in on_ranks(2, _gathers_beside_matmuls, str(tmp_path), "prefetch") for step in steps
    ]
    # Not all 2 * 3 * 3: where other processes hold the cores, a rank may get none between issuing a gather and
    # computing.
    assert sum(map(sum, overlapped)) >= 15
    for steps in on_ranks(2, _gathers_beside_matmuls, str(tmp_path), "serial"):
        assert steps == [[False] * 4] * 3


@pytest.fixture
def nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the NVTX ranges opened through a stand-in for the nvtx package."""
    opened: list[str] = []

    @contextlib.contextmanager
    def annotate(text: str) -> Iterator[None]:
        opened.append(text)
        yield

    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    labels._nvtx_range.cache_clear()
    yield opened
    labels._nvtx_range.cache_clear()


def test_ranges_are_nvtx_ranges_where_nsight_systems_records(
    nvtx_ranges: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(labels.NVTX_VARIABLE, "1")
    with labels.annotate("all_gather", "forward", "layers.0"):
        pass
    assert nvtx_ranges == ["fsdp_runtime::all_gather forward (layers.0)"]


def test_nobody_listens_by_default(nvtx_ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(labels.NVTX_VARIABLE, raising=False)
    with labels.annotate("release", "backward", labels.ROOT):
        pass
    assert nvtx_ranges == []


def test_torchs_own_nvtx_comes_first(nvtx_ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(labels.NVTX_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert labels._nvtx_range() is torch.cuda.nvtx.range
