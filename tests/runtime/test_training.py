"""What people do around a backward: mixed precision, accumulation, clipping, freezing, checkpointing."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import MixedPrecision, Prefetch, fully_shard, no_sync

from .conftest import OnRanks
from .models import (
    Mlp,
    Root,
    Transformer,
    close,
    local_batch,
    same_gradients,
    same_parameters,
    shard_children,
    train_alike,
)
from .recorder import recording

SCHEDULES = ["serial", "implicit", "prefetch"]


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


# Mixed precision


def _mixed_precision(rank: int, world: int, reduce_dtype: torch.dtype | None) -> None:
    """The reference does by hand what the runtime promises: a bf16 copy computes, fp32 weights are updated."""
    torch.manual_seed(1)
    master = Root(bias=True)
    precision = MixedPrecision(compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    sharded = shard_children(copy.deepcopy(master), mixed_precision=precision)
    dtypes = []
    sharded.layers[0].register_forward_pre_hook(lambda m, args: dtypes.append((m.weight.dtype, args[0].dtype)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (master, sharded)]
    for step in range(3):
        batch = torch.randn(2 * world, 16)
        gradients = []
        for r in range(world):
            computing = copy.deepcopy(master).bfloat16()
            _loss(computing(local_batch(batch, r, world).bfloat16()).float()).backward()
            gradients.append([p.grad.to(reduce_dtype or torch.bfloat16) for p in computing.parameters()])
        for parameter, *parts in zip(master.parameters(), *gradients, strict=True):
            parameter.grad = (torch.stack(parts).sum(0) / world).float()
        _loss(sharded(local_batch(batch, rank, world)).float()).backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in sharded.parameters())
        # bf16 reduction rounds once more, at 2^-8.
        same_gradients(sharded, master, 1e-6 if reduce_dtype is torch.float32 else 2**-7)
        for parameter, expected in zip(sharded.parameters(), master.parameters(), strict=True):
            expected.grad = parameter.grad.full_tensor()  # so that rounding does not add up over steps
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_parameters(sharded, master)
        assert dtypes.pop() == (torch.bfloat16, torch.bfloat16), step


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_computes_in_bf16_and_keeps_fp32_weights(on_ranks: OnRanks, reduce_dtype: torch.dtype | None) -> None:
    on_ranks(2, _mixed_precision, reduce_dtype)


def _accumulates_in_the_reduce_dtype(rank: int, world: int) -> None:
    """256 ones and then ones: in bf16 256 + 1 is 256, in fp32 it is not."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    fully_shard(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    with no_sync(model):
        model(torch.full((1, 1), 256.0)).sum().backward()
    for _ in range(2):
        with no_sync(model):
            model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.full_tensor().item() == 256 + 3


def test_gradients_are_accumulated_in_the_dtype_that_they_are_reduced_in(on_ranks: OnRanks) -> None:
    on_ranks(2, _accumulates_in_the_reduce_dtype)


# Accumulation


