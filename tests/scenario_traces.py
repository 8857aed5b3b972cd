"""What a profiler would have written of a simulated scenario: as a Trace, and as Kineto's JSON.

The idea: both are made from the same few rows, so that a reader's Trace can be held against the one made directly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from scenario_plans import SMS
from scenarios import COMPUTE, GATHER, OTHER, REDUCE, Scenario

from overlap_probe.tables import KERNEL, MEMCPY, Activities, Device, Operations, Ranges, Trace

EPOCH_NS = 5_103_188_896_015_361
STREAMS = {COMPUTE: 7, GATHER: 22, REDUCE: 26, OTHER: 30}
NAMES = {
    "gemm": "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "pointwise": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "ring": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "own": "Memcpy DtoD (Device -> Device)",
    "peer": "Memcpy PtoP (Device -> Device)",
    "fetch": "Memcpy HtoD (Pinned -> Device)",
}
KERNELS = ("gemm", "pointwise", "ring", "reduce")
THREADS = 384
"""In each block of a kernel."""
MARGIN_NS = {"ProfilerStep": 700, "FSDP::pre": 400, "FSDP::": 200}
"""How much longer a range is than what it encloses, by the start of its name."""


@dataclass(frozen=True)
class _Row:
    """An activity: times are the trace's."""

    start_ns: int
    end_ns: int
    kind: str
    stream: int
    launch_ns: int
    thread: int
    operation: int
    """Position among the rank's operations."""
    blocks: int
    peer: int
    """Device that a copy reads."""


@dataclass(frozen=True)
class _Operation:
    start_ns: int
    end_ns: int
    name: str
    thread: int
    collective: str
    sequence: int
    shapes: str


def _rows(scenario: Scenario, number: int) -> list[_Row]:
    rank, tasks, ran = scenario.ranks[number], scenario.tasks, scenario.ran
    at = EPOCH_NS + scenario.plan.clock_ns[number]
    position = {task: place for place, (_, task, _) in enumerate(rank.operations)}
    thread = _threads(scenario, number)
    return sorted(
        (
            _Row(
                start_ns=at + ran[row.task].start_ns,
                end_ns=at + ran[row.task].end_ns,
                kind=row.kind,
                stream=STREAMS[tasks[row.task].queue[1]],  # type: ignore[index]
                launch_ns=at + ran[row.call].start_ns,
                thread=thread[row.call],
                operation=position[row.call],
                blocks=row.blocks,
                peer=-1 if row.kind != "peer" else (number + 1) % scenario.plan.world,
            )
            for row in rank.rows
        ),
        key=lambda row: (row.start_ns, row.end_ns),
    )


def _threads(scenario: Scenario, number: int) -> dict[int, int]:
    """Host thread of each call: the backward has one of its own, as autograd does."""
    rank = scenario.ranks[number]
    backward = {task for name, first, last in rank.ranges if "backward" in name for task in range(first, last + 1)}
    return {task: int(task in backward) for _, task, _ in rank.operations}


def _operations(scenario: Scenario, number: int) -> list[_Operation]:
    rank, ran = scenario.ranks[number], scenario.ran
    at = EPOCH_NS + scenario.plan.clock_ns[number]
    thread = _threads(scenario, number)
    launched = {row.call: row for row in rank.rows}
    made = []
    for name, task, sequence in rank.operations:
        kind = launched[task].kind
        call = {
            "ring": "_allgather_base",
            "own": "_allgather_base",
            "peer": "_allgather_base",
            "reduce": "_reduce_scatter_base",
        }
        gemm = scenario.tasks[launched[task].task].work_ns if kind == "gemm" else 0
        made.append(
            _Operation(
                start_ns=at + ran[task].start_ns,
                end_ns=at + ran[task].end_ns,
                name=name,
                thread=thread[task],
                collective=call.get(kind, ""),
                sequence=sequence if scenario.plan.sequenced else -1,
                shapes=f"[[{gemm}, 4096], [4096, 4096]]" if gemm else "",
            )
        )
    return made


def _ranges(scenario: Scenario, number: int) -> list[tuple[int, int, str, int]]:
    """Start, end, name and thread of each range, outer ones first."""
    rank, ran = scenario.ranks[number], scenario.ran
    at = EPOCH_NS + scenario.plan.clock_ns[number]
    thread = _threads(scenario, number)
    made = []
    for name, first, last in rank.ranges:
        margin = next(ns for start, ns in MARGIN_NS.items() if name.startswith(start))
        made.append((at + ran[first].start_ns - margin, at + ran[last].end_ns + margin, name, thread[first]))
    return sorted(made, key=lambda r: (r[0], -r[1]))


