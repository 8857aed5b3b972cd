"""The collectives that the runtime calls: the only place that knows torch.distributed's spelling of them.

A collective is asynchronous in one of two ways. On an accelerator it is a kernel (or copies) on the stream that is
current when it is issued, so it is issued with ``async_op=False`` and ordered by events. On a CPU it runs on a thread
of the backend, so it is issued with ``async_op=True`` and returns a ``Work`` to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

# torch 2.13 renamed these and warns at the old names; the oldest supported version, 2.9, has no others.
_all_gather_single: Callable[..., dist.Work | None] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_reduce_scatter_single: Callable[..., dist.Work | None] = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)


def is_async(device: torch.device) -> bool:
    """Whether a collective on this device must be issued with ``async_op=True`` to leave the host free."""
    return device.type == "cpu"


def all_gather(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work | None:
    """Gathers each input, 1-D of n elements, into its output, 1-D of world * n: one operation for all of them.

    Several pieces become one coalesced call, which NCCL runs as one group launch. An input may be its own place in the
    output (gather in place).
    """
    async_op = is_async(outputs[0].device)
    if len(outputs) == 1:
        return _all_gather_single(outputs[0], inputs[0], group=group, async_op=async_op)
    options = AllgatherOptions()
    options.asyncOp = async_op
    coalesced: Any = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    work: dist.Work | None = coalesced(list(outputs), list(inputs), options)
    if async_op or work is None:
        return work
    work.wait()
    return None


def reduce_scatter(
    output: torch.Tensor, packed: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Reduces ``packed``, 1-D of world * n elements and rank-major, into ``output``, 1-D of n."""
    return _reduce_scatter_single(output, packed, op=operation, group=group, async_op=is_async(output.device))


def all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work | None:
    """Reduces ``tensor`` in place."""
    work: dist.Work | None = dist.all_reduce(tensor, op=operation, group=group, async_op=is_async(tensor.device))
    return work


def averages(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the backend can average; if not, a sum must be divided."""
    backend: str = dist.get_backend(group)
    return device.type == "cuda" and "nccl" in backend
