"""torch.compile compiles what is inside units; what the runtime does around them stays out of its graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from .conftest import OnRanks
from .models import close, local_batch, same_gradients, shard_children

RELATIVE = 1e-5
"""A mean over 4 elements, and the deviation that a LayerNorm divides by, round in another order in two half batches."""


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Sequential(Feed(), nn.LayerNorm(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x * self.scale)
        return x


def _compiled(rank: int, world: int, what: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    reference = Residual()
    sharded = shard_children(copy.deepcopy(reference))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: Any = sharded
    if what == "model":
        model = torch.compile(sharded, backend=backend)
    for module in {"units": sharded.layers, "parts of units": [layer[0] for layer in sharded.layers]}.get(what, []):
        module.compile(backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, sharded)]
    for step in range(3):
        x = torch.randn(2 * world, 4)
        part = local_batch(x, rank, world)
        reference(x).square().mean().backward()
        model(part).square().mean().backward()
        same_gradients(sharded, reference, RELATIVE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            close(model(part), reference(part), RELATIVE)
        if step == 0:
            compiled = len(graphs)
    assert len(graphs) == compiled > 0


@pytest.mark.parametrize("what", ["model", "units", "parts of units"])
def test_training_with_compiled_parts_equals_the_reference_and_compiles_once(on_ranks: OnRanks, what: str) -> None:
    on_ranks(2, _compiled, what)
