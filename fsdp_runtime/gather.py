"""Gathers: how the bytes of a unit get from every rank's shard into this rank's unsharded buffer.

A gather is given buffers and a stream and gives back a handle; it knows nothing about units, order or release. A
mechanism with needs of its own (registered memory, peers that read each other's shards) overrides where memory comes
from, how the shard gets ready to travel, and what the ranks tell each other around a pass.

process_group  this file        NCCL's kernels, or gloo's threads
zero_cta       zero_cta.py      NCCL on copy engines
copy_engine    copy_engine.py   peers' shards, read directly
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from . import collectives

GatherName = Literal["auto", "process_group", "zero_cta", "copy_engine"]


class Handle(NamedTuple):
    """Communication that was issued: an event of the stream it runs on, and on a CPU the work to wait for."""

    event: Any
    work: dist.Work | None

    def wait(self, stream: Any) -> None:
        """Orders what ``stream`` does from now on after the communication. Blocks the host on a CPU only."""
        if self.work is not None:
            self.work.wait()
        stream.wait_event(self.event)


class Exchange:
    """What the ranks of a group tell each other around a pass: a forward, or a backward. Here: nothing.

    A context has one for each gather that its units use.
    """

    def open(self, stream: Any) -> None:
        """A pass begins. All changes of the shards come before this point of ``stream``, and gathers follow on it."""

    def close(self, stream: Any, caller: Any) -> None:
        """A pass ends: no gather follows on ``stream``. Whatever ``caller`` does next may change the shards."""


class Gather(ABC):
    """How bytes move. One object serves all units of a process group, and goes with the last of them or at exit."""

    uncapturable: str | None = None
    """Why a CUDA graph cannot hold its gathers; None: it can."""

    def empty_shard(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[numel]``: memory for a unit's sharded parameters. It lives as long as the unit; peers may read it."""
        return torch.empty(numel, dtype=dtype, device=device)

    def staging(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """``[numel]``: memory that holds the shard as it travels, in ``dtype``, from the beginning of a pass on.

        The runtime fills it when a forward begins, unless it is ``sharded`` itself, which travels as it is where that
        is its dtype. None: ``stage`` is asked for each gather.
        """
        return sharded if sharded.dtype == dtype else None

    def memory(self) -> AbstractContextManager[object]:
        """Entered while the storage of an unsharded buffer is allocated, so that it can come from a memory pool."""
        return nullcontext()

    def stage(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[numel]``: the shard as it travels: in the dtype of the computation. Runs on the gather's stream."""
        return sharded.to(dtype)

    def place(
        self, buffers: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Any, early: Any
    ) -> Sequence[torch.Tensor]:
        """What ``gather`` is to be given as ``shards``: a gather in place puts them into their place in the buffers.

        stream: that of the gather, the current one. early: a stream that gets to it sooner if SMs are busy: the
        caller's, before it computes, if the gather is issued ahead, else ``stream``.
        """
        return shards

    @abstractmethod
    def gather(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        stream: Any,
        event: Any,
    ) -> Handle:
        """Fills every buffer with the shards of all ranks of ``group``, as one collective.

        buffers: for each piece ``[world * n]`` of the unsharded buffer, rank 0's place first. A piece is a parameter;
            for one rank, all of them.
        shards: for each piece this rank's ``[n]`` of the staged shard.
        stream: the current stream, which all work must be ordered on; ``event`` is recorded on it at the end.
        """

    def exchange(self) -> Exchange:
        """Made once by each context, in the same order on all ranks."""
        return Exchange()


class ProcessGroupGather(Gather):
    """A grouped all-gather of the process group: NCCL's kernels, or gloo's threads."""

    def gather(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        stream: Any,
        event: Any,
    ) -> Handle:
        work = collectives.all_gather(buffers, shards, group)
        event.record(stream)
        return Handle(event, work)
