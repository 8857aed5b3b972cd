"""A script that knows nothing of overlap_probe.

Under `overlap_probe run -- unchanged.py` a step is over when the optimizer has stepped.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(learning_rate: float, steps: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.lr, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
