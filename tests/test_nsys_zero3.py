"""DeepSpeed ZeRO-3 under Nsight Systems: its gathers and reduces, their phases, and units that it does not name."""

from __future__ import annotations

from pathlib import Path

from nsys_databases import NsysDatabase
from test_nsys import GATHER, GEMM, read_one

from overlap_probe import analyze
from overlap_probe.results import Collective

MAIN, AUTOGRAD = 580, 611
"""Threads: the backward's hooks run on the autograd engine's."""

REDUCE = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
HOOK = "DeepSpeedZeRoOffload._register_deepspeed_module.<locals>._run_before_backward_function"
GRADIENT_HOOK = (
    "DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks.<locals>.wrapper.<locals>."
    "reduce_partition_and_remove_grads"
)


def nested(database: NsysDatabase, thread: int, start: float, end: float, *names: str) -> None:
    """Ranges of a thread, each 1 us inside the one before."""
    for depth, name in enumerate(names):
        database.range(name, start + depth, end - depth, thread=thread)


def fetch(database: NsysDatabase, thread: int, at: float, *around: str, copies: bool = False) -> None:
    """What fetching a module's parameters does: 20 us on the host, and 30 us later 50 us on the device."""
    nested(
        database,
        thread,
        at,
        at + 20,
        *around,
        "PartitionedParameterCoordinator.fetch_sub_module",
        "PartitionedParameterCoordinator.__all_gather_params",
        "Init._convert_to_deepspeed_param.<locals>.all_gather_coalesced",
        "allgather_fn",
    )
    if copies:
        for start in (at + 30, at + 55):
            database.copy(10, start, start + 25, at + 10, thread=thread, streamId=21)
    else:
        database.kernel(GATHER, at + 30, at + 80, at + 10, thread=thread, streamId=21)


def steps(count: int = 1, **how: bool) -> NsysDatabase:
    """A step a millisecond."""
    database = NsysDatabase(pid=MAIN)
    for number in range(count):
        database.at = 1000.0 * number
        add_step(database, **how)
    return database


def add_step(database: NsysDatabase, **how: bool) -> None:
    """Forward of two modules, backward of the second, gradients, and a gather after it all."""
    database.range("DeepSpeedEngine.forward", 0, 200, thread=MAIN)
    fetch(database, MAIN, 10, **how)
    fetch(database, MAIN, 100, **how)
    database.kernel(GEMM, 130, 170, 125, thread=MAIN)  # hides 40 of the 50 us of the second gather, [130, 180)
    database.range("DeepSpeedEngine.backward", 210, 400, thread=MAIN)
    fetch(database, AUTOGRAD, 220, HOOK, **how)
    nested(
        database,
        AUTOGRAD,
        320,
        350,
        GRADIENT_HOOK,
        "DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads",
        "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads",
        "reduce_scatter_coalesced",
        "reduce_scatter_fn",
    )
    database.kernel(REDUCE, 360, 390, 330, thread=AUTOGRAD, streamId=22)
    database.range("DeepSpeedEngine.step", 410, 500, thread=MAIN)
    database.range("Init._all_gather", 420, 450, thread=MAIN)
    database.kernel(GATHER, 460, 480, 430, thread=MAIN, streamId=21)


def said(c: Collective) -> tuple[str, str, str | None, str]:
    return c.op, c.phase, c.unit, c.found_by


def test_gathers_and_reduces_are_found_with_their_phase_and_without_a_unit(tmp_path: Path) -> None:
    analysis = analyze(read_one(steps(), tmp_path))
    assert [said(c) for c in analysis.whole.collectives] == [
        ("all_gather", "forward", None, "label"),
        ("all_gather", "forward", None, "label"),
        ("all_gather", "backward", None, "label"),
        ("reduce_scatter", "backward", None, "label"),
        ("all_gather", "unknown", None, "name"),  # the optimizer's gather of what stays whole is in neither phase
    ]
    assert analysis.whole.forward.all_gather.count == 2
    assert analysis.whole.forward.all_gather.hidden_ns == 40_000
    assert analysis.whole.backward.reduce_scatter.time_ns == 30_000


def test_copies_of_a_gather_that_needs_no_kernel_are_one_collective(tmp_path: Path) -> None:
    analysis = analyze(read_one(steps(copies=True), tmp_path))
    gathers = analysis.whole.forward.all_gather
    assert (gathers.count, gathers.time_ns) == (2, 100_000)
    assert {c.mechanism for c in analysis.whole.collectives if c.phase == "forward"} == {"copy_engine"}


def test_units_are_known_by_order_beside_the_optimizers_own_gather(tmp_path: Path) -> None:
    analysis = analyze(read_one(steps(2), tmp_path))
    units = [(c.phase, c.unit) for c in analysis.whole.collectives if c.op == "all_gather"]
    assert units == [("forward", "#1"), ("forward", "#2"), ("backward", "#1"), ("unknown", None)] * 2
