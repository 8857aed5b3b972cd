"""Gathers by NCCL on copy engines: a communicator with CTA policy ZERO, in place, in registered memory.

NCCL runs an all-gather as copies between devices (each rank writes into its peers' buffers) if the communicator asks
for zero CTAs and both buffers lie in memory that is registered as a symmetric window; otherwise it silently runs
kernels. So:

- *A communicator of its own*, made here: the policy holds for a whole communicator, and reduce-scatters stay kernels on
  another one (they need SMs to add: about 24 CTAs on two H200s).
- *Registered memory*: unsharded buffers come from a pool of NCCL's own allocations. Released buffers are used again, so
  that after the first pass nothing is registered any more: registration is a collective that takes milliseconds.
- *In place*: given a shard elsewhere NCCL first copies it into the buffer; a copy inside one device needs SMs, waits
  for the tail of a matmul that fills them, and the copies to the peers wait behind it. The layout has a place for the
  own shard inside the buffer, so it is put there before (``place``). Gathered ahead, this is done on the caller's
  stream just before it computes: it costs the time of the copy and waits for nothing. That copy also casts, so nothing
  else need be staged, and the shards themselves need not be registered: peers never read them.
- *Never on the null stream*, which the call that NCCL uses (``cudaMemcpyBatchAsync``) refuses: where the caller's
  stream is the null stream and the schedule gathers there, the gather goes to a stream that follows it and that it
  waits for.

The life of a communicator
--------------------------
It belongs to the process group that it was made for: all models of that group share it, and it goes when
``destroy_process_group`` destroys all groups. Destroying it earlier would have to be agreed on by the ranks, and a
Python object dies when each rank's interpreter finds it unused.

Its registered memory goes with the last unit that uses it, or at exit if there still is one; this needs no agreement.
The order matters, as nothing below does it:

1. *wait* for the device. Ending a registration unmaps the peers' buffers, and freeing NCCL's memory unmaps the own one,
   at once (unlike ``cudaFree``): a copy or a matmul that still runs there is an illegal memory access, which kills the
   process from the thread that next looks at the device. After the wait no peer writes here any more either: the
   gathers that this rank has issued are over for all.
2. *deregister*, while the memory exists. A pool that is freed while it is registered deregisters itself in a C++
   destructor, which cannot report that the communicator is destroyed already: it would end the process. Asked before,
   it is an exception that says that there is nothing left to do.
3. *free*: then nobody knows the pool. Memory in it that a tensor still holds is freed when that tensor is.

The order of buffers
--------------------
A gather goes to the same window on every rank. Which of several free buffers of a pool is used again depends (in
torch up to 2.12 at least) on the order of their addresses, so this order is compared among the ranks whenever there is
a new one: if it differs, a rank would write into a buffer that its peer does not mean.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import collectives
from .errors import FsdpError
from .gather import Gather, Handle

CE_COLLECTIVES = (2, 28)
"""The NCCL version that brought collectives on copy engines."""


class ZeroCtaGather(Gather):
    """An all-gather without SMs. For the ranks of one host whose GPUs access each other's memory."""

    uncapturable = "gather='zero_cta': a CUDA graph has memory of its own, which is not registered with NCCL"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """The first for a ``group`` makes a communicator of its ranks: a collective among them."""
        self._parent = group
        self._device = device
        self._rank = group.rank()
        self._group = _communicator(group, device)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._backend: Any = self._group._get_backend(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        self._registered: dict[int, None] = {}
        """Addresses of buffers in registered segments, in the order in which they were first used."""
        self._end: weakref.finalize[..., Any] | None = None

    @contextlib.contextmanager
    def memory(self) -> Iterator[None]:
        with torch.cuda.use_mem_pool(self._pool):
            yield

    def stage(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return sharded  # ``place`` casts

    def place(
        self, buffers: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], stream: Any, early: Any
    ) -> Sequence[torch.Tensor]:
        if not shards:
            return shards
        self._register(buffers[0].data_ptr())
        places = [b.narrow(0, self._rank * s.numel(), s.numel()) for b, s in zip(buffers, shards, strict=True)]
        with torch.cuda.stream(early):
            torch._foreach_copy_(places, list(shards))
        if early != stream:
            stream.wait_stream(early)
        return places

    def gather(
        self,
        buffers: Sequence[torch.Tensor],
        shards: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        stream: Any,
        event: Any,
    ) -> Handle:
        if shards and stream == torch.cuda.default_stream(stream.device):
            self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                collectives.all_gather(buffers, shards, self._group)
            stream.wait_stream(self._stream)
        elif shards:
            collectives.all_gather(buffers, shards, self._group)
        event.record(stream)
        return Handle(event, None)

    def _register(self, address: int) -> None:
        """Registers the pool's segments anew if the buffer at ``address`` may lie in a new one. A collective then.

        Raises FsdpError if the ranks' buffers do not lie in the same order.
        """
        if address in self._registered:
            return
        if self._end is None:
            self._end = weakref.finalize(self, _end_registration, self._backend, self._pool, self._device)
        else:
            torch.cuda.synchronize(self._device)  # no gather is under way in memory that is not registered
            self._backend.deregister_mem_pool(self._pool)
        self._backend.register_mem_pool(self._pool, symm=True)
        _check_same_order([*self._registered, address], self._parent)
        self._registered[address] = None


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""By the process group that it has the ranks of."""


def _communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The one of ``group`` with CTA policy ZERO. A collective among its ranks if there is none yet."""
    made = _communicators.get(group)
    if made is None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="nccl",
            pg_options=options,
            use_local_synchronization=True,
            group_desc="fsdp_runtime zero_cta",
        )
        # The communicator exists from its first operation on, and that may not be the registration.
        dist.all_reduce(torch.zeros(1, device=device), group=made)
        torch.cuda.synchronize(device)
        _communicators[group] = made
    return made


def _end_registration(backend: Any, pool: torch.cuda.MemPool, device: torch.device) -> None:
    """Runs before the pool is freed, and at exit; see the module's docstring, "The life of a communicator"."""
    try:
        torch.cuda.synchronize(device)
    finally:
        with contextlib.suppress(RuntimeError):  # the communicator is gone, and its windows with it
            backend.deregister_mem_pool(pool)


def _check_same_order(addresses: list[int], group: dist.ProcessGroup) -> None:
    order = sorted(range(len(addresses)), key=addresses.__getitem__)
    orders: list[list[int]] = [[]] * group.size()
    dist.all_gather_object(orders, order, group=group)
    if any(other != order for other in orders):
        raise FsdpError(
            "gather='zero_cta': the allocator put the ranks' buffers in different orders, so that it would use "
            "different ones for the same gather; use gather='copy_engine'"
        )
