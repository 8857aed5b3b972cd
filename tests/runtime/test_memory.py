"""How much unsharded memory is alive, and when it goes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from fsdp_runtime import Implicit, Prefetch, Serial
from fsdp_runtime.layout import Layout

from .conftest import OnRanks
from .models import Root, shard_children
from .recorder import recording

DIM = 32
UNIT = DIM * DIM * 4  # bytes of one Linear without bias in fp32; the root's scale is smaller


def _forward_peak(rank: int, world: int, schedule: Any, target_length: int, children: int) -> tuple[int, int]:
    """Peak of unsharded bytes in the third forward, which knows the order, and what is alive after the backward."""
    model = shard_children(Root(DIM, children), schedule=schedule, target_length=target_length)
    for _ in range(3):
        with recording() as recorder:
            loss = model(torch.randn(2, DIM)).sum()
            peak = recorder.peak_bytes
            loss.backward()
    return peak, recorder.alive_bytes


@pytest.mark.parametrize("target_length", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [Serial(), Implicit(), Prefetch(1), Prefetch(2), Prefetch(3)])
def test_the_forward_peak_is_bounded_whatever_the_number_of_units(
    on_ranks: OnRanks, schedule: Any, target_length: int
) -> None:
    peaks = [on_ranks(2, _forward_peak, schedule, target_length, children)[0][0] for children in (8, 16)]
    assert peaks[0] == peaks[1]
    assert peaks[0] < (target_length + 1 + max(1, schedule.depth)) * UNIT
    # Not by gathering less than it may: the bound is used up to the one unit that the root does not fill.
    assert peaks[0] >= (target_length + max(1, schedule.depth)) * UNIT


def _resting(rank: int, world: int, schedule: Any, target_length: int) -> None:
    model = shard_children(Root(DIM), schedule=schedule, target_length=target_length)
    for _ in range(2):
        with recording() as recorder:
            with torch.no_grad():
                model(torch.randn(2, DIM))
            assert recorder.alive_bytes == 0
            model.eval()
            model.requires_grad_(False)
            model(torch.randn(2, DIM))  # gradients are enabled, but no backward can come
            assert recorder.alive_bytes == 0
            model.requires_grad_(True)
            output = model(torch.randn(2, DIM))
            assert recorder.alive_bytes > 0 or target_length == 0
            output.sum().backward()
            assert recorder.alive_bytes == 0


@pytest.mark.parametrize("target_length", [0, 1, 5])
@pytest.mark.parametrize("schedule", [Serial(), Implicit(), Prefetch(2)])
def test_everything_is_released_when_no_backward_can_come(on_ranks: OnRanks, schedule: Any, target_length: int) -> None:
    on_ranks(2, _resting, schedule, target_length)


def _reduction_inputs(rank: int, world: int, children: int, schedule: Any) -> int:
    """The most packed gradients that were alive at once in a backward."""
    model = shard_children(Root(DIM, children), schedule=schedule)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    pack = Layout.pack

    def watched(layout: Layout, *args: Any) -> torch.Tensor:
        nonlocal most
        packed = pack(layout, *args)
        alive.add(packed)
        most = max(most, len(alive))
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "pack", watched)
        for _ in range(2):
            model(torch.randn(2, DIM, requires_grad=True)).sum().backward()
    return most


@pytest.mark.parametrize("schedule", [Serial(), Prefetch()])
def test_inputs_of_reductions_do_not_add_up_with_depth(on_ranks: OnRanks, schedule: Any) -> None:
    for children in (3, 12):
        # One is packed while the one before is being reduced, which gloo's thread may hold on to a moment longer.
        assert max(on_ranks(2, _reduction_inputs, children, schedule)) <= 3
