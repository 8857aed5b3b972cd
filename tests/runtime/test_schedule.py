"""When gathers are issued, in which order, and how a schedule notices that the order has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import Implicit, Prefetch, Schedule, Serial, fully_shard
from fsdp_runtime.gather import Handle

from .conftest import OnRanks
from .models import local_batch, same_gradients, shard_children
from .recorder import recording


class Ordered(nn.Module):
    """Runs its layers in the order that the caller names."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = x * self.scale
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def _events(
    rank: int, world: int, schedule: Any, orders: list[list[int]], backward: bool, target_length: int = 1
) -> list[list[str]]:
    """The events of each forward or of each backward, after comparing gradients with the reference."""
    torch.manual_seed(1)
    reference = Ordered()
    sharded = shard_children(copy.deepcopy(reference), schedule=schedule, target_length=target_length)
    passes = []
    for order in orders:
        x = torch.randn(2 * world, 4)
        reference(x, order).square().mean().backward()
        with recording() as recorder:
            loss = sharded(local_batch(x, rank, world), order).square().mean()
            if backward:
                recorder.events.clear()
            else:
                passes.append(list(recorder.events))
            loss.backward()
        if backward:
            passes.append(recorder.events)
        assert not recorder.alive
        same_gradients(sharded, reference)
        for model in (reference, sharded):
            model.zero_grad()
    return passes


def _on_both_ranks(on_ranks: OnRanks, *args: Any) -> list[list[str]]:
    first, second = on_ranks(2, _events, *args)
    assert first == second
    return first


def _short(events: list[str], *kinds: str) -> str:
    """``"gather layers.0"`` as ``"g0"``; the root is ``r``."""
    words = [event.split() for event in events if event.split()[0] in (kinds or ("gather", "wait", "free"))]
    return " ".join(kind[0] + name.replace("<root>", "r").replace("layers.", "") for kind, name in words)


STRAIGHT = [0, 1, 2, 3]


def test_prefetch_waits_for_a_unit_issues_the_next_and_then_computes(on_ranks: OnRanks) -> None:
    first, second = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, STRAIGHT], False)
    # Nothing is known in the first pass; used units are released one unit later.
    assert _short(first) == "gr wr g0 w0 g1 w1 f0 g2 w2 f1 g3 w3 f2 f3"
    # A unit goes as soon as it was used, because the next one was gathered ahead; the root stays for the backward.
    assert _short(second) == "gr wr g0 w0 g1 f0 w1 g2 f1 w2 g3 f2 w3 f3"


def test_prefetch_in_the_backward_follows_the_reverse_order_from_the_first_step_on(on_ranks: OnRanks) -> None:
    first, second = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, STRAIGHT], True)
    assert _short(first) == _short(second)
    assert _short(first, "gather", "wait") == "g3 w3 g2 w2 g1 w1 g0 w0"


def test_a_reduction_is_issued_behind_the_next_gather_and_joined_before_the_one_after(on_ranks: OnRanks) -> None:
    _, second = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, STRAIGHT], True)
    # On a CPU a join blocks the host: it comes with the wait for the gather, before anything is issued to overlap.
    expected = "g3 w3 g2 w2 g1 r3 w1 j3 g0 r2 w0 j2 r1 j1 r0 j0 rr jr"
    assert _short(second, "gather", "wait", "reduce", "join") == expected


def test_a_deeper_prefetch_gathers_as_many_units_ahead(on_ranks: OnRanks) -> None:
    _, second = _on_both_ranks(on_ranks, Prefetch(depth=2), [STRAIGHT, STRAIGHT], False)
    assert _short(second, "gather", "wait") == "gr wr g0 g1 w0 g2 w1 g3 w2 w3"
    _, backward = _on_both_ranks(on_ranks, Prefetch(depth=2), [STRAIGHT, STRAIGHT], True)
    assert _short(backward, "gather", "wait") == "g3 g2 w3 g1 w2 g0 w1 w0"


@pytest.mark.parametrize("schedule", ["serial", "implicit"])
@pytest.mark.parametrize("backward", [False, True])
def test_serial_and_implicit_gather_when_the_turn_comes(on_ranks: OnRanks, schedule: str, backward: bool) -> None:
    for events in _on_both_ranks(on_ranks, schedule, [STRAIGHT, STRAIGHT], backward):
        gathers = _short(events, "gather", "wait").split()
        assert [name[1:] for name in gathers[::2]] == [name[1:] for name in gathers[1::2]]
        assert {name[0] for name in gathers[::2]} == {"g"}
        assert {name[0] for name in gathers[1::2]} == {"w"}


