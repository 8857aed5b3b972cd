"""A device that exists only in Python: streams are queues that run when the test says so, in an order that it chooses.

It stands in for ``torch.cuda`` where the runtime asks for a device's streams. The host enqueues a whole step, running
ahead as far as a host can; then the queues run, and one stream can be made as late as its events allow. What the
runtime does not order by events then happens in the wrong order, every time.

It also captures graphs, by the rules of CUDA's stream capture. A stream belongs to the capture once it has waited for
an event recorded in it. While one is under way nothing may be issued on a stream that does not belong to it, nothing in
it may wait for an event recorded outside, nor the other way round; and when it ends, everything in it must come before
the end of the stream that it began on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from fsdp_runtime import collectives
from fsdp_runtime.gather import Gather, Handle
from fsdp_runtime.layout import Layout
from fsdp_runtime.reduction import Reduction


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[tuple[str, Any]] = deque()
        self.capture: Graph | None = None
        self.after: dict[Stream, int] = {}
        """What it has issued and waited for in a capture: of each stream so many items."""

    def enqueue(self, operation: Callable[[], None]) -> None:
        self.put("run", operation)

    def put(self, kind: str, item: Any) -> None:
        if self.capture is not self.device.capture_under_way:
            raise CaptureError("issued outside of the capture that is under way")
        self.queue.append((kind, item))
        self.after[self] = self.after.get(self, 0) + 1

    def wait_event(self, event: Event) -> None:
        if event.recorded is None or self.device.ignores_waits_of(self):
            return
        if event.capture is not self.device.capture_under_way:
            raise CaptureError("a wait for an event of another capture, or of none")
        self.capture = event.capture
        self.after |= {s: max(n, self.after.get(s, 0)) for s, n in event.after.items()}
        self.put("wait", event.recorded)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """Has neither ``synchronize`` nor ``query``: the host must not wait for the device."""

    def __init__(self) -> None:
        self.recorded: dict[str, bool] | None = None
        self.capture: Graph | None = None
        self.after: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        self.recorded = {"happened": False}
        stream.put("record", self.recorded)
        self.capture, self.after = stream.capture, dict(stream.after)


class CaptureError(AssertionError):
    """What CUDA would refuse."""


class Graph:
    """What was issued during a capture, to be run as often as one likes."""

    def __init__(self) -> None:
        self.queues: dict[Stream, list[tuple[str, Any]]] = {}

    def replay(self, order: Sequence[Stream]) -> None:
        """As ``Device.run``."""
        for stream, queue in self.queues.items():
            assert not stream.queue
            stream.queue.extend(queue)
            for kind, item in queue:
                if kind == "record":
                    item["happened"] = False
        next(iter(self.queues)).device.run(order)


class Device:
    """Has what the runtime uses of ``torch.cuda``."""

    Event = Event

    def __init__(self) -> None:
        self.compute = Stream(self)
        self.streams = [self.compute]
        self.careless: set[int] = set()
        self._current = self.compute
        self.capture_under_way: Graph | None = None

    def is_current_stream_capturing(self) -> bool:
        return self._current.capture is not None

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Of what is issued inside on the current stream and those that it forks; all queues must have run before."""
        graph = self.capture_under_way = self._current.capture = Graph()
        for stream in self.streams:
            assert not stream.queue
            stream.after = {}
        try:
            yield graph
            unjoined = [s for s in self.streams if s.capture and s.after.get(s, 0) > self._current.after.get(s, 0)]
            if unjoined:
                raise CaptureError(f"not joined: streams {[self.streams.index(s) for s in unjoined]}")
        finally:
            graph.queues = {stream: list(stream.queue) for stream in self.streams}
            for stream in self.streams:
                stream.queue.clear()
                stream.capture = None
            self.capture_under_way = None

    def Stream(self, priority: int) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self._current

    def set_stream(self, stream: Stream) -> None:
        self._current = stream

    def ignores_waits_of(self, stream: Stream) -> bool:
        return self.streams.index(stream) in self.careless

    def run(self, order: Sequence[Stream]) -> None:
        """Runs everything; whenever several streams could go on, the first in ``order`` does."""
        while any(stream.queue for stream in order):
            for stream in order:
                if stream.queue and self._step(stream):
                    break
            else:
                raise AssertionError("every stream waits for another")

    def _step(self, stream: Stream) -> bool:
        kind, item = stream.queue[0]
        if kind == "wait" and not item["happened"]:
            return False
        stream.queue.popleft()
        if kind == "run":
            item()
        elif kind == "record":
            item["happened"] = True
        return True


class SimulatedGather(Gather):
    """For one rank: copies the shards on the stream that it is given."""

    def gather(self, buffers: Any, shards: Any, group: Any, stream: Stream, event: Event) -> Handle:
        def copy() -> None:
            for buffer, shard in zip(buffers, shards, strict=True):
                buffer.copy_(shard)

        stream.enqueue(copy)
        event.record(stream)
        return Handle(event, None)


COMPUTE, ALL_GATHER, REDUCE_SCATTER = 0, 1, 2
"""Places of a context's streams among those of a device: the caller's, then the two that it made."""


@contextlib.contextmanager
def simulated_reduction(device: Device) -> Iterator[None]:
    """For one rank: packing runs on the caller's stream, the reduce-scatter, a copy, on its own.

    A packed buffer is poisoned on the caller's stream when it is freed, because the next allocation there gets its
    memory.
    """
    pack, wait = Layout.pack, Reduction.wait

    def enqueued_pack(layout: Layout, gradients: Any, dtype: Any, on: Any) -> torch.Tensor:
        packed = torch.zeros(layout.unsharded_numel)
        device.current_stream().enqueue(lambda: packed.copy_(pack(layout, gradients, dtype, on)))
        return packed

    def enqueued_reduce_scatter(output: torch.Tensor, packed: torch.Tensor, operation: Any, group: Any) -> None:
        assert device.current_stream() is device.streams[REDUCE_SCATTER]
        device.current_stream().enqueue(lambda: output.copy_(packed))

    def poisoned_wait(reduction: Reduction, stream: Any) -> None:
        packed = reduction._packed
        wait(reduction, stream)
        device.compute.enqueue(lambda: packed.fill_(float("nan")))

    with (
        mock.patch.object(Layout, "pack", enqueued_pack),
        mock.patch.object(Reduction, "wait", poisoned_wait),
        mock.patch.object(collectives, "reduce_scatter", enqueued_reduce_scatter),
    ):
        yield


class SimulatedLinear(torch.autograd.Function):
    """``x @ weight.T`` on the device's current stream."""

    @staticmethod
    def forward(ctx: Any, device: Device, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.device = device
        ctx.save_for_backward(x, weight)
        output = x.new_zeros(x.shape[0], weight.shape[0])
        device.current_stream().enqueue(lambda: output.copy_(x.detach() @ weight.detach().T))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        stream = ctx.device.current_stream()
        result = gradient.new_zeros(x.shape)
        stream.enqueue(lambda: result.copy_(gradient @ weight.detach()))
        if weight.requires_grad:
            # Set here: autograd would copy what it cannot own, before the queues run.
            of_weight = weight.grad = torch.zeros_like(weight)
            stream.enqueue(lambda: of_weight.copy_(gradient.T @ x.detach()))
        return None, result, None
