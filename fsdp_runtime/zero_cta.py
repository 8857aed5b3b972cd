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
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import collectives
from .gather import Gather, Handle

CE_COLLECTIVES = (2, 28)
"""The NCCL version that brought collectives on copy engines."""


class ZeroCtaGather(Gather):
    """An all-gather without SMs. For the ranks of one host whose GPUs access each other's memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Makes a communicator of the ranks of ``group``: a collective among them."""
        self._parent = group
        self._rank = group.rank()
        self._group = _zero_cta_group(group)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # The communicator exists from its first operation on, and that may not be the registration.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        torch.cuda.synchronize(device)
        self._backend: Any = self._group._get_backend(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        self._registered: set[int] = set()
        """Addresses of buffers in registered segments."""

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
        """Registers the pool's segments anew if the buffer at ``address`` may lie in a new one. A collective then."""
        if address in self._registered:
            return
        if self._registered:
            torch.cuda.synchronize()  # no gather is under way in memory that is not registered
            self._backend.deregister_mem_pool(self._pool)
        self._backend.register_mem_pool(self._pool, symm=True)
        self._registered.add(address)


def _zero_cta_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(
        ranks, backend="nccl", pg_options=options, use_local_synchronization=True, group_desc="fsdp_runtime zero_cta"
    )
    return made
