"""Sharded weights gathered by hand, with ranges that name the units as Megatron-FSDP does: `MFSDP layers.0 forward`.

A gather belongs to the unit in whose range it is launched. With names, `overlaps >= auto` knows that four layers can
hide three gathers; without, it has to be told a number. `record_function` writes the names for torch.profiler, NVTX
ranges (`torch.cuda.nvtx.range`) write them for Nsight Systems.
"""

import torch
import torch.distributed as dist
from torch.profiler import record_function

import overlap_probe as op

LAYERS, DIM, BATCH = 4, 2048, 256


class Shards:
    """This rank's rows of each layer's weight, and the gathers that are under way."""

    def __init__(self) -> None:
        rows = DIM // dist.get_world_size()
        self.local = [torch.randn(rows, DIM) / DIM for _ in range(LAYERS)]
        self.whole = [torch.empty(DIM, DIM) for _ in range(LAYERS)]
        self.works: dict[int, dist.Work] = {}

    def gather(self, layer: int) -> None:
        with record_function(f"MFSDP layers.{layer} forward"):
            self.works[layer] = dist.all_gather_into_tensor(self.whole[layer], self.local[layer], async_op=True)

    def weight(self, layer: int) -> torch.Tensor:
        self.works.pop(layer).wait()
        return self.whole[layer]


def forward(shards: Shards, x: torch.Tensor) -> torch.Tensor:
    shards.gather(0)
    for layer in range(LAYERS):
        weight = shards.weight(layer)
        if layer + 1 < LAYERS:
            shards.gather(layer + 1)  # while this layer computes
        with record_function(f"MFSDP layers.{layer} forward"):
            x = x @ weight.T
    return x


def main() -> None:
    dist.init_process_group("gloo")
    shards, x = Shards(), torch.randn(BATCH, DIM)
    with op.capture("out/", warmup=2, steps=3) as step:
        for _ in range(5):
            forward(shards, x)
            step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