def _accumulates(rank: int, world: int, synchronise: str, schedule: str) -> None:
    torch.manual_seed(1)
    reference = Root(bias=True)
    sharded = shard_children(copy.deepcopy(reference), schedule=schedule)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, sharded)]
    for _ in range(2):
        batches = [torch.randn(2 * world, 16) for _ in range(3)]
        for batch in batches:
            _loss(reference(batch)).backward()
        for batch in batches[:-1]:
            if synchronise == "last":
                with no_sync(sharded):
                    _loss(sharded(local_batch(batch, rank, world))).backward()
                assert all(p.grad is None for p in sharded.parameters())
            else:
                _loss(sharded(local_batch(batch, rank, world))).backward()
        _loss(sharded(local_batch(batches[-1], rank, world))).backward()
        same_gradients(sharded, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("synchronise", ["last", "every"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradient_accumulation_equals_the_sum_of_batches(on_ranks: OnRanks, synchronise: str, schedule: str) -> None:
    on_ranks(2, _accumulates, synchronise, schedule)


def _accumulated_only_before(rank: int, world: int) -> None:
    """A unit ran under no_sync and not in the backward that reduces: its gradients are reduced all the same."""
    torch.manual_seed(1)
    model = Conditional()
    sharded = shard_children(copy.deepcopy(model))
    x = torch.randn(2 * world, 4)
    for middle in (True, False):
        _loss(model(x, middle)).backward()
    with no_sync(sharded):
        _loss(sharded(local_batch(x, rank, world), True)).backward()
    _loss(sharded(local_batch(x, rank, world), False)).backward()
    same_gradients(sharded, model)


def test_accumulated_gradients_of_a_unit_that_the_last_backward_skips_are_reduced(on_ranks: OnRanks) -> None:
    on_ranks(2, _accumulated_only_before)


def _no_sync_of_a_part_inside(rank: int, world: int) -> None:
    model = shard_children(Root())
    with no_sync(model):
        with no_sync(model.layers[0]):
            pass
        _loss(model(torch.randn(2, 16))).backward()
        assert all(p.grad is None for p in model.parameters())
    _loss(model(torch.randn(2, 16))).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_no_sync_may_be_nested(on_ranks: OnRanks) -> None:
    on_ranks(2, _no_sync_of_a_part_inside)


def _zeroes_in_place(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference))
    for _ in range(2):
        batch = torch.randn(2 * world, 16)
        _loss(reference(batch)).backward()
        _loss(sharded(local_batch(batch, rank, world))).backward()
        kept = [p.grad for p in sharded.parameters()]
        same_gradients(sharded, reference)
        for model in (reference, sharded):
            model.zero_grad(set_to_none=False)
        assert all(p.grad is gradient for p, gradient in zip(sharded.parameters(), kept, strict=True))


def test_gradients_zeroed_in_place_are_added_to(on_ranks: OnRanks) -> None:
    on_ranks(2, _zeroes_in_place)


# Optimizers


def _clips(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Mlp()
    sharded = shard_children(copy.deepcopy(reference))
    batch = torch.randn(2 * world, 5)
    _loss(reference(batch)).backward()
    _loss(sharded(local_batch(batch, rank, world))).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    norm = nn.utils.clip_grad_norm_(sharded.parameters(), 1e-3)
    close(norm.full_tensor(), expected)
    same_gradients(sharded, reference, 2e-6)  # rounded twice: the gradient, and the norm that scales it


def test_gradient_norms_are_those_of_the_whole_model(on_ranks: OnRanks) -> None:
    on_ranks(3, _clips)


def _optimizer(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(2 * world, 5) for _ in range(3)]
    make = partial(getattr(torch.optim, name), lr=1e-2, **options)
    train_alike(Mlp(), shard_children, batches, rank, world, make_optimizer=make, relative=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("Adagrad", {}),
        ("RMSprop", {}),
        ("NAdam", {}),
    ],
)
def test_any_torch_optimizer_works(on_ranks: OnRanks, name: str, options: dict[str, Any]) -> None:
    on_ranks(2, _optimizer, name, options)


# Which parameters take part


def _frozen(rank: int, world: int, schedule: str) -> None:
    torch.manual_seed(1)
    model = Transformer()
    model.blocks[0].requires_grad_(False)  # a whole unit
    model.blocks[1].attention.requires_grad_(False)  # a part of a unit
    batches = [torch.randint(13, (world, 5)) for _ in range(3)]
    sharded = train_alike(model, partial(shard_children, schedule=schedule), batches, rank, world)
    assert all(p.grad is None for p in sharded.blocks[0].parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_parameters_get_no_gradients(on_ranks: OnRanks, schedule: str) -> None:
    on_ranks(2, _frozen, schedule)


def _freezes_later(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Root(bias=True)
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 16)
    for frozen in (False, True, False):
        for model in (reference, sharded):
            model.layers[1].weight.requires_grad_(not frozen)
            model.zero_grad()
        _loss(reference(x)).backward()
        _loss(sharded(local_batch(x, rank, world))).backward()
        assert (sharded.layers[1].weight.grad is None) is frozen
        same_gradients(sharded, reference)


def test_parameters_may_be_frozen_and_unfrozen_between_steps(on_ranks: OnRanks) -> None:
    on_ranks(2, _freezes_later)


def _tied_is_one(rank: int, world: int) -> None:
    model = Transformer()
    elements = sum(p.numel() for p in [model.embedding.weight])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert model.head.weight is model.embedding.weight
    with recording() as recorder:
        model(torch.randint(13, (2, 5)))
    group = model._fsdp_unit.group
    assert [p.name for p in group.parameters] == ["embedding.weight"]
    assert recorder.alive["<root>"] <= (elements + 64 * world) * 4


def test_tied_parameters_share_one_buffer(on_ranks: OnRanks) -> None:
    on_ranks(2, _tied_is_one)


def _uneven(rank: int, world: int) -> list[tuple[int, ...]]:
    model = fully_shard(nn.Linear(3, 4))  # 4 rows on 3 ranks: 2, 2, 0
    return [tuple(model.weight.to_local().shape), tuple(model.bias.to_local().shape)]


def test_shards_are_those_of_dtensor_and_may_be_empty(on_ranks: OnRanks) -> None:
    assert on_ranks(3, _uneven) == [[(2, 3), (2,)], [(2, 3), (2,)], [(0, 3), (0,)]]


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, middle: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if middle:
            x = torch.tanh(self.middle(x))
        return self.last(x)


def _skipped(rank: int, world: int, schedule: str) -> None:
    torch.manual_seed(1)
    reference = Conditional()
    sharded = shard_children(copy.deepcopy(reference), schedule=schedule)
    for middle in (True, True, False, False, True, True):
        x = torch.randn(2 * world, 4)
        with recording() as recorder:
            _loss(reference(x, middle)).backward()
            _loss(sharded(local_batch(x, rank, world), middle)).backward()
        assert not recorder.alive
        same_gradients(sharded, reference)
        assert (sharded.middle.weight.grad is not None) is middle
        for model in (reference, sharded):
            model.zero_grad()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_units_may_be_skipped_by_control_flow(on_ranks: OnRanks, schedule: str) -> None:
    on_ranks(2, _skipped, schedule)


class TwoPaths(nn.Module):
    """One unit with two linears, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, path: int) -> torch.Tensor:
        return self.paths[path](x)


def _different_paths(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = TwoPaths()
    sharded = fully_shard(copy.deepcopy(reference))
    x = torch.randn(2, 4)
    for path in range(world):
        (_loss(reference(x, path)) / world).backward()
    _loss(sharded(x, rank)).backward()
    same_gradients(sharded, reference)


def test_ranks_may_use_different_parameters_of_a_unit(on_ranks: OnRanks) -> None:
    on_ranks(2, _different_paths)


# Meta device


def _meta(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = Mlp()
    shard_children(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    reference = Mlp()
    with torch.no_grad():
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            expected.copy_(parameter.full_tensor())
    torch.manual_seed(2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for _ in range(2):
        batch = torch.randn(2 * world, 5)
        _loss(reference(batch)).backward()
        _loss(model(local_batch(batch, rank, world))).backward()
        same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_model_is_sharded_on_meta_and_initialised_in_shards(on_ranks: OnRanks) -> None:
    on_ranks(3, _meta)


def _changes_dtype(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Mlp()
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 5)
    for dtype in (torch.float32, torch.float64):
        reference.to(dtype)
        sharded.to(dtype)
        _loss(reference(x.to(dtype))).backward()
        _loss(sharded(local_batch(x, rank, world).to(dtype))).backward()
        same_gradients(sharded, reference)
        for model in (reference, sharded):
            model.zero_grad()


def test_a_sharded_model_may_be_cast(on_ranks: OnRanks) -> None:
    on_ranks(2, _changes_dtype)


# Activation checkpointing


class Checkpointed(nn.Module):
    """Where: "outside" checkpoints each unit, "inside" a part of each unit, "nested" a unit that holds units."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def _checkpoint(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(self._checkpoint(block, x) if self.where != "inside" else block(x))
        return x


class CheckpointInside(nn.Module):
    def __init__(self, block: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block[2](checkpoint(lambda y: self.block[1](self.block[0](y)), x, use_reentrant=self.reentrant))


def _checkpoints(rank: int, world: int, where: str, reentrant: bool, schedule: Any) -> None:
    torch.manual_seed(1)
    model = Checkpointed(where, reentrant)
    if where == "inside":
        model.blocks = nn.ModuleList(CheckpointInside(block, reentrant) for block in model.blocks)

    def shard(module: nn.Module) -> nn.Module:
        for block in module.blocks:
            if where == "nested":
                fully_shard(block[0], schedule=schedule)
                fully_shard(block[2], schedule=schedule)
        return shard_children(module, schedule=schedule)

    batches = [torch.randn(2 * world, 6) for _ in range(3)]
    with recording() as recorder:
        train_alike(model, shard, batches, rank, world)
    assert not recorder.alive
    units = 7 if where == "nested" else 4
    # Each step gathers every child once in the forward and once in the backward; the root stays in between.
    assert len(recorder.of("gather")) == len(batches) * (2 * units - 1) == len(recorder.of("free"))


@pytest.mark.parametrize("schedule", [*SCHEDULES, Prefetch(depth=3)])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside", "nested"])
def test_activation_checkpointing(on_ranks: OnRanks, where: str, reentrant: bool, schedule: Any) -> None:
    on_ranks(2, _checkpoints, where, reentrant, schedule)


def _checkpoints_the_root(rank: int, world: int, reentrant: bool) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference))
    with recording() as recorder:
        for _ in range(2):
            x = torch.randn(2 * world, 16)
            _loss(reference(x)).backward()
            part = local_batch(x, rank, world).requires_grad_()
            _loss(checkpoint(sharded, part, use_reentrant=reentrant)).backward()
            same_gradients(sharded, reference)
            assert not recorder.alive


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_outermost_unit_may_be_checkpointed(on_ranks: OnRanks, reentrant: bool) -> None:
    on_ranks(2, _checkpoints_the_root, reentrant)


# Forwards and backwards in other orders


def _several_forwards(rank: int, world: int, schedule: str, together: bool) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference), schedule=schedule)
    for _ in range(2):
        batches = [torch.randn(2 * world, 16) for _ in range(3)]
        for model, parts in ((reference, batches), (sharded, [local_batch(b, rank, world) for b in batches])):
            losses = [_loss(model(part)) for part in parts]
            if together:
                torch.stack(losses).sum().backward()
            else:
                for loss in losses:
                    loss.backward()
        same_gradients(sharded, reference)
        for model in (reference, sharded):
            model.zero_grad()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_forwards_before_a_backward(on_ranks: OnRanks, schedule: str, together: bool) -> None:
    on_ranks(2, _several_forwards, schedule, together)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(x))
        return self.first(x), self.second(x)


