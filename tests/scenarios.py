"""Random FSDP steps on simulated devices, of which it is known why each all-gather started when it did.

The idea: a plan is written down as the tasks that the hosts and devices of all ranks would run, and simulated. Why a
gather was exposed is then read off the gates of the simulation (`ground_truth`), never off the timeline that the
analysis sees (`scenario_traces`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from scenario_plans import SMS, US, Plan

from overlap_probe.simulator import Ran, Room, Task, simulate

COMPUTE, GATHER, REDUCE, OTHER = "compute", "gather", "reduce", "other"
"""Streams of a rank."""


@dataclass
class Row:
    """An activity of the trace."""

    task: int
    call: int
    """Host task that launched it."""
    kind: str
    """gemm, pointwise, ring, reduce, or a copy: own (of the own shard), peer (from a peer), fetch (from the host)."""
    blocks: int = -1


@dataclass
class Gather:
    """One all-gather on one rank, and the gates that it passed."""

    rank: int
    step: int
    phase: str
    number: int
    """Of its pass, among the passes of its phase."""
    turn: int
    unit: int
    call: int
    """Host task that launched it."""
    first: int
    """Its first task: the kernel itself, or the meeting before the copies."""
    visible: list[int]
    """Kernel or copies."""
    waits_for: list[int]
    """What it comes after besides its launch and its stream."""
    paired: list[int] = field(default_factory=list)
    """Compute of the turn before it, which it is meant to hide behind."""


@dataclass
class Rank:
    """What one rank does, and what its trace will show of it. Operations and ranges are given by their host tasks."""

    rows: list[Row] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    compute: list[int] = field(default_factory=list)
    operations: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, host task, position in the process group (-1: no collective)."""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, first and last host task; of two that share a host task the shorter one is inside the other."""
    passes: list[tuple[int, str, range]] = field(default_factory=list)
    """Step, phase and tasks of each pass."""


@dataclass
class Scenario:
    """A plan as tasks, with what ran when."""

    plan: Plan
    tasks: list[Task]
    ranks: list[Rank]
    amounts: dict[object, int]
    ran: list[Ran] = field(default_factory=list)

    def simulated(self, tasks: Sequence[Task]) -> list[Ran]:
        return simulate(tasks, self.amounts)


def build(plan: Plan) -> Scenario:
    """A plan, simulated."""
    scenario = Scenario(plan, [], [], {("sms", rank): SMS for rank in range(plan.world)})
    for rank in range(plan.world):
        scenario.ranks.append(_Program(scenario, rank).write())
    scenario.ran = scenario.simulated(scenario.tasks)
    return scenario


class _Program:
    """Writes down what one rank does."""

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.plan, self.tasks, self.rank, self.out = scenario.plan, scenario.tasks, rank, Rank()
        self.rng = random.Random(f"{scenario.plan.seed}/{rank}")
        self.sequence = 0
        self.last: dict[str, int] = {}
        """Last task of each stream."""

    def write(self) -> Rank:
        plan = self.plan
        numbers = {"forward": 0, "backward": 0}
        for step in range(plan.steps):
            first = len(self.out.operations)
            for _ in range(plan.passes):
                for phase in ("forward", "backward") if plan.backward else ("forward",):
                    begins = len(self.tasks)
                    self.one_pass(step, phase, numbers[phase])
                    self.out.passes.append((step, phase, range(begins, len(self.tasks))))
                    numbers[phase] += 1
                    if plan.sync_phases:
                        self.synchronize()
            self.synchronize()
            self.close_range(f"ProfilerStep#{step}", first)
        return self.out

    def one_pass(self, step: int, phase: str, number: int) -> None:
        plan = self.plan
        order = list(range(plan.units))
        if phase == "backward":
            order.reverse()
        gathers: list[Gather] = []
        ended: list[int] = []
        """Last compute task of each turn."""
        computed: list[list[int]] = []
        pre = "pre_forward" if phase == "forward" else "pre_backward"
        for turn, unit in enumerate(order):
            first = len(self.out.operations)
            for ahead in range(len(gathers), min(turn + plan.depth, plan.units - 1) + 1):
                if ahead == turn or not plan.serial:
                    gathers.append(self.gather(step, phase, number, ahead, order[ahead], ended))
            gathered, done = len(self.out.operations), len(self.out.compute)
            ended.append(self.compute(unit, gathers[turn], 2 if phase == "backward" else 1))
            computed.append(self.out.compute[done:])
            self.close_range(f"FSDP::{pre} (layers.{unit})", first, gathered + 1)
            if phase == "backward":
                self.reduce(unit, ended[-1])
        for gather, before in zip(gathers[1:], computed, strict=False):
            gather.paired = before

    def gather(self, step: int, phase: str, number: int, turn: int, unit: int, ended: list[int]) -> Gather:
        plan, rank = self.plan, self.rank
        begins = len(self.out.operations)
        waits_for = []
        if plan.release_lag is not None and not plan.serial:
            waits_for = ended[: max(turn - plan.release_lag, 0)][-1:]
        if plan.fetch_ns[unit]:
            fetched = self.device(OTHER, plan.fetch_ns[unit], self.call("aten::copy_"), "fetch")
            waits_for.append(fetched)
        call = self.call("record_param_comms", collective=True, lag_ns=plan.lag_ns.get((rank, turn), 0))
        stream = COMPUTE if plan.serial else GATHER
        meets = (phase, number, turn) if plan.world > 1 else None
        transfer = plan.transfer_ns[unit]
        ring = Room(("sms", rank), plan.ring_sms)
        if plan.mechanism == "ring":
            visible = [self.device(stream, transfer, call, "ring", waits_for, ring, meets, plan.ring_sms)]
            first = visible[0]
        else:
            first = self.device(stream, 0, call, "", waits_for, None, meets)
            own = (
                [self.device(stream, 9 * US, call, "own", (), Room(("sms", rank), 8))]
                if plan.mechanism == "own_first"
                else []
            )
            peers = plan.world - 1
            visible = own + [self.device(stream, transfer // peers, call, "peer") for _ in range(peers)]
        self.close_range(f"FSDP::all_gather (layers.{unit})", begins)
        made = Gather(rank, step, phase, number, turn, unit, call, first, visible, waits_for)
        self.out.gathers.append(made)
        return made

    def compute(self, unit: int, gather: Gather, factor: int) -> int:
        """The kernels of a unit; its last task."""
        plan, waits_for = self.plan, [gather.visible[-1]]
        pointwise = Room(("sms", self.rank), SMS, elastic=True, short_speed=1 - plan.ring_sms / SMS)
        kernels: list[tuple[str, str, int, Room, int]] = []
        if plan.copy_out_ns:
            kernels.append(("aten::split_with_sizes_copy", "pointwise", plan.copy_out_ns, pointwise, 4 * SMS))
        for gemm in plan.gemms[unit]:
            for _ in range(factor):
                kernels.append(("aten::mm", "gemm", gemm.work_ns, gemm.room(self.rank, plan.ring_sms), SMS))
        if len(plan.gemms[unit]) > 1:
            kernels.append(("aten::mul", "pointwise", 8 * US, pointwise, 4 * SMS))
        for operation, kind, work, room, blocks in kernels:
            task = self.device(COMPUTE, work, self.call(operation), kind, waits_for, room, None, blocks)
            self.out.compute.append(task)
            waits_for = []
        return self.out.compute[-1]

    def reduce(self, unit: int, after: int) -> None:
        plan = self.plan
        begins = len(self.out.operations)
        call = self.call("record_param_comms", collective=True)
        stream = COMPUTE if plan.serial else REDUCE
        meets = ("reduce", self.sequence) if plan.world > 1 else None
        room = Room(("sms", self.rank), plan.ring_sms)
        self.device(stream, plan.reduce_ns, call, "reduce", [after], room, meets, plan.ring_sms)
        self.close_range(f"FSDP::post_backward_reduce (layers.{unit})", begins)

    def device(
        self,
        stream: str,
        work_ns: int,
        call: int,
        kind: str,
        waits_for: Sequence[int] = (),
        room: Room | None = None,
        meets: object = None,
        blocks: int = -1,
    ) -> int:
        """A task on a stream, launched by a call; ``kind`` "" is not in the trace."""
        delay = self.rng.randint(1 * US, 4 * US)
        self.tasks.append(Task((self.rank, stream), work_ns, (call, *waits_for), 0, delay, room, meets))
        self.last[stream] = len(self.tasks) - 1
        if kind:
            self.out.rows.append(Row(len(self.tasks) - 1, call, kind, blocks))
        return len(self.tasks) - 1

    def call(self, operation: str, collective: bool = False, lag_ns: int = 0) -> int:
        """A call of the host that launches something, a while after the one before. Collectives are numbered."""
        gap = round((self.plan.gap_ns[self.rank] + lag_ns) * self.rng.uniform(0.8, 1.2))
        self.tasks.append(Task((self.rank, "host"), self.plan.call_ns, delay_ns=gap))
        self.out.operations.append((operation, len(self.tasks) - 1, self.sequence if collective else -1))
        self.sequence += collective
        return len(self.tasks) - 1

    def close_range(self, name: str, first_operation: int, end: int | None = None) -> None:
        """A range around the operations from one on."""
        tasks = [task for _, task, _ in self.out.operations[first_operation:end]]
        self.out.ranges.append((name, tasks[0], tasks[-1]))

    def synchronize(self) -> None:
        """The host waits until its device has done everything."""
        self.tasks.append(Task((self.rank, "host"), 0, tuple(self.last.values())))