def traces(scenario: Scenario) -> list[Trace]:
    """The Trace of every rank."""
    return [_trace(scenario, number) for number in range(scenario.plan.world)]


def _trace(scenario: Scenario, number: int) -> Trace:
    names: dict[str, int] = {}

    def code(text: str) -> int:
        return names.setdefault(text, len(names)) if text else -1

    rows, operations, ranges = _rows(scenario, number), _operations(scenario, number), _ranges(scenario, number)
    activities = Activities.from_columns(
        len(rows),
        start_ns=[r.start_ns for r in rows],
        end_ns=[r.end_ns for r in rows],
        name=[code(NAMES[r.kind]) for r in rows],
        kind=[KERNEL if r.kind in KERNELS else MEMCPY for r in rows],
        stream=[r.stream for r in rows],
        launch_ns=[r.launch_ns for r in rows],
        launch_thread=[r.thread for r in rows],
        operation=[r.operation for r in rows],
        blocks=[r.blocks for r in rows],
        threads=[THREADS if r.kind in KERNELS else -1 for r in rows],
        source=[r.peer for r in rows],
        target=[number if r.peer >= 0 else -1 for r in rows],
    )
    return Trace(
        path=f"rank{number}.json",
        format="kineto",
        activities=activities,
        operations=Operations.from_columns(
            len(operations),
            start_ns=[o.start_ns for o in operations],
            end_ns=[o.end_ns for o in operations],
            name=[code(o.name) for o in operations],
            thread=[o.thread for o in operations],
            collective=[code(o.collective) for o in operations],
            group=[code("0") if o.collective else -1 for o in operations],
            sequence=[o.sequence for o in operations],
            shapes=[code(o.shapes) for o in operations],
        ),
        ranges=Ranges.from_columns(
            len(ranges),
            start_ns=[r[0] for r in ranges],
            end_ns=[r[1] for r in ranges],
            name=[code(r[2]) for r in ranges],
            thread=[r[3] for r in ranges],
        ),
        names=tuple(names),
        rank=number,
        world_size=scenario.plan.world,
        device=Device("NVIDIA H200", SMS, 65536, 233472, 2048),
        groups={"0": tuple(range(scenario.plan.world))},
    )


def kineto(scenario: Scenario, number: int) -> str:
    """One rank's timeline as torch.profiler writes it."""
    events = []
    rows, operations = _rows(scenario, number), _operations(scenario, number)
    shared = {"Process Group Name": "0", "Group size": scenario.plan.world}
    for place, o in enumerate(operations):
        args: dict[str, object] = {"External id": place + 1}
        if o.collective:
            args |= {"Collective name": o.collective, **shared}
        if o.sequence >= 0:
            args["Seq"] = o.sequence
        if o.shapes:
            args["Input Dims"] = json.loads(o.shapes)
        events.append(_event("cpu_op", o.name, 600, o.thread, o.start_ns, o.end_ns, args))
    for start, end, name, thread in _ranges(scenario, number):
        events.append(_event("user_annotation", name, 600, thread, start, end, {}))
    for correlation, r in enumerate(rows, start=1):
        launch = {"correlation": correlation, "External id": r.operation + 1}
        events.append(
            _event("cuda_runtime", "cudaLaunchKernelExC", 600, r.thread, r.launch_ns, r.launch_ns + 1_000, launch)
        )
        args = {**launch, "device": number, "stream": r.stream}
        if r.kind in KERNELS:
            args |= {"grid": [r.blocks, 1, 1], "block": [THREADS, 1, 1]}
        elif r.peer >= 0:
            args |= {"fromDevice": r.peer, "toDevice": number}
        category = "kernel" if r.kind in KERNELS else "gpu_memcpy"
        events.append(_event(category, NAMES[r.kind], number, r.stream, r.start_ns, r.end_ns, args))
    about = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": n, "name": "NVIDIA H200", "numSms": SMS} for n in range(scenario.plan.world)],
        "distributedInfo": {
            "backend": "nccl",
            "rank": number,
            "world_size": scenario.plan.world,
            "pg_config": [{"pg_name": "0", "pg_size": scenario.plan.world, "ranks": list(range(scenario.plan.world))}],
        },
    }
    return json.dumps(about)[:-1] + ', "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"


def _event(category: str, name: str, pid: int, tid: int, start_ns: int, end_ns: int, args: dict[str, object]) -> str:
    head = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args}
    return json.dumps(head)[:-1] + f', "ts": {_us(start_ns)}, "dur": {_us(end_ns - start_ns)}}}'


def _us(ns: int) -> str:
    """The decimal text of a time in microseconds, exact."""
    return f"{ns // 1000}.{ns % 1000:03d}"
