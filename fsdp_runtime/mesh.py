"""The ranks that a unit is sharded over, and replicated over if the mesh has two dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# DTensor's constructor imports this if nobody has. The import leaves a cycle that holds all frames on the stack, and
# with them the first model that is sharded, until the garbage collector runs.
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from . import collectives
from .errors import FsdpError


@dataclass(frozen=True)
class ShardMesh:
    """A device mesh read as data parallelism.

    One dimension shards (FSDP); of two, the outer replicates and the inner shards (HSDP): parameters are gathered
    inside the inner one, gradients are reduce-scattered there and then all-reduced over the outer one.
    """

    mesh: DeviceMesh
    device: torch.device
    placements: tuple[Placement, ...]
    shard_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup
    replicate_group: dist.ProcessGroup | None
    world: int
    rank: int
    reduce_operation: dist.ReduceOp.RedOpType
    divisor: int
    """What a reduced gradient must still be divided by to be the average over all ranks."""

    @classmethod
    def of(cls, mesh: DeviceMesh | None, reduce_group: dist.ProcessGroup | None) -> ShardMesh:
        """Reads ``mesh``; None is all ranks. Raises FsdpError for what cannot be read as data parallelism."""
        mesh = _whole_world() if mesh is None else mesh
        if mesh.ndim not in (1, 2):
            raise FsdpError(
                f"mesh: expected 1 dimension (shard) or 2 (replicate, shard), got {mesh.ndim}; pass a slice of the mesh"
            )
        if mesh.get_coordinate() is None:
            raise FsdpError(f"mesh: rank {dist.get_rank()} is not one of its ranks; shard the module on these only")
        shard_group = mesh.get_group(mesh.ndim - 1)
        if reduce_group is not None and reduce_group.size() != shard_group.size():
            raise FsdpError(
                f"reduce_group: expected the {shard_group.size()} ranks of the mesh's shard dimension, "
                f"got a group of {reduce_group.size()}"
            )
        device = _device(mesh.device_type)
        averages = collectives.averages(device, shard_group)
        return cls(
            mesh=mesh,
            device=device,
            placements=(Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0)),
            shard_group=shard_group,
            reduce_group=shard_group if reduce_group is None else reduce_group,
            replicate_group=None if mesh.ndim == 1 else mesh.get_group(0),
            world=mesh.size(mesh.ndim - 1),
            rank=mesh.get_local_rank(mesh.ndim - 1),
            reduce_operation=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
            divisor=1 if averages else mesh.size(),
        )

    def spec(self, parameter: torch.Tensor) -> DTensorSpec:
        """How ``parameter`` is sharded: what a DTensor of its shape and dtype needs beside the local tensor."""
        contiguous = torch.empty(parameter.shape, device="meta")
        return DTensorSpec(
            self.mesh, self.placements, tensor_meta=TensorMeta(parameter.shape, contiguous.stride(), parameter.dtype)
        )


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor that shares the memory of ``local``.

    ``DTensor.from_local`` gives the same, at fifty times the host time: it is an autograd function. ``__init__`` does
    nothing, but would first tell torch.compile not to trace it, which takes three times as long as ``__new__``.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def _whole_world() -> DeviceMesh:
    if not dist.is_initialized():
        raise FsdpError("fully_shard: no process group; call torch.distributed.init_process_group() or pass a mesh")
    on_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return init_device_mesh("cuda" if on_cuda else "cpu", (dist.get_world_size(),))


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
