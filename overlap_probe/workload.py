"""The built-in workload: a small FSDP training loop whose all-gathers can be hidden, on GPUs or on a CPU.

The idea: a root with a parameter of its own and equal Linear children, each a unit of `fsdp_runtime`. Every gather but
the root's and the first child's has another child's matmul to hide behind: n children should show n - 1 overlaps.
Only this module of `overlap_probe` imports `fsdp_runtime`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_runtime import MixedPrecision, fully_shard
from overlap_probe.capture import capture
from overlap_probe.job import LaunchOptions
from overlap_probe.progress import PROGRESS

SIZES = {"cpu": (2048, 256), "cuda": (4096, 32768)}
"""Default dim and batch. On a CPU a gather must be longer than a slice of the scheduler, or two loaded cores
are held by gloo's threads until it is over; on a GPU a matmul must be longer than the host needs for a unit under the
profiler (1 ms was seen), or the device waits for the host and every gather comes late."""


class Model(nn.Module):
    """``children`` square Linear layers, then the mean over the batch times a scale of the root's own.

    The root's own compute is small and comes last: before the layers it would hide the first gathers from the matmuls.
    """

    def __init__(self, children: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim, device=device))
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False, device=device) for _ in range(children))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)  # (batch, dim)
        return x.mean(0) * self.scale  # (dim,)


def train(options: LaunchOptions, folder: Path, device_type: str) -> None:
    """Train for ``options.warmup`` + ``options.steps`` steps as the rank that the environment says, and capture it."""
    device = _join(device_type)
    default_dim, default_batch = SIZES[device_type]
    dim, batch = options.dim or default_dim, options.batch or default_batch
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    PROGRESS.report("info", {"arguments": {"device": device_type, "dim": dim, "batch": batch}})

    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model(options.children, dim, device)
    sharding: dict[str, Any] = {
        "schedule": options.schedule,
        "gather": options.gather,
        "mixed_precision": MixedPrecision(compute_dtype=dtype),
    }
    for layer in model.layers:
        fully_shard(layer, mesh, **sharding)
    fully_shard(model, mesh, **sharding)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch, dim, device=device, dtype=dtype)

    with capture(folder, warmup=options.warmup, steps=options.steps) as step:
        for _ in range(options.warmup + options.steps):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step()
    dist.barrier()
    dist.destroy_process_group()


def _join(device_type: str) -> torch.device:
    """Make the process group, and this rank's device the current one."""
    if device_type == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    local_rank = int(os.environ.get("LOCAL_RANK", int(os.environ["RANK"]) % gpus))
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus:
        # NCCL refuses ranks that share a GPU, and so does symmetric memory unless told that it is meant.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group("gloo")
        return device
    dist.init_process_group("nccl", device_id=device)
    return device
