"""Any tree of modules, sharded in any way, under any schedule, trains as the unsharded one does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_runtime import Implicit, Prefetch, Serial, fully_shard

from .conftest import OnRanks
from .models import close, local_batch, same_gradients
from .recorder import recording

WIDTH = 5  # rows that 2 ranks cannot share evenly
RELATIVE = 1e-10  # in float64, so that what differs is not rounding


@dataclass(frozen=True)
class Spec:
    """A module: a linear of its own or none, then its children, each run some times; how it is sharded and run."""

    linear: bool
    frozen: bool
    unit: bool
    checkpointed: bool
    children: tuple[tuple[Spec, int], ...]


LEAVES = st.builds(Spec, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.just(()))
TREES = st.recursive(
    LEAVES,
    lambda specs: st.builds(
        Spec,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.lists(st.tuples(specs, st.sampled_from([1, 1, 1, 0, 2])), min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=6,
)
SCHEDULES = st.one_of(st.just(Serial()), st.just(Implicit()), st.integers(1, 3).map(Prefetch))


class Tree(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.linear = nn.Linear(WIDTH, WIDTH) if spec.linear else None
        if self.linear is not None:
            self.linear.requires_grad_(not spec.frozen)
        self.members = nn.ModuleList(Tree(child) for child, _ in spec.children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear is not None:
            x = x + torch.tanh(self.linear(x))
        for member, (_, times) in zip(self.members, self.spec.children, strict=True):
            for _ in range(times):
                x = checkpoint(member, x, use_reentrant=False) if member.spec.checkpointed else member(x)
        return x


def _shard(tree: Tree, outermost: bool, **options: Any) -> Tree:
    for member in tree.members:
        _shard(member, False, **options)
    if tree.spec.unit or outermost:
        fully_shard(tree, **options)
    return tree


def _train(rank: int, world: int, spec: Spec, schedule: Any, target_length: int, inputs_need_gradients: bool) -> None:
    torch.manual_seed(1)
    reference = Tree(spec).double()
    sharded = _shard(copy.deepcopy(reference), True, schedule=schedule, target_length=target_length)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    with recording() as recorder:
        for _ in range(3):
            batch = torch.randn(2 * world, WIDTH, dtype=torch.float64)
            whole = batch.clone().requires_grad_(inputs_need_gradients)
            part = local_batch(batch, rank, world).clone().requires_grad_(inputs_need_gradients)
            expected, output = reference(whole), sharded(part)
            close(output, local_batch(expected, rank, world), RELATIVE)
            if expected.requires_grad:
                expected.square().mean().backward()
                output.square().mean().backward()
            assert not recorder.alive
            same_gradients(sharded, reference, RELATIVE)
            if inputs_need_gradients:
                close(part.grad, local_batch(whole.grad, rank, world) * world, RELATIVE)
            with torch.no_grad():
                for parameter, mine in zip(
                    trainable, [p for p in sharded.parameters() if p.requires_grad], strict=True
                ):
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)
                        mine.sub_(mine.grad)
                        parameter.grad = mine.grad = None


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES, SCHEDULES, st.integers(0, 3), st.booleans())
def test_any_tree_under_any_schedule_trains_like_the_unsharded_one(
    on_ranks: OnRanks, spec: Spec, schedule: Any, target_length: int, inputs_need_gradients: bool
) -> None:
    on_ranks(2, _train, spec, schedule, target_length, inputs_need_gradients)
