"""One rank that trains for a moment, waits for nothing, and ends in one of the orders in which programs end.

    python -m gpu.exits GATHER ORDER    in tests/, with the environment that torch.distributed.run gives a rank

Started by test_gathers_gpu.py, which looks at how the process ended.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from .conftest import join
from .models import Stack, make

ORDERS = ("model, group", "group, model", "group", "nothing")
"""What is ended, in this order, before the process is."""

KEPT: list[Stack] = []
"""Alive when the interpreter begins to take things apart."""


def main(gather: str, order: str) -> None:
    model = make(join(), gather=gather)
    x = torch.ones(8, 512, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    if order in ("group", "nothing"):
        KEPT.append(model)
    if order == "model, group":
        del model
    if order != "nothing":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
