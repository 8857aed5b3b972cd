"""The collectives that the runtime calls: the only place that knows torch.distributed's spelling of them.

A collective is asynchronous in one of two ways. On an accelerator it is a kernel (or copies) on the stream that is
current when it is issued, so it is issued with ``asyncOp`` off and ordered by events. On a CPU it runs on a thread of
the backend, so it is issued with ``asyncOp`` on and returns a ``Work`` to wait for.

The process group's own methods are called, not the functions around them, which check what is known here and cost the
host as much again. In a group of one rank, as a dimension of a mesh may be, there is nobody to call: on an accelerator
a copy does it, which is as asynchronous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions


def _method(*names: str) -> Callable[..., dist.Work | None]:
    """The first of these methods that process groups have: torch 2.13 has renamed them."""
    found: Callable[..., dist.Work | None] = next(
        getattr(dist.ProcessGroup, name) for name in names if hasattr(dist.ProcessGroup, name)
    )
    return found


_all_gather_single = _method("all_gather_single", "_allgather_base")
_all_gather_coalesced = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_reduce_scatter_single = _method("reduce_scatter_single", "_reduce_scatter_base")


def all_gather(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work | None:
    """Gathers each input, 1-D of n elements, into its output, 1-D of world * n: one operation for all of them.

    Several pieces become one coalesced call, which NCCL runs as one group launch. An input may be its own place in the
    output (gather in place).
    """
    if _is_alone(outputs[0], group):
        for output, own in zip(outputs, inputs, strict=True):
            if output.data_ptr() != own.data_ptr():
                output.copy_(own)
        return None
    options = _gather_options(outputs[0].is_cpu)
    if len(outputs) == 1:
        return _issued(_all_gather_single(group, outputs[0], inputs[0], options), options)
    return _issued(_all_gather_coalesced(group, list(outputs), list(inputs), options), options)


def reduce_scatter(
    output: torch.Tensor, packed: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work | None:
    """Reduces ``packed``, 1-D of world * n elements and rank-major, into ``output``, 1-D of n."""
    if _is_alone(output, group):
        output.copy_(packed)
        return None
    options = _reduce_options(output.is_cpu, operation)
    return _issued(_reduce_scatter_single(group, output, packed, options), options)


def all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work | None:
    """Reduces ``tensor`` in place."""
    if _is_alone(tensor, group):
        return None
    work: dist.Work | None = dist.all_reduce(tensor, op=operation, group=group, async_op=tensor.is_cpu)
    return work


def averages(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the backend can average; if not, a sum must be divided."""
    backend: str = dist.get_backend(group)
    return device.type == "cuda" and "nccl" in backend


def _is_alone(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return not tensor.is_cpu and group.size() == 1


@functools.cache
def _gather_options(is_async: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = is_async
    return options


@functools.cache
def _reduce_options(is_async: bool, operation: dist.ReduceOp.RedOpType) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = operation  # type: ignore[assignment]
    options.asyncOp = is_async
    return options


def _issued(work: dist.Work | None, options: Any) -> dist.Work | None:
    """What the caller has to wait for; None if the current stream already does."""
    if options.asyncOp or work is None:
        return work
    work.wait()  # a backend that ran it on a stream of its own
    return None
