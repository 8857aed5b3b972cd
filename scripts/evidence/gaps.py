"""Measures what stands between two GEMMs of a forward: events, signals, copies beside them.

The idea: a forward's stream order without a runtime and on one GPU, with one ingredient after the other. A second
stream copies beside each GEMM what the next one needs. A copy from the host runs on a copy engine, one inside the
device on SMs. The device sleeps first, so that the host is ahead.

    python -m scripts.evidence.gaps
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from fsdp_runtime import stream_memory

from . import device
from .cases import UNITS
from .models import DIM, linear_stack

BATCH = 4096
WARMUP = 2
SLEEP_US = 4000.0
BYTES = {"host": 2 << 20, "device": 16 << 20}
"""Of one copy: inside the device a rank's shard; from the host less, as that is slower."""


@dataclass(frozen=True)
class Forward:
    """record: something is recorded after each GEMM; if there are copies, each waits for the GEMM before the last.
    wait: each GEMM waits for its copy, or if there is none for what is over. by_value: with stream memory operations,
    not events."""

    record: bool = False
    wait: bool = False
    copy: Literal["host", "device"] | None = None
    by_value: bool = False


FORWARDS = {
    "GEMMs alone": Forward(),
    "an event recorded after each": Forward(record=True),
    "a word written after each": Forward(record=True, by_value=True),
    "a wait before each": Forward(wait=True),
    "copies from the host, waited for": Forward(wait=True, copy="host"),
    "... that wait, too": Forward(record=True, wait=True, copy="host"),
    "... by words": Forward(record=True, wait=True, copy="host", by_value=True),
    "copies inside the device, waited for": Forward(wait=True, copy="device"),
    "... which wait, too": Forward(record=True, wait=True, copy="device"),
}


class Signals:
    """One thing for each GEMM that a stream can tell and another wait for: an event, or a word of memory."""

    def __init__(self, by_value: bool) -> None:
        self._by_value = by_value
        self._events: list[Any] = [torch.cuda.Event() for _ in range(UNITS)]  # type: ignore[no-untyped-call]
        self._words = torch.zeros(UNITS, dtype=torch.int32, device=device.device())
        self.round = 0

    def tell(self, index: int, stream: Any) -> None:
        if self._by_value:
            stream_memory.write_and_wait(stream, [(self._address(index), self.round)], [])
        else:
            self._events[index].record(stream)

    def wait(self, index: int, stream: Any) -> None:
        if self._by_value:
            stream_memory.write_and_wait(stream, [], [(self._address(index), self.round)])
        else:
            stream.wait_event(self._events[index])

    def _address(self, index: int) -> int:
        return self._words.data_ptr() + index * self._words.element_size()


def forward_of(made: Forward, x: torch.Tensor, weights: list[torch.Tensor], compute: Any) -> Callable[[], None]:
    """Issues it on ``compute``, the current stream."""
    copies = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    computed, copied = Signals(made.by_value), Signals(made.by_value)
    if made.copy is not None:
        of_device = torch.empty(2, BYTES[made.copy], dtype=torch.uint8, device=device.device())
        source = torch.empty_like(of_device[0])
        if made.copy == "host":
            source = torch.empty(BYTES["host"], dtype=torch.uint8, pin_memory=True)

    def run() -> None:
        y = x
        computed.round = copied.round = copied.round + 1
        copies.wait_stream(compute)
        for i, weight in enumerate(weights):
            if made.wait and (made.copy is None or i > 0):
                copied.wait(i, compute)
            if made.copy is not None and i + 1 < len(weights):
                if made.record and i > 0:
                    computed.wait(i - 1, copies)
                with torch.cuda.stream(copies):
                    of_device[i % 2].copy_(source, non_blocking=True)
                copied.tell(i + 1, copies)
            y = F.linear(y, weight)
            if made.record:
                computed.tell(i, compute)

    return run


def main() -> None:
    torch.cuda.set_device(0)
    weights = [layer.weight for layer in linear_stack()]
    x = torch.randn(BATCH, DIM, device=device.device(), dtype=device.DTYPE)
    compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    forwards = {name: forward_of(made, x, weights, compute) for name, made in FORWARDS.items()}
    times: dict[str, list[float]] = {name: [] for name in forwards}
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(compute):
        for _ in range(WARMUP + device.REPEATS):
            for name, run in forwards.items():  # in turns: a GPU's clock depends on what it did before
                times[name].append(device.once(run, SLEEP_US)[0])
    print(
        f"{UNITS} GEMMs of {BATCH} x {DIM} x {DIM} {device.DTYPE}, {torch.cuda.get_device_name()}; us, median (least)"
    )
    for name, all_times in times.items():
        measured = all_times[WARMUP:]
        print(f"{name:38} {statistics.median(measured):8.1f} ({min(measured):.1f})")


if __name__ == "__main__":
    main()