def test_a_changed_order_falls_back_and_is_followed_from_the_next_pass_on(on_ranks: OnRanks) -> None:
    changed = [0, 2, 1, 3]
    passes = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, changed, changed], False)
    # Unit 1 was foreseen after 0: it is kept until it is used; nothing is gathered ahead once the order is wrong.
    assert _short(passes[1], "gather", "wait") == "gr wr g0 w0 g1 g2 w2 w1 g3 w3"
    assert _short(passes[2], "gather", "wait") == "gr wr g0 w0 g2 w2 g1 w1 g3 w3"


def test_nothing_is_gathered_ahead_in_the_rest_of_a_pass_with_another_order(on_ranks: OnRanks) -> None:
    _, second = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, [3, 2, 1, 0]], False, 3)
    assert _short(second, "gather", "wait") == "gr wr g0 g3 w3 g2 w2 g1 w1 w0"


def test_units_that_were_foreseen_and_not_used_are_released_with_the_pass(on_ranks: OnRanks) -> None:
    _, second, third = _on_both_ranks(on_ranks, "prefetch", [STRAIGHT, [0, 3], [0, 3]], False)
    assert _short(second, "gather") == "gr g0 g1 g3"
    assert "f1" in _short(second).split()
    assert _short(third, "gather") == "gr g0 g3"


def test_a_reused_unit_follows_the_recorded_order_too(on_ranks: OnRanks) -> None:
    reused = [0, 1, 0, 2, 2]
    _, second = _on_both_ranks(on_ranks, "prefetch", [reused, reused], False)
    # 2 after 2: it is there already.
    assert _short(second, "gather") == "gr g0 g1 g0 g2"


def test_the_empty_order_and_a_longer_one_are_survived(on_ranks: OnRanks) -> None:
    orders: list[list[int]] = [STRAIGHT, [], [0, 1, 2, 3, 0, 1, 2, 3], [3], STRAIGHT]
    for schedule in ("serial", "implicit", "prefetch", Prefetch(depth=3)):
        _on_both_ranks(on_ranks, schedule, orders, False)


class Reentrant(nn.Module):
    """Each unit is checkpointed in the way in which its forward has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


def _reentrant(rank: int, world: int, depth: int) -> str:
    torch.manual_seed(1)
    reference = Reentrant()
    sharded = shard_children(copy.deepcopy(reference), schedule=Prefetch(depth))
    x = torch.randn(2 * world, 4)
    reference(x).square().mean().backward()
    loss = sharded(local_batch(x, rank, world)).square().mean()
    with recording() as recorder:
        loss.backward()
    assert not recorder.alive
    same_gradients(sharded, reference)
    return _short(recorder.events)


def test_a_forward_that_checkpointing_repeats_is_gathered_during_the_backward_before_it(on_ranks: OnRanks) -> None:
    # 3 is repeated first, and nothing foresaw it; its backward foresees 2, whose repetition therefore only waits.
    assert on_ranks(2, _reentrant, 1)[0] == "g3 w3 g2 f3 w2 g1 f2 w1 g0 f1 w0 f0"
    assert on_ranks(2, _reentrant, 2)[0] == "g3 w3 g2 g1 f3 w2 g0 f2 w1 w0 f1 f0"


def _host_waits(rank: int, world: int, schedule: Schedule) -> tuple[int, int]:
    """How often the host waited in a step, and for how many operations it had to."""
    model = shard_children(Ordered(), schedule=schedule)
    waits = []
    wait = Handle.wait

    def counted(handle: Handle, stream: Any) -> None:
        waits.append(handle)
        wait(handle, stream)

    for _ in range(2):
        waits.clear()
        with pytest.MonkeyPatch.context() as patch, recording() as recorder:
            patch.setattr(Handle, "wait", counted)
            model(torch.randn(2, 4), STRAIGHT).sum().backward()
    return len(waits), len(recorder.of("gather")) + 5  # reductions of the root and four layers


@pytest.mark.parametrize("schedule", [Serial(), Implicit(), Prefetch()])
def test_the_host_waits_once_for_each_collective_and_for_nothing_else(on_ranks: OnRanks, schedule: Schedule) -> None:
    for waits, operations in on_ranks(2, _host_waits, schedule):
        assert waits == operations


def _nested(rank: int, world: int) -> str:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    for block in model:
        fully_shard(block[1])
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        with recording() as recorder:
            model(torch.randn(2, 4)).sum().backward()
    return " ".join(recorder.of("gather"))


def test_nested_units_are_followed_in_the_order_in_which_they_begin(on_ranks: OnRanks) -> None:
    # Forward: in order of beginning. Backward: in reverse order of ending, so a block comes before its inner unit,
    # although the two return the same tensor.
    assert on_ranks(2, _nested)[0] == "0 0.1 1 1.1 1 1.1 0 0.1"
