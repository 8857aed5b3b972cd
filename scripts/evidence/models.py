"""The work: 8 square Linear units (as in the measurements that the project starts from), and a small Llama-shaped
model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .cases import UNITS
from .device import DTYPE, SCALE, device

DIM = 4096 // SCALE
BYTES_OF_A_UNIT = DIM * DIM * DTYPE.itemsize

TOKENS = (4, 1024 // SCALE)
VOCABULARY = 32000 // SCALE


def linear_stack() -> nn.Sequential:
    """``[batch, 4096]`` in and out; 8 bf16 weights of 32 MiB, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, dtype=DTYPE, device=device()) for _ in range(UNITS)))


class LlamaBlock(nn.Module):
    """Attention and a gated MLP with pre-norms; no rotary embedding, which moves no parameters."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Llama(nn.Module):
    """8 layers of hidden size 2048; tokens ``[4, 1024]``."""

    def __init__(self, layers: int = 8, dim: int = 2048 // SCALE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, 16, 5632 // SCALE) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