def _one_head(rank: int, world: int, schedule: Any, head: int) -> None:
    torch.manual_seed(1)
    reference = TwoHeads()
    sharded = shard_children(copy.deepcopy(reference), schedule=schedule)
    for _ in range(2):
        x = torch.randn(2 * world, 4)
        with recording() as recorder:
            _loss(reference(x)[head]).backward()
            _loss(sharded(local_batch(x, rank, world))[head]).backward()
        assert not recorder.alive
        same_gradients(sharded, reference)
        assert [p.grad is None for p in sharded.parameters()] == [p.grad is None for p in reference.parameters()]
        for model in (reference, sharded):
            model.zero_grad()


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("schedule", [*SCHEDULES, Prefetch(depth=3)])
def test_units_whose_output_the_loss_ignores_get_no_gradients(on_ranks: OnRanks, schedule: Any, head: int) -> None:
    on_ranks(2, _one_head, schedule, head)


class IgnoresOne(nn.Module):
    """The last unit takes two inputs and uses one."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, used: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return self.linear(used)

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.last = nn.Linear(4, 4), nn.Linear(4, 4), self.First()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.used(x), self.unused(x))


def _ignores_an_input(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = IgnoresOne()
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 4)
    _loss(reference(x)).backward()
    _loss(sharded(local_batch(x, rank, world))).backward()
    same_gradients(sharded, reference)
    assert all(p.grad is None for p in sharded.unused.parameters())  # zeros would let an optimizer decay them


def test_what_led_to_an_input_that_a_unit_ignores_gets_no_gradients(on_ranks: OnRanks) -> None:
    on_ranks(2, _ignores_an_input)


def _backward_twice(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 16)
    for model, part in ((reference, x), (sharded, local_batch(x, rank, world))):
        loss = _loss(model(part))
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(sharded, reference)


def test_a_graph_may_be_run_backward_twice(on_ranks: OnRanks) -> None:
    on_ranks(2, _backward_twice)


def _input_gradients(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 16)
    gradients = []
    for model in (reference, sharded):
        part = local_batch(x, rank, world).clone().requires_grad_()
        gradients += torch.autograd.grad(_loss(model(part)), part)
    close(*gradients)
    assert all(p.grad is None for p in sharded.parameters())


def test_gradients_of_inputs_alone_leave_the_parameters_without(on_ranks: OnRanks) -> None:
    on_ranks(2, _input_gradients)


class InPlace(nn.Module):
    """Units return views and are given tensors that the caller, or they, modify in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y += 1  # a view of what the linear returned
            y.mul_(0.5)
            x = y.clone()
        return x


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.relu_()  # the unit's input
        return self.linear(x).view(-1, 2, 4)[:, 0]


