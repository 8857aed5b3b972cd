"""Losses and gradients equal those of the unsharded model, and those of PyTorch's FSDP2."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .conftest import OnRanks
from .models import Mlp, Reused, Root, Transformer, close, local_batch, shard_children, train_alike

STEPS = 5


def _workload(name: str) -> tuple[nn.Module, list[torch.Tensor], Any]:
    """A model, a batch for each step (6 samples: for 2 or 3 ranks) and the loss."""
    torch.manual_seed(1)
    if name == "transformer":
        batches = [torch.randint(13, (6, 5)) for _ in range(STEPS)]
        return (
            Transformer(),
            batches,
            lambda output: F.cross_entropy(output.flatten(0, 1), output.new_zeros(output.shape[0] * 5).long()),
        )
    model, width = {"root": (Root(), 16), "mlp": (Mlp(), 5), "reused": (Reused(), 6)}[name]
    return model, [torch.randn(6, width) for _ in range(STEPS)], lambda output: output.square().mean()


def _equals_unsharded(rank: int, world: int, name: str, schedule: str) -> None:
    model, batches, loss_of = _workload(name)
    train_alike(model, partial(shard_children, schedule=schedule), batches, rank, world, loss_of)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
@pytest.mark.parametrize("name", ["root", "mlp", "transformer", "reused"])
def test_training_equals_the_unsharded_reference(on_ranks: OnRanks, world: int, schedule: str, name: str) -> None:
    on_ranks(world, _equals_unsharded, name, schedule)


def _equals_fsdp2(rank: int, world: int, name: str) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    model, batches, loss_of = _workload(name)
    ours, theirs = shard_children(copy.deepcopy(model)), copy.deepcopy(model)
    for unit in [*next((m for m in theirs.children() if isinstance(m, nn.ModuleList)), theirs.children()), theirs]:
        fsdp.fully_shard(unit, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for batch in batches:
        losses = [loss_of(m(local_batch(batch, rank, world))) for m in (ours, theirs)]
        close(*losses)
        for loss in losses:
            loss.backward()
        for (key, mine), (other, yours) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert key == other
            assert mine.placements == yours.placements
            close(mine.grad.to_local(), yours.grad.to_local())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["root", "mlp", "transformer", "reused"])
def test_training_equals_fsdp2_shard_by_shard(on_ranks: OnRanks, world: int, name: str) -> None:
    on_ranks(world, _equals_fsdp2, name)
