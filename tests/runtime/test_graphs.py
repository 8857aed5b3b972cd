"""A forward, or a whole step, can be captured as a CUDA graph: on the simulated device, by the rules of capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_runtime import FsdpError, Implicit, Prefetch, Schedule, Serial, fully_shard
from fsdp_runtime.parameter_group import ParameterGroup

from .conftest import OnRanks
from .simulated_device import (
    ALL_GATHER,
    CaptureError,
    Device,
    Event,
    SimulatedGather,
    SimulatedLinear,
    Stream,
    simulated_reduction,
)

SCHEDULES = [Serial(), Implicit(), Prefetch(1), Prefetch(2)]
RATE = 0.02


class Layer(nn.Module):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = SimulatedLinear.apply(self.device, x, self.weight)
        return output


def _sharded(device: Device, gather: SimulatedGather, **options: Any) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*[Layer(device) for _ in range(5)])
    for layer in model:
        fully_shard(layer, gather=gather, **options)
    return fully_shard(model, gather=gather, **options)


@contextlib.contextmanager
def _simulated(schedule: Schedule) -> Iterator[Device]:
    """Also: what is freed is overwritten at once, by whoever gets the memory next on the stream that it belongs to."""
    device = Device()

    def poisoned_free(group: ParameterGroup) -> None:
        if group.parameters and len(device.streams) > 1:
            stream = device.streams[ALL_GATHER] if schedule.concurrent else device.compute
            stream.enqueue(lambda: group._unsharded.fill_(float("nan")))

    with (
        mock.patch("torch.get_device_module", return_value=device),
        mock.patch.object(ParameterGroup, "free", poisoned_free),
        simulated_reduction(device),
    ):
        yield device


def _order(device: Device, first: int) -> list[Stream]:
    return sorted(device.streams, key=lambda stream: device.streams.index(stream) != first)


def _forward(rank: int, world: int, schedule: Schedule, target_length: int, first: int) -> None:
    with _simulated(schedule) as device, torch.no_grad():
        model = _sharded(device, SimulatedGather(), schedule=schedule, target_length=target_length)
        x = torch.randn(3, 4)

        def expected() -> torch.Tensor:
            result = x
            for layer in model:
                result = result @ layer.weight.to_local().T  # type: ignore[operator, union-attr]
            return result

        for _ in range(2):
            output = model(x)
            device.run(_order(device, first))
            assert torch.equal(output, expected())
        with device.capture() as graph:
            captured = model(x)
        for _ in range(2):
            x.copy_(torch.randn(3, 4))
            for layer in model:
                layer.weight.to_local().mul_(1.5)  # type: ignore[operator, union-attr]
            graph.replay(_order(device, first))
            assert torch.equal(captured, expected())
        output = model(x)
        device.run(_order(device, first))
        assert torch.equal(output, expected())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("target_length", [0, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_captured_forward_replays_with_new_inputs_and_weights(
    on_ranks: OnRanks, schedule: Schedule, target_length: int, first: int
) -> None:
    on_ranks(1, _forward, schedule, target_length, first)


def _training(rank: int, world: int, schedule: Schedule, first: int) -> None:
    with _simulated(schedule) as device:
        model = _sharded(device, SimulatedGather(), schedule=schedule)
        weights = [layer.weight.to_local().detach().clone() for layer in model]  # type: ignore[operator, union-attr]
        x, seed = torch.randn(3, 4), torch.randn(3, 4)

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            model(x).backward(seed)
            for parameter in model.parameters():
                local, gradient = parameter.to_local().detach(), parameter.grad.to_local()  # type: ignore
                device.compute.enqueue(partial(local.sub_, gradient, alpha=RATE))

        def check() -> None:
            inputs = [x]
            for weight in weights:
                inputs.append(inputs[-1] @ weight.T)
            gradient = seed
            for index in reversed(range(len(weights))):
                of_weight, gradient = gradient.T @ inputs[index], gradient @ weights[index]
                weights[index] -= RATE * of_weight
            for layer, weight in zip(model, weights, strict=True):
                actual = layer.weight.to_local().detach()  # type: ignore[operator, union-attr]
                torch.testing.assert_close(actual, weight, rtol=1e-5, atol=1e-5 * float(weight.abs().max()))

        step()
        device.run(_order(device, first))
        check()
        with device.capture() as graph:
            step()
        for _ in range(3):
            x.copy_(torch.randn(3, 4))
            seed.copy_(torch.randn(3, 4))
            graph.replay(_order(device, first))
            check()
        step()
        device.run(_order(device, first))
        check()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_captured_step_trains_as_an_eager_one(on_ranks: OnRanks, schedule: Schedule, first: int) -> None:
    on_ranks(1, _training, schedule, first)


def _refused(rank: int, world: int) -> None:
    gather = SimulatedGather()
    gather.uncapturable = "gather='simulated': it counts"
    with _simulated(Prefetch(1)) as device, torch.no_grad():
        model = _sharded(device, gather)
        x = torch.randn(3, 4)
        expected = model(x)
        device.run(device.streams)
        with (
            device.capture(),  # raises nothing: the error came before a stream was forked
            pytest.raises(FsdpError, match=r"gather='simulated': it counts; capture a model that was sharded with"),
        ):
            model(x)
        output = model(x)
        device.run(device.streams)
        assert torch.equal(output, expected)


def test_a_gather_that_cannot_be_captured_says_so_before_anything_is_issued(on_ranks: OnRanks) -> None:
    on_ranks(1, _refused)


def _halves(rank: int, world: int) -> None:
    with _simulated(Prefetch(1)) as device:
        model = _sharded(device, SimulatedGather())
        x, seed = torch.randn(3, 4), torch.randn(3, 4)

        def step() -> list[torch.Tensor]:
            model.zero_grad()
            model(x).backward(seed)
            device.run(device.streams)
            return [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore

        expected = step()
        with device.capture():
            output = model(x)
        with pytest.raises(FsdpError, match="capture both in one graph"):
            output.backward(seed)
        assert all(map(torch.equal, step(), expected))
        output = model(x)
        device.run(device.streams)
        with device.capture(), pytest.raises(FsdpError, match="capture both in one graph"):
            output.backward(seed)
        assert all(map(torch.equal, step(), expected))


def test_a_forward_captured_without_its_backward_makes_the_backward_raise(on_ranks: OnRanks) -> None:
    on_ranks(1, _halves)


def test_the_simulated_device_refuses_what_cuda_refuses() -> None:
    """The tests above can fail."""
    device = Device()
    other, event, outside = device.Stream(0), Event(), Event()
    outside.record(other)
    device.run(device.streams)

    def capture(join: bool) -> None:
        with device.capture():
            other.wait_stream(device.compute)
            other.enqueue(lambda: None)
            event.record(other)
            if join:
                device.compute.wait_event(event)

    capture(join=True)
    with pytest.raises(CaptureError, match="not joined"):
        capture(join=False)
    with pytest.raises(CaptureError, match="outside"), device.capture():
        other.enqueue(lambda: None)
    with pytest.raises(CaptureError, match="another capture"), device.capture():
        device.compute.wait_event(outside)
    with pytest.raises(CaptureError, match="another capture"):
        device.compute.wait_event(event)
