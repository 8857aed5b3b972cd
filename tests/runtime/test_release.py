"""Storage is released behind its consumer, by events alone, with poisoned storage and the latest consumer."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_runtime import Implicit, Prefetch, Schedule, Serial, context_of, fully_shard
from fsdp_runtime.parameter_group import ParameterGroup

from .conftest import OnRanks
from .simulated_device import (
    ALL_GATHER,
    COMPUTE,
    REDUCE_SCATTER,
    Device,
    SimulatedGather,
    SimulatedLinear,
    simulated_reduction,
)


class Layer(nn.Module):
    def __init__(self, device: Device, frozen: bool) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SimulatedLinear.apply(self.device, x, self.weight)


def _step(
    rank: int, world: int, schedule: Schedule, target_length: int, first: int, careless: tuple[int, ...]
) -> tuple[bool, bool]:
    """Two steps on the simulated device; whether output and input gradient have the exact bits of the plain model."""
    device = Device()

    def poisoned_free(group: ParameterGroup) -> None:
        if not group.parameters or len(device.streams) == 1:
            return  # nothing was gathered yet
        # Freed memory belongs to the next allocation on the all-gather stream (serial: the caller's).
        stream = device.streams[ALL_GATHER] if schedule.concurrent else device.compute
        stream.enqueue(lambda: group._unsharded.fill_(float("nan")))

    def forbidden(*args: Any) -> None:
        raise AssertionError("record_stream was called")

    with (
        mock.patch("torch.get_device_module", return_value=device),
        mock.patch.object(ParameterGroup, "free", poisoned_free),
        mock.patch.object(torch.Tensor, "record_stream", forbidden),
    ):
        torch.manual_seed(1)
        model = nn.Sequential(*[Layer(device, frozen=True) for _ in range(6)])
        weights = [layer.weight.detach().clone() for layer in model]
        for layer in model:
            fully_shard(layer, gather=SimulatedGather(), schedule=schedule, target_length=target_length)
        fully_shard(model, schedule=schedule, target_length=target_length)
        same = []
        for _ in range(2):
            for layer, weight in zip(model, weights, strict=True):  # an optimizer's step, on the caller's stream
                device.compute.enqueue(partial(layer.weight.to_local().mul_, 2))
                weight.mul_(2)
            x = torch.randn(3, 4, requires_grad=True)
            seed = torch.randn(3, 4)
            output = model(x)
            (result,) = torch.autograd.grad(output, x, seed)
            assert len(device.streams) == 3
            device.careless = set()
            order = sorted(device.streams, key=lambda s: device.streams.index(s) != first)
            device.run(order)
            device.careless = set(careless)
            expected, gradient = x.detach(), seed
            for weight in weights:
                expected = expected @ weight.T
            for weight in reversed(weights):
                gradient = gradient @ weight
            same = [torch.equal(output, expected), torch.equal(result, gradient)]
        assert context_of(model).all_gather_stream is device.streams[ALL_GATHER]
    return same[0], same[1]


@pytest.mark.parametrize("first", [COMPUTE, ALL_GATHER])
@pytest.mark.parametrize("target_length", [0, 1, 2])
@pytest.mark.parametrize("schedule", [Serial(), Implicit(), Prefetch(1), Prefetch(2)])
def test_poisoned_storage_and_the_latest_consumer_give_the_same_bits(
    on_ranks: OnRanks, schedule: Schedule, target_length: int, first: int
) -> None:
    assert on_ranks(1, _step, schedule, target_length, first, ()) == [(True, True)]


@pytest.mark.parametrize("schedule", [Implicit(), Prefetch(1)])
def test_without_the_events_the_bits_would_differ(on_ranks: OnRanks, schedule: Schedule) -> None:
    """The test above can fail: a release that does not wait for the consumer, a consumer not for the gather."""
    assert on_ranks(1, _step, schedule, 1, ALL_GATHER, (ALL_GATHER,)) == [(False, False)]
    assert on_ranks(1, _step, schedule, 1, COMPUTE, (COMPUTE,)) == [(False, False)]


def _gradients(rank: int, world: int, schedule: Schedule, first: int, careless: tuple[int, ...]) -> bool:
    """A step on the simulated device; whether an optimizer on the caller's stream reads the exact gradients."""
    device = Device()

    with (
        mock.patch("torch.get_device_module", return_value=device),
        mock.patch.object(ParameterGroup, "free"),
        simulated_reduction(device),
    ):
        torch.manual_seed(1)
        model = nn.Sequential(*[Layer(device, frozen=False) for _ in range(5)])
        weights = [layer.weight.detach().clone() for layer in model]
        for layer in model:
            fully_shard(layer, gather=SimulatedGather(), schedule=schedule)
        fully_shard(model, schedule=schedule)
        model(torch.zeros(3, 4, requires_grad=True))  # makes the streams
        device.careless = set(careless)
        x, seed = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        model(x).backward(seed)
        seen = [torch.zeros(4, 4) for _ in model]
        for layer, copy in zip(model, seen, strict=True):
            device.compute.enqueue(partial(copy.copy_, layer.weight.grad.to_local()))
        device.run(sorted(device.streams, key=lambda stream: device.streams.index(stream) != first))
    inputs = [x.detach()]
    for weight in weights:
        inputs.append(inputs[-1] @ weight.T)
    gradient = seed
    same = True
    for index in reversed(range(len(weights))):
        same = same and torch.equal(seen[index], gradient.T @ inputs[index])
        gradient = gradient @ weights[index]
    return same


@pytest.mark.parametrize("first", [COMPUTE, ALL_GATHER, REDUCE_SCATTER])
@pytest.mark.parametrize("schedule", [Serial(), Implicit(), Prefetch(1)])
def test_gradients_are_joined_before_the_optimizer_and_their_buffers_freed_behind_the_reduction(
    on_ranks: OnRanks, schedule: Schedule, first: int
) -> None:
    assert on_ranks(1, _gradients, schedule, first, ()) == [True]


def test_without_the_events_gradients_would_be_lost(on_ranks: OnRanks) -> None:
    assert on_ranks(1, _gradients, Prefetch(1), COMPUTE, (COMPUTE,)) == [False]
    assert on_ranks(1, _gradients, Prefetch(1), REDUCE_SCATTER, (REDUCE_SCATTER,)) == [False]
