"""A device that exists only in Python: streams are queues that run when the test says so, in an order that it chooses.

It stands in for ``torch.cuda`` where the runtime asks for a device's streams. The host enqueues a whole step, running
ahead as far as a host can; then the queues run, and one stream can be made as late as its events allow. What the
runtime does not order by events then happens in the wrong order, every time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdp_runtime.gather import Gather, Handle


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[tuple[str, Any]] = deque()

    def enqueue(self, operation: Callable[[], None]) -> None:
        self.queue.append(("run", operation))

    def wait_event(self, event: Event) -> None:
        if event.recorded is not None and not self.device.ignores_waits_of(self):
            self.queue.append(("wait", event.recorded))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    """Has neither ``synchronize`` nor ``query``: the host must not wait for the device."""

    def __init__(self) -> None:
        self.recorded: dict[str, bool] | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = {"happened": False}
        stream.queue.append(("record", self.recorded))


class Device:
    """Has what the runtime uses of ``torch.cuda``: Stream, Event, stream() and current_stream()."""

    Event = Event

    def __init__(self) -> None:
        self.compute = Stream(self)
        self.streams = [self.compute]
        self.careless: set[int] = set()
        self._current = self.compute

    def Stream(self, priority: int) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

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
