"""A forward, and a whole training step, captured as CUDA graphs: replays do what eager passes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import FsdpError, MixedPrecision, fully_shard

from .conftest import GATHERS

DIM, UNITS, WARMUP, STEPS = 256, 4, 3, 3
CAPTURABLE = [gather for gather in GATHERS if gather == "process_group"]

Step = Callable[[], torch.Tensor]


def _make(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    """The same sharded model on every rank, each unit with two parameters: gathers are grouped."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(UNITS)]).to("cuda")
    for unit in model:
        fully_shard(unit, mesh, **options)
    return fully_shard(model, mesh, **options)


def _captured(work: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Warmed up and captured on a stream of its own; the tensor that replays write their result to."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, result


def _shards(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
@pytest.mark.parametrize("gather", CAPTURABLE)
def test_a_captured_forward_replays_with_new_inputs_and_weights(
    mesh: DeviceMesh, gather: str, schedule: str, compute_dtype: torch.dtype | None
) -> None:
    model = _make(mesh, gather=gather, schedule=schedule, mixed_precision=MixedPrecision(compute_dtype))
    x = torch.randn(8, DIM, device="cuda")
    with torch.no_grad():
        graph, output = _captured(lambda: model(x))
        for _ in range(STEPS):
            before = output.clone()
            x.copy_(torch.randn(8, DIM, device="cuda"))
            for shard in _shards(model):
                shard.mul_(1.1)
            graph.replay()
            assert not torch.equal(output, before)
            torch.testing.assert_close(output, model(x))  # also: an eager pass after the capture is right


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
@pytest.mark.parametrize("gather", CAPTURABLE)
def test_a_captured_training_step_trains_as_an_eager_one(
    mesh: DeviceMesh, gather: str, schedule: str, set_to_none: bool
) -> None:
    x = torch.randn(8, DIM, device="cuda")

    def training() -> tuple[nn.Module, Step]:
        model = _make(mesh, gather=gather, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            result: torch.Tensor = loss.detach()
            return result

        return model, step

    eager, eager_step = training()
    captured, captured_step = training()
    graph, loss = _captured(captured_step)
    for _ in range(WARMUP):  # on the same input; the capture itself trains nothing
        eager_step()
    for _ in range(STEPS):
        x.copy_(torch.randn(8, DIM, device="cuda"))
        graph.replay()
        expected = eager_step()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    for actual, shard in zip(_shards(captured), _shards(eager), strict=True):
        torch.testing.assert_close(actual, shard, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(captured_step(), eager_step(), rtol=1e-4, atol=1e-6)  # eager again


@pytest.mark.parametrize("gather", [gather for gather in GATHERS if gather not in CAPTURABLE])
def test_a_gather_that_cannot_be_captured_says_so_and_the_model_stays_usable(mesh: DeviceMesh, gather: str) -> None:
    model = _make(mesh, gather=gather)
    x = torch.randn(8, DIM, device="cuda")
    with torch.no_grad():
        expected = model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = x * 2
            with pytest.raises(FsdpError, match=f"gather='{gather}'.*capture a model that was sharded with"):
                model(x)
        graph.replay()
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(model(x), expected)
