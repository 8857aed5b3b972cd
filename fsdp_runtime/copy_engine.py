"""Gathers by copies out of the peers' memory: every rank reads the others' shards where they lie.

Shards lie in symmetric memory, which every rank of the group has mapped. A gather is one copy for each peer and
parameter, straight into the unsharded buffer, and one for each parameter of the own shard. Copies between devices run
on copy engines and need no SM. A copy inside one device does (on an H200 it waits for the tail of a matmul that fills
the SMs), so the own shard comes last: the peers' shards are then hidden already.

The protocol
------------
Nobody may read a shard before its owner's optimizer has written it, nor write it while a peer reads it. Shards change
only between passes (a forward, a backward), so the ranks agree around a pass, not around each gather; inside one a
gather waits for nobody. Pass ``n`` of a context, on every rank:

    open    on the gather's stream   ``written[me] = n`` on every peer; wait for ``written[peer] >= n`` of every peer
    gathers on the gather's stream   copies, and nothing else
    close   on the gather's stream   ``read[me] = n`` on every rank, this one too
            on the caller's stream   wait for ``read[rank] >= n`` of every rank, this one too

Why each is needed:

- ``written``: the gather's stream has waited for the caller's stream, so for the optimizer's step and for staging. A
  peer that waits for it reads what the step wrote. Without this wait a fast reader gets a slow owner's last step's
  parameters.
- ``read``: written behind the last copy of the pass, on the same stream. An owner whose caller's stream has waited for
  it may do anything with its shards: the optimizer runs on that stream. Without this wait a fast owner overwrites what
  a slow reader has not copied yet; without its own word it could overwrite what it has not copied itself.
- Counters, not flags: nobody resets anything, and a rank that is a pass ahead is understood.

With mixed precision peers read a *staged* shard in the dtype of the computation, filled when a forward begins. What
fills it comes before ``written`` of that pass and, because the caller's stream has closed the pass before, after all
reads of the last one.

Signals are stream memory operations, not kernels (see ``stream_memory.py``): a kernel would wait for an SM, and the
copies behind it. The host never waits, except when memory is allocated and when a context is made.

Memory is allocated in the same order on all ranks, each time anew: a pool that gave a freed block to one rank and
another to its peer would map them onto each other.

The end
-------
Ranks need not agree on it: memory that somebody has mapped exists until nobody has, so a rank may delete a model, or
exit, while its peers still read the shards. It frees nothing that it still reads itself, as torch waits for the device
before it unmaps symmetric memory. But it must have said its last words: a rank that exits with ``read`` still in a
stream leaves its peers waiting for ever. So the end of a context, which is at the latest that of the process, waits for
the device. It waits for peers no further than they have come when they have issued the same passes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.utils.weak import WeakTensorKeyDictionary

from . import stream_memory
from .gather import Exchange, Gather, Handle

SHARED_DEVICE_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable that is ``1`` where ranks may share a GPU: for tests, its times are no measure of anything."""


def may_share_device() -> bool:
    """Whether torch lets ranks on one GPU map each other's memory."""
    return os.environ.get(SHARED_DEVICE_VARIABLE) == "1"


class CopyEngineGather(Gather):
    """Reads the peers' shards. For the ranks of one host whose GPUs access each other's memory."""

    uncapturable = "gather='copy_engine': its signals count passes, and a CUDA graph would repeat the same count"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """group: must have communicated before: its first operation may not be the rendezvous."""
        self._group = group
        self._device = device
        self._world = group.size()
        self._rank = group.rank()
        self._copies: MutableMapping[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]] = WeakTensorKeyDictionary()
        """By a unit's first buffer: its copies, because to look each of them up costs more than to issue it. They go
        with that buffer: it is a view, and they refer to what it is a view of."""

    def empty_shard(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A collective on a GPU: the ranks map each other's memory."""
        if device.type == "meta":
            return super().empty_shard(numel, dtype, device)
        return symmetric_empty(max(1, numel), dtype, device, self._group).narrow(0, 0, numel)

    def staging(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        if sharded.is_meta:
            return None
        return sharded if sharded.dtype == dtype else self.empty_shard(sharded.numel(), dtype, sharded.device)

    def gather(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        stream: Any,
        event: Any,
    ) -> Handle:
        if shards:
            copies = self._copies.get(buffers[0])
            if copies is None:
                copies = self._copies[buffers[0]] = self._plan(buffers, shards)
            for place, source in copies:
                place.copy_(source)
        event.record(stream)
        return Handle(event, None)

    @torch.inference_mode(False)
    def _plan(
        self, buffers: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What goes where, in the order of the copies. A unit makes its buffers and shards once and together."""
        rendezvous = symmetric_memory.rendezvous(shards[0], self._group.group_name)  # already mapped: a look-up
        copies = []
        for distance in range(1, self._world + 1):  # each rank begins with another peer, so no link is asked twice
            peer = (self._rank + distance) % self._world
            for buffer, shard in zip(buffers, shards, strict=True):
                source = shard
                if peer != self._rank:
                    source = rendezvous.get_buffer(peer, shard.shape, shard.dtype, int(shard.storage_offset()))
                copies.append((buffer.narrow(0, peer * shard.numel(), shard.numel()), source))
        return copies

    def exchange(self) -> Exchange:
        return PassSignals(self._group, self._device)


class PassSignals(Exchange):
    """The words that ranks write into each other's memory around a pass."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._pass = 0
        # For each rank a word that it writes ``written`` into, then for each one for ``read``.
        self._words = symmetric_empty(2 * group.size(), torch.int32, device, group).zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before all are zero
        rank = group.rank()
        bases = symmetric_memory.rendezvous(self._words, group.group_name).buffer_ptrs
        world = group.size()
        size = self._words.element_size()
        peers = [peer for peer in range(world) if peer != rank]
        self._tell_written = [bases[peer] + size * rank for peer in peers]
        self._told_written = [bases[rank] + size * peer for peer in peers]
        self._tell_read = [bases[reader] + size * (world + rank) for reader in range(world)]
        self._told_read = [bases[rank] + size * (world + reader) for reader in range(world)]
        weakref.finalize(self, torch.cuda.synchronize, device)  # also at exit: what was issued is said

    def open(self, stream: Any) -> None:
        self._pass = (self._pass + 1) % 2**32
        self._signal(stream, self._tell_written, self._told_written)

    def close(self, stream: Any, caller: Any) -> None:
        self._signal(stream, self._tell_read, [])
        self._signal(caller, [], self._told_read)

    def _signal(self, stream: Any, tell: list[int], told: list[int]) -> None:
        stream_memory.write_and_wait(stream, [(a, self._pass) for a in tell], [(a, self._pass) for a in told])


def symmetric_empty(numel: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """``[numel]`` that every rank of ``group`` has mapped. A collective. Never reused memory, as that of ``empty`` may
    be."""
    allocate = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p
    tensor: torch.Tensor = allocate((numel,), (1,), dtype, device)
    symmetric_memory.rendezvous(tensor, group.group_name)
    return tensor
