"""Models whose units remember the weights that they computed with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_runtime import fully_shard


class Watched(nn.Module):
    """A Linear layer with a bias of odd size; ``seen`` is a copy, in stream order, of each weight that it used."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.bias = nn.Parameter(torch.randn(dim + 1))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.cat([self.weight.detach().reshape(-1), self.bias.detach()]))
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias[:-1]))


class Stack(nn.Module):
    def __init__(self, dim: int = 512, children: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(Watched(dim) for _ in range(children))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


def make(mesh: DeviceMesh, **options: Any) -> Stack:
    """The same sharded model on every rank."""
    torch.manual_seed(0)
    model = Stack().to("cuda")
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def whole(parameters: list[nn.Parameter], gather: Any) -> list[torch.Tensor]:
    """Each parameter, put together on the host from what all ranks hold."""
    local = [parameter.to_local().detach().cpu() for parameter in parameters]  # type: ignore[attr-defined]
    return [torch.cat(parts).to("cuda") for parts in zip(*gather(local), strict=True)]