def _in_place(rank: int, world: int) -> None:
    torch.manual_seed(1)

    class Cloning(InPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.clone())

    train_alike(Cloning(), shard_children, [torch.randn(2 * world, 4) for _ in range(3)], rank, world)


def test_inputs_and_outputs_of_units_may_be_modified_in_place(on_ranks: OnRanks) -> None:
    on_ranks(2, _in_place)


class Structured(nn.Module):
    """Units take and return dictionaries, tuples and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StructuredLayer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": x, "pair": (x, 2)}
        for layer in self.layers:
            state = layer(state, bias=x)
        return state["x"] + state["pair"][0]


class StructuredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: dict[str, Any], *, bias: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.linear(state["x"]))
        return {"x": y + bias, "pair": (state["pair"][0] * y, state["pair"][1])}


def _structured(rank: int, world: int) -> None:
    torch.manual_seed(1)
    train_alike(Structured(), shard_children, [torch.randn(2 * world, 4) for _ in range(3)], rank, world)


def test_units_may_take_and_return_nested_structures(on_ranks: OnRanks) -> None:
    on_ranks(2, _structured)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.cells:
            x = cell(x)[0]
        return x


def _recurrent(rank: int, world: int) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(2 * world, 3, 4) for _ in range(3)]
    train_alike(Recurrent(), shard_children, batches, rank, world)


def test_modules_that_keep_lists_of_their_parameters_see_the_gathered_ones(on_ranks: OnRanks) -> None:
    on_ranks(2, _recurrent)


def _inference_then_training(rank: int, world: int) -> None:
    torch.manual_seed(1)
    reference = Root()
    sharded = shard_children(copy.deepcopy(reference))
    x = torch.randn(2 * world, 16)
    for mode in (torch.no_grad, torch.inference_mode):
        sharded.load_state_dict({k: v.clone() for k, v in sharded.state_dict().items()}, assign=True)
        with mode(), recording() as recorder:  # the first thing it does is to take over the assigned parameters
            close(sharded(x), reference(x))
        assert not recorder.alive
    _loss(reference(x)).backward()
    _loss(sharded(local_batch(x, rank, world))).backward()
    same_gradients(sharded, reference)


def test_inference_first_and_training_later(on_ranks: OnRanks) -> None:
    on_ranks(2, _inference_then_training)


# HSDP


def _hsdp(rank: int, world: int, schedule: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    batches = [torch.randn(2 * world, 5) for _ in range(3)]
    sharded = train_alike(Mlp(), partial(shard_children, mesh=mesh, schedule=schedule), batches, rank, world)
    assert all(p.placements == (Replicate(), Shard(0)) for p in sharded.parameters())
    assert sharded.outer.weight.to_local().shape[0] == (1 if rank % 2 == 0 else 0)


@pytest.mark.parametrize("schedule", ["serial", "prefetch"])
def test_hsdp_shards_inside_and_replicates_outside(on_ranks: OnRanks, schedule: str) -> None:
    on_ranks(4, _hsdp, schedule)


def _own_reduce_group(rank: int, world: int) -> None:
    import torch.distributed as dist

    torch.manual_seed(1)
    group = dist.new_group(list(range(world)))
    batches = [torch.randn(2 * world, 16) for _ in range(2)]
    train_alike(Root(), partial(shard_children, reduce_group=group), batches, rank, world)


def test_reductions_may_have_a_communicator_of_their_own(on_ranks: OnRanks) -> None:
    on_ranks(2, _own_reduce_group)
