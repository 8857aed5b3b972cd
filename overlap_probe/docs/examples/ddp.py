"""DistributedDataParallel: no all-gathers and no units, so a check names the collective and a number.

DDP reduces a bucket of gradients while the backward goes on. The last bucket has nothing left to hide behind.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlap_probe as op

LAYERS, DIM, BATCH = 4, 1024, 512


def train(device: torch.device) -> None:
    layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS))).to(device)
    model = DistributedDataParallel(layers, bucket_cap_mb=4)  # a layer a bucket
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with op.capture("out/", warmup=2, steps=3) as step:
        for _ in range(5):
            model(torch.randn(BATCH, DIM, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step()


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    train(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
