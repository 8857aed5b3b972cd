"""What is not supported raises FsdpError, which names the unit, parameter or option and what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from fsdp_runtime import FsdpError, MixedPrecision, Prefetch, context_of, fully_shard, no_sync

from .conftest import OnRanks
from .models import Root, Transformer, shard_children


def _twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def _parent_first() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)))
    fully_shard(model[0])


def _container() -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def _scalar() -> None:
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(module)


def _lazy() -> None:
    fully_shard(nn.LazyLinear(2))


def _tensor_parallel() -> None:
    module = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Replicate()]))
    fully_shard(module)


def _tied_across_units() -> None:
    model = Transformer()
    fully_shard(model.embedding)
    fully_shard(model)


def _two_dtypes() -> None:
    fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()))


def _negative_target_length() -> None:
    fully_shard(nn.Linear(2, 2), target_length=-1)


def _negative_depth() -> None:
    Prefetch(depth=-1)


def _unknown_schedule() -> None:
    fully_shard(nn.Linear(2, 2), schedule="eager")


def _unknown_gather() -> None:
    fully_shard(nn.Linear(2, 2), gather="broadcast")


def _integer_precision() -> None:
    MixedPrecision(compute_dtype=torch.int8)


def _mesh_of_three_dimensions() -> None:
    fully_shard(nn.Linear(2, 2), init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))


def _not_in_the_mesh() -> None:
    fully_shard(nn.Linear(2, 2), DeviceMesh("cpu", [1 - dist.get_rank()]))


def _other_ranks() -> None:
    fully_shard(nn.Linear(2, 2), reduce_group=dist.new_group([dist.get_rank()], use_local_synchronization=True))


def _no_process_group() -> None:
    with mock.patch.object(dist, "is_initialized", return_value=False):
        fully_shard(nn.Linear(2, 2))


def _two_schedules() -> None:
    model = Root()
    fully_shard(model.layers[0], schedule="serial")
    fully_shard(model.layers[1], schedule="prefetch")
    fully_shard(model)(torch.randn(1, 16))


def _two_target_lengths() -> None:
    model = Root()
    fully_shard(model.layers[0], target_length=2)
    fully_shard(model, target_length=3)(torch.randn(1, 16))


def _still_on_meta() -> None:
    with torch.device("meta"):
        model = Root()
    shard_children(model)(torch.randn(1, 16))


def _partly_on_meta() -> None:
    fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def _deep_copy() -> None:
    copy.deepcopy(fully_shard(nn.Linear(2, 2)))


def _pickled() -> None:
    pickle.dumps(fully_shard(nn.Linear(2, 2)))


def _not_a_unit() -> None:
    context_of(nn.Linear(2, 2))


def _sparse_gradient() -> None:
    model = fully_shard(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()


def _replaced_by_a_plain_tensor() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.ones(2, 2))
    model(torch.randn(1, 2))


def _gradient_hook() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model(torch.randn(1, 2))


def _tensor_hook() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.weight.register_hook(lambda gradient: gradient)
    model(torch.randn(1, 2))


def _second_derivative() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = torch.randn(1, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.sum().backward()


def _parameter_removed() -> None:
    model = fully_shard(nn.Linear(2, 2))
    del model.bias
    model(torch.randn(1, 2))


def _frozen_while_accumulating() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with no_sync(model):
        model(torch.randn(1, 2)).sum().backward()
    model.bias.requires_grad_(False)
    model(torch.randn(1, 2)).sum().backward()


CASES: list[tuple[Callable[[], Any], str]] = [
    (_twice, r"Linear: fully_shard was already called"),
    (_parent_first, r"parameter weight of Linear: already a DTensor; call fully_shard bottom-up"),
    (_container, r"ModuleList has no forward.*shard its children"),
    (_scalar, r"parameter scale of Linear: a scalar.*give it the shape \[1\]"),
    (_lazy, r"parameter weight of LazyLinear: not initialised yet"),
    (_tensor_parallel, r"parameter weight of Linear: already a DTensor"),
    (_tied_across_units, r"parameter head.weight of Transformer: tied .* the unit Embedding .*common parent"),
    (_two_dtypes, r"one dtype and device.*bfloat16.*float32.*unit of their own"),
    (_negative_target_length, r"target_length: must not be negative, got -1"),
    (_negative_depth, r"depth must not be negative, got -1"),
    (_unknown_schedule, r"schedule: expected one of auto, serial, implicit, prefetch or a Schedule, got 'eager'"),
    (
        _unknown_gather,
        r"gather: expected one of auto, process_group, zero_cta, copy_engine or a Gather, got 'broadcast'",
    ),
    (_integer_precision, r"mixed_precision: compute_dtype must be a floating-point dtype, got torch.int8"),
    (_mesh_of_three_dimensions, r"mesh: expected 1 dimension .* or 2 .*, got 3"),
    (_not_in_the_mesh, r"mesh: rank \d is not one of its ranks"),
    (_other_ranks, r"reduce_group: expected the 2 ranks .* got a group of 1"),
    (_no_process_group, r"init_process_group\(\) or pass a mesh"),
    (_two_schedules, r"schedule: one holds for a whole tree.*Serial.*layers\.0.*Prefetch.*layers\.1"),
    (_two_target_lengths, r"target_length: one holds for a whole tree.*3 \(unit <root>\) and 2 \(unit layers\.0\)"),
    (_still_on_meta, r"unit <root>: parameter scale is still on the meta device; call module.to_empty"),
    (_partly_on_meta, r"one dtype and device.*cpu.*meta"),
    (_deep_copy, r"cannot be deep-copied"),
    (_pickled, r"cannot be .* pickled.*state dict"),
    (_not_a_unit, r"Linear: fully_shard was not called on this module"),
    (_sparse_gradient, r"parameter weight of unit <root>: sparse gradients .*sparse=False"),
    (_replaced_by_a_plain_tensor, r"unit <root>: expected parameter weight to be its shard.*found Parameter"),
    (_gradient_hook, r"unit <root>: parameter weight has gradient hooks"),
    (_tensor_hook, r"unit <root>: parameter weight has gradient hooks"),
    (_second_derivative, r"second derivatives .*not supported.*leave .* unsharded"),
    (_parameter_removed, r"unit <root>: expected parameter bias to be its shard.*found NoneType"),
    (_frozen_while_accumulating, r"unit <root>: requires_grad changed while gradients were being accumulated"),
]


def _raises(rank: int, world: int, index: int) -> None:
    misuse, message = CASES[index]
    with pytest.raises(FsdpError, match=message):
        misuse()


@pytest.mark.parametrize("index", range(len(CASES)), ids=[misuse.__name__.strip("_") for misuse, _ in CASES])
def test_misuse_raises_an_error_that_says_what_to_do(on_ranks: OnRanks, index: int) -> None:
    on_ranks(2, _raises, index)


def _mends(rank: int, world: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(FsdpError, match="one dtype"):
        fully_shard(module)
    fully_shard(module.float())(torch.randn(1, 2)).sum().backward()


def test_a_module_that_was_refused_is_as_it_was(on_ranks: OnRanks) -> None:
    on_ranks(2, _mends)
