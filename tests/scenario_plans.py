"""What is drawn for a random scenario: everything that decides whether an all-gather hides.

The idea: plans differ in all that the causes of exposure are about (schedule, mechanism, kernels, host, peers, what a
gather has to wait for), so that over many seeds each cause and each mixture of them occurs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from overlap_probe.simulator import Room

US = 1_000
SMS = 132


@dataclass(frozen=True)
class Gemm:
    """A persistent kernel: ``tiles`` of ``tile_ns`` each, one an SM at a time."""

    tiles: int
    tile_ns: int

    @property
    def waves(self) -> int:
        return -(-self.tiles // SMS)

    @property
    def work_ns(self) -> int:
        return self.waves * self.tile_ns

    def room(self, rank: int, taken: int) -> Room:
        """What it holds of the SMs; beside ``taken`` SMs it needs more waves, in the last wave it leaves SMs free."""
        last = self.tiles % SMS
        return Room(
            resource=("sms", rank),
            amount=min(self.tiles, SMS),
            elastic=True,
            tail_ns=self.tile_ns if last and self.waves > 1 else 0,
            tail_amount=last,
            short_speed=self.waves / -(-self.tiles // (SMS - taken)),
        )


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn. Times are ns; a *turn* is a unit's place in the order of its pass."""

    seed: int
    world: int
    units: int
    steps: int
    passes: int
    backward: bool
    serial: bool
    depth: int
    """Units gathered ahead of the one that computes; 0: each in its turn, as far as the host runs ahead."""
    mechanism: str
    """ring (kernels), copies (in place), own_first (the copy of the own shard, which needs SMs, before the peers')."""
    ring_sms: int
    gemms: tuple[tuple[Gemm, ...], ...]
    """Of each unit."""
    transfer_ns: tuple[int, ...]
    """Of each unit."""
    reduce_ns: int
    copy_out_ns: int
    """Kernel on the compute stream between a gather and its unit's compute; 0: none."""
    release_lag: int | None
    """A gather waits until all compute has ended but that of this many units before its own; None: it never waits."""
    fetch_ns: tuple[int, ...]
    """Of each unit: copy from the host on a stream of its own, which the gather waits for; 0: none."""
    call_ns: int
    gap_ns: tuple[int, ...]
    """Of each rank: host time between two calls."""
    lag_ns: dict[tuple[int, int], int]
    """Host time more before the gather of (rank, turn)."""
    sync_phases: bool
    """The host waits for the device between forward and backward."""
    clock_ns: tuple[int, ...]
    """Of each rank: how far its clock is ahead."""
    sequenced: bool
    """The trace numbers the calls of a process group."""


def plan(seed: int) -> Plan:
    """One plan for each seed."""
    rng = random.Random(seed)
    world = rng.choice((1, 2, 2, 2, 3))
    units = rng.randint(3, 10)
    mechanism = rng.choice(("ring", "ring", "copies", "own_first")) if world > 1 else "ring"
    gemms = _gemms(rng, units)
    compute = [sum(g.work_ns for g in some) for some in gemms]
    ratio = rng.choice((0.3, 0.3, 0.5, 0.8, 1.3, 2.0))
    host = rng.choice(("fast", "fast", "fast", "slow", "uneven"))
    slow_rank = rng.randrange(world)
    calls = max(len(some) for some in gemms) + 3
    bound = sum(compute) // units // calls
    """A gap of this length makes host and device about equally fast."""
    gap = {
        "fast": [rng.randint(2 * US, 10 * US)] * world,
        "slow": [round(bound * rng.uniform(0.7, 2.0))] * world,
        "uneven": [
            round(bound * rng.uniform(1.2, 2.0)) if r == slow_rank else rng.randint(3 * US, 10 * US)
            for r in range(world)
        ],
    }[host]
    depth = rng.choice((0, 0, 1, 1, 2))
    lag = {}
    for turn in range(1, units):
        if rng.random() < rng.choice((0.0, 0.15)):
            lag[rng.randrange(world), turn] = rng.randint(50 * US, 1500 * US)
    fetch = rng.random() < 0.12
    return Plan(
        seed=seed,
        world=world,
        units=units,
        steps=rng.choice((1, 1, 1, 2)),
        passes=rng.choice((1, 1, 1, 1, 2)),
        backward=rng.random() < 0.6,
        serial=rng.random() < 0.06,
        depth=depth,
        mechanism=mechanism,
        ring_sms=rng.choice((4, 8, 16, 24, 32)),
        gemms=gemms,
        transfer_ns=tuple(round(rng.uniform(0.8, 1.2) * ratio * sum(compute) / units) for _ in range(units)),
        reduce_ns=round(rng.uniform(0.3, 1.0) * ratio * sum(compute) / units),
        copy_out_ns=rng.choice((0, rng.randint(3 * US, 40 * US))),
        release_lag=rng.choice((None, depth, depth + 1, max(depth - 1, 0), 0)),
        fetch_ns=tuple(rng.randint(100 * US, 900 * US) if fetch else 0 for _ in range(units)),
        call_ns=rng.randint(4 * US, 9 * US),
        gap_ns=tuple(gap),
        lag_ns=lag,
        sync_phases=rng.random() < 0.3,
        clock_ns=tuple(rng.choice((0, rng.randint(-900 * US, 900 * US))) for _ in range(world)),
        sequenced=rng.random() < 0.5,
    )


def _gemms(rng: random.Random, units: int) -> tuple[tuple[Gemm, ...], ...]:
    """The GEMMs of each unit: units are alike, as layers of a model are, but for a first one that may be smaller."""
    shapes = [Gemm(rng.randint(2 * SMS, 12 * SMS), rng.randint(12 * US, 60 * US)) for _ in range(rng.randint(1, 3))]
    layer = tuple(rng.choice(shapes) for _ in range(rng.randint(1, 4)))
    first = layer[:1] if rng.random() < 0.3 else layer
    return (first, *[layer] * (units - 1))
