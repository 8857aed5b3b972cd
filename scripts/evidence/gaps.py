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

LAYERS, DIM, BATCH = 8, 4096, 4096
REPEATS, WARMUP = 20, 2
SLEEP_US = 4000.0
BYTES = {"host": 2 << 20, "device": 16 << 20}
"""Of one copy: inside the device a rank's shard; from the host less, as that is slower."""


@dataclass(frozen=True)
class Forward:
    """record: something is recorded after each GEMM. wait: each waits for its copy, or if there is none for what is
    over. gate: each copy waits for the GEMM before the last. by_value: with stream memory operations, not events."""

    record: bool = False
    wait: bool = False
    copy: Literal["host", "device"] | None = None
    gate: bool = False
    by_value: bool = False


FORWARDS = {
    "GEMMs alone": Forward(),
    "an event recorded after each": Forward(record=True),
    "a word written after each": Forward(record=True, by_value=True),
    "a wait before each": Forward(wait=True),
    "copies from the host, waited for": Forward(wait=True, copy="host"),
    "... that wait, too": Forward(record=True, wait=True, copy="host", gate=True),
    "... by words": Forward(record=True, wait=True, copy="host", gate=True, by_value=True),
    "copies inside the device, waited for": Forward(wait=True, copy="device"),
    "... which wait, too": Forward(record=True, wait=True, copy="device", gate=True),
}


class Signals:
    """One thing for each GEMM that a stream can tell and another wait for: an event, or a word of memory."""

    def __init__(self, by_value: bool) -> None:
        self._by_value = by_value
        self._events: list[Any] = [torch.cuda.Event() for _ in range(LAYERS)]  # type: ignore[no-untyped-call]
        self._words = torch.zeros(LAYERS, dtype=torch.int32, device=device.device())
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
            if made.copy is not None and i + 1 < LAYERS:
                if made.gate and i > 0:
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
    generator = torch.Generator(device.device()).manual_seed(0)
    x, *weights = (
        torch.randn(rows, DIM, device=device.device(), dtype=device.DTYPE, generator=generator)
        for rows in (BATCH, *[DIM] * LAYERS)
    )
    compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    forwards = {name: forward_of(made, x, weights, compute) for name, made in FORWARDS.items()}
    times: dict[str, list[float]] = {name: [] for name in forwards}
    with torch.no_grad(), torch.cuda.stream(compute):
        for repeat in range(WARMUP + REPEATS):
            for name, run in forwards.items():  # in turns: a GPU's clock depends on what it did before
                torch.cuda.synchronize()
                device.sleep(SLEEP_US)
                start.record()
                run()
                end.record()
                torch.cuda.synchronize()
                if repeat >= WARMUP:
                    times[name].append(start.elapsed_time(end) * 1e3)
    print(
        f"{LAYERS} GEMMs of {BATCH} x {DIM} x {DIM} {device.DTYPE}, {torch.cuda.get_device_name()}; us, median (least)"
    )
    for name, measured in times.items():
        print(f"{name:38} {statistics.median(measured):8.1f} ({min(measured):.1f})")


if __name__ == "__main__":
    main()
