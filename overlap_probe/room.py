"""Says what needs SMs, and when a kernel that fills the device leaves room for something else.

The idea: the blocks of a kernel that fills the device hold all SMs until its last wave, in which there is no work left
for some of them. Only then, in its *tail*, can anything start that needs SMs. A persistent kernel has a block an SM,
and its blocks take the tiles of its output in turn: as many waves as it has tiles for each block, the tail is the last
of them. Which tiles it has is told by its name and by the shapes of its operation; where they do not tell, the tail is
taken to be short.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod

from overlap_probe.kernels import tile_of
from overlap_probe.tables import KERNEL, MEMCPY, Trace

TAIL_SHARE = 0.35
"""The tail of a kernel whose tiles are not known: at most this share of its time."""
WAVES_DIFFER = 1.2
"""A wave takes at most this often the time that all take on average: the first begins with nothing in the caches."""


def needs_sms(trace: Trace, row: int) -> bool:
    """Whether an activity needs SMs: a kernel does, so does a copy inside one device, one between devices does not."""
    activities = trace.activities
    source, target = activities.source[row], activities.target[row]
    inside = source == target if source >= 0 and target >= 0 else "DtoD" in trace.names[activities.name[row]]
    return bool(activities.kind[row] == KERNEL or (activities.kind[row] == MEMCPY and inside))


def fills_device(trace: Trace, row: int) -> bool:
    """Whether an activity is a kernel with a block for every SM."""
    sms = trace.device.sms
    return sms is not None and bool(trace.activities.kind[row] == KERNEL and trace.activities.blocks[row] >= sms)


@dataclass(frozen=True)
class Waves:
    """How the blocks of a persistent kernel take the tiles of its output."""

    tiles: int
    """All of them, rounded up."""
    tile: tuple[int, int]
    count: int
    """Waves, the last of which may be partial."""

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.tile[0]} x {self.tile[1]} in {self.count} waves"


def waves_of(trace: Trace, row: int) -> Waves | None:
    """The waves of a persistent GEMM; None where name and shapes do not tell them, or each block has one tile."""
    activities, operations = trace.activities, trace.operations
    operation, blocks = activities.operation[row], int(activities.blocks[row])
    tile = tile_of(trace.names[activities.name[row]])
    if tile is None or operation < 0 or operations.shapes[operation] < 0 or blocks <= 0:
        return None
    size = _product_size(trace.names[operations.shapes[operation]])
    tiles = -(-(size or 0) // prod(tile))
    return Waves(tiles, tile, -(-tiles // blocks)) if tiles > blocks else None


def tail_share(trace: Trace, row: int) -> float:
    """The longest that the tail of a kernel that fills the device may be, as a share of the kernel's time."""
    waves = waves_of(trace, row)
    return TAIL_SHARE if waves is None else max(TAIL_SHARE, WAVES_DIFFER / waves.count)


def blocks_of(trace: Trace, row: int) -> str:
    """A kernel's grid: ``24 blocks of 544 threads, 96 registers each``; empty for a copy."""
    activities = trace.activities
    blocks, threads, registers = (int(x[row]) for x in (activities.blocks, activities.threads, activities.registers))
    if blocks <= 0:
        return ""
    each = f", {registers} registers each" if registers > 0 else ""
    return f"{blocks} blocks" + (f" of {threads} threads{each}" if threads > 0 else "")


@cache
def _product_size(shapes: str) -> int | None:
    """Elements of the product of two matrices, from the shapes of an operation's inputs: the last two are multiplied.

    ``[[2048, 4096], [4096, 512]]`` gives 2048 x 512. The second may be written transposed, as for ``aten::linear``.
    """
    matrices = [[int(n) for n in found.split(",")] for found in re.findall(r"\[(\d+(?:, *\d+)+)\]", shapes)]
    if len(matrices) < 2:
        return None
    *_, a, b = matrices
    inner = a[-1]
    if inner not in b[-2:]:
        return None
    return prod(a[:-1]) * (b[-1] if b[-2] == inner else b[-2])
