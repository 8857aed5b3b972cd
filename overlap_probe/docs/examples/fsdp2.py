"""PyTorch FSDP2 with three profiled steps: run it under `overlap_probe run -- fsdp2.py`, torchrun, or Slurm.

On GPUs FSDP2 gathers the next layer while this one computes, if layers are large enough for the host to be ahead. On
the CPU (gloo) it waits inside each all-gather, so there `overlaps >= auto` fails, and the report says why.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlap_probe as op

LAYERS, DIM, BATCH = 4, 512, 256


def main() -> None:
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(DIM, DIM, device=device) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    with op.capture("out/", warmup=2, steps=3) as step:
        for _ in range(5):
            model(torch.randn(BATCH, DIM, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
