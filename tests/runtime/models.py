"""Models, and the unsharded reference that a sharded one is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_runtime import fully_shard

RELATIVE = 1e-6


class Root(nn.Module):
    """A root with a parameter of its own over equal Linear children."""

    def __init__(self, dim: int = 16, children: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=bias) for _ in range(children))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Mlp(nn.Module):
    """Uneven sizes: rows that do not divide by 2 or 3 ranks, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 11))
        self.outer = nn.Linear(11, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.gelu(self.inner(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding and output projection are one parameter."""

    def __init__(self, vocabulary: int = 13, dim: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 2) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reused(nn.Module):
    """One unit runs twice in a forward."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.middle = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(x))
        return self.first(x)


def shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """Makes units of the members of the model's ModuleLists (or else of its children), then of the model."""
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    for unit in [unit for members in lists for unit in members] or list(model.children()):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def local_batch(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """This rank's part of a batch whose length is a multiple of the world size."""
    return batch.chunk(world)[rank]


def close(actual: torch.Tensor, expected: torch.Tensor, relative: float = RELATIVE) -> None:
    """Equal to ``relative`` times the largest element: single elements near zero have no relative error."""
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * max(scale, 1e-30))


def same_gradients(sharded: nn.Module, reference: nn.Module, relative: float = RELATIVE) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        gradient = expected[name].grad
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.full_tensor().any(), name
        else:
            assert parameter.grad is not None, name
            close(parameter.grad.full_tensor(), gradient, relative)


def same_parameters(sharded: nn.Module, reference: nn.Module, relative: float = RELATIVE) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        close(parameter.full_tensor(), expected[name], relative)  # type: ignore[attr-defined]


def train_alike(
    reference: nn.Module,
    shard: Callable[[nn.Module], nn.Module],
    batches: list[torch.Tensor],
    rank: int,
    world: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda output: output.square().mean(),
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2),
    relative: float = RELATIVE,
) -> nn.Module:
    """Trains a sharded copy beside the reference and compares losses and gradients in every step."""
    import torch.distributed as dist

    sharded = shard(copy.deepcopy(reference))
    optimizers = [make_optimizer(m.parameters()) for m in (reference, sharded)]
    for batch in batches:
        expected = loss_of(reference(batch))
        expected.backward()
        loss = loss_of(sharded(local_batch(batch, rank, world)))
        loss.backward()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        close(mean, expected.detach(), relative)
        same_gradients(sharded, reference, relative)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return sharded
