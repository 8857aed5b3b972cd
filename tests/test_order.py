"""Units by order and phases by autograd, where no label names them: compiled graphs, and traces of kernel names only.

The hand-made steps have the shape of `cpu_compiled/rank0.json.gz`: rank 0 of two, torch 2.13 on a CPU, four
layers that gather their weight with `torch.distributed._functional_collectives` under torch.compile (inductor).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from nsys_databases import NsysDatabase
from timelines import COMPUTE, GATHERS, GEMM, REDUCE, REDUCES, RING, Timeline

import overlap_probe as op
from overlap_probe.overlap import analyze
from overlap_probe.results import Analysis, Window

COMPILED = Path(__file__).parent / "data" / "cpu_compiled" / "rank0.json.gz"
BACKWARD = "autograd::engine::evaluate_function: CompiledFunctionBackward"


def gather(
    t: Timeline, launch: float, *, size: str = "[[256, 512]]", thread: str = "main", kind: str = "all_gather"
) -> None:
    """A functional collective as NCCL runs it: the call, its own operation, and 10 us later a kernel of 20 us."""
    reduces = kind == "reduce_scatter"
    names = (
        ("reduce_scatter_tensor", "_reduce_scatter_base") if reduces else ("all_gather_into_tensor", "_allgather_base")
    )
    t.operation(f"_c10d_functional::{names[0]}", launch - 2, launch + 2, thread=thread)
    call = t.operation("record_param_comms", launch - 1, launch + 1, thread=thread, collective=names[1], shapes=size)
    kernel, stream = (REDUCE, REDUCES) if reduces else (RING, GATHERS)
    t.kernel(kernel, launch + 10, launch + 30, launch=launch, operation=call, thread=thread, stream=stream)


def step(
    t: Timeline,
    number: int,
    sizes: Sequence[str] = ("a", "b", "c"),
    *,
    regathers: Sequence[str] = ("c", "b"),
    forward: str = "CompiledFunction",
) -> None:
    """A training step of 1 ms: a compiled forward, and its backward on autograd's own thread 300 us later.

    A gather each 50 us, a GEMM of 40 us behind each one; the backward gathers again and reduces as much as it gathered.
    """
    at = 1000 * number
    t.label(f"ProfilerStep#{number}", at, at + 900)
    t.operation(forward, at + 5, at + 290)
    for n, size in enumerate(sizes):
        gather(t, at + 10 + 50 * n, size=size)
        t.gemm(at + 45 + 50 * n, at + 85 + 50 * n, launch=at + 12 + 50 * n)
    t.operation(BACKWARD, at + 300, at + 800, thread="autograd")
    t.operation("CompiledFunctionBackward", at + 301, at + 799, thread="autograd")
    for n, size in enumerate(regathers):
        gather(t, at + 310 + 50 * n, size=size, thread="autograd")
    for n, size in enumerate(reversed(sizes)):
        gather(t, at + 510 + 50 * n, size=size, thread="autograd", kind="reduce_scatter")


def steps(*each: Sequence[str]) -> Analysis:
    """Steps whose forwards gather calls of these sizes."""
    t = Timeline(rank=0)
    for number, sizes in enumerate(each):
        step(t, number, sizes)
    return analyze(t.trace())


def places(window: Window) -> list[tuple[str, str, str | None]]:
    return [(c.phase, c.op, c.unit) for c in window.collectives]


ONE_STEP = [
    *(("forward", "all_gather", unit) for unit in ("#1", "#2", "#3")),
    *(("backward", "all_gather", unit) for unit in ("#1", "#2")),
    *(("backward", "reduce_scatter", unit) for unit in ("#1", "#2", "#3")),
]


def test_calls_of_a_compiled_step_are_named_by_their_place_in_every_window():
    analysis = steps("abc", "abc", "abc")
    assert [places(window) for window in analysis.steps.values()] == [ONE_STEP] * 3
    assert analysis.notes == ()


def test_a_forward_that_runs_again_inside_the_backward_is_backward():
    # Activation checkpointing: the compiled forward is entered again on autograd's thread.
    t = Timeline()
    for number in range(2):
        step(t, number, regathers="abc")
        t.operation("CompiledFunction", 1000 * number + 305, 1000 * number + 460, thread="autograd")
    phases = [c.phase for c in analyze(t.trace()).windows["ProfilerStep#1"].collectives]
    assert phases == ["forward"] * 3 + ["backward"] * 6


def test_each_micro_batch_is_a_pass_of_its_own():
    # Two steps' worth of calls inside one window.
    t = Timeline()
    t.label("step 1", 0, 3000)
    for number in range(2):
        step(t, number)
    [window] = [
        w for name, w in op.analyze(t.trace(), op.Options.parse(window="step 1")).windows.items() if name != "whole"
    ]
    assert places(window) == ONE_STEP * 2
    assert [c.pass_index for c in window.collectives] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("forwards", "why"),
    [
        (("abc", "ab"), "forward.all_gather: between 2 and 3 calls in a pass, so no unit is known by its place"),
        (
            ("abc", "acb"),
            "forward.all_gather: 3 calls, but of other sizes or order, in a pass, so no unit is known by its place",
        ),
    ],
)
def test_an_order_that_does_not_repeat_names_nothing_and_says_so(forwards, why):
    analysis = steps(*forwards)
    gathers = [c for c in analysis.whole.collectives if c.op == "all_gather"]
    assert {c.unit for c in gathers if c.phase == "forward"} == {None}
    # The backward gathers "c" and "b" in both steps.
    assert [c.unit for c in gathers if c.phase == "backward"] == ["#1", "#2"] * 2
    assert why in analysis.notes


def test_one_pass_alone_shows_no_order():
    window = steps("abc").whole
    assert {unit for _, _, unit in places(window)} == {None}
    assert [phase for phase, _, _ in places(window)] == ["forward"] * 3 + ["backward"] * 5


def test_what_runs_outside_of_every_window_breaks_no_order():
    # The end of a warm-up step, of which the profiler saw one gather.
    t = Timeline()
    t.operation("CompiledFunction", -100, -20)
    gather(t, -80)
    for number in range(2):
        step(t, number)
    analysis = analyze(t.trace())
    assert [places(window) for window in analysis.steps.values()] == [ONE_STEP] * 2
    assert places(analysis.whole)[0] == ("forward", "all_gather", None)


def test_auto_asks_for_a_number_and_a_number_is_answered():
    # 3 gathers a forward, each 20 us; the second and third begin at 70 and 120 us, in the GEMMs of 45..85 and 95..135.
    analysis = steps("abc", "abc")
    forward = analysis.windows["ProfilerStep#0"].forward
    assert (forward.children, forward.expected, forward.all_gather.overlapped_by_gemm) == (0, None, 2)
    auto = op.evaluate(analysis, ["overlaps >= auto"])
    assert auto.status == "inconclusive"
    assert "3 forward all-gathers" in auto.findings[0].message
    assert "overlaps >= N" in auto.findings[0].message
    assert op.evaluate(analysis, ["overlaps >= 2"]).status == "pass"
    assert op.evaluate(analysis, ["overlaps >= 3"]).status == "fail"
    assert op.evaluate(analysis, ["backward.all_gather.overlaps >= 1"]).status == "fail"


def test_without_a_witness_for_every_call_no_phase_is_known_and_the_window_is_the_pass():
    # The same steps run eagerly: only the backward shows.
    t = Timeline()
    for number in range(2):
        step(t, number, forward="an eager forward")
    window = analyze(t.trace()).windows["ProfilerStep#1"]
    assert [p for p in places(window) if p[1] == "all_gather"] == [
        ("unknown", "all_gather", f"#{n}") for n in range(1, 6)
    ]
    assert {phase for phase, _, _ in places(window)} == {"unknown"}


def test_a_call_outside_of_a_compiled_graph_is_told():
    t = Timeline()
    for number in range(2):
        step(t, number)
        gather(t, 1000 * number + 850)  # the optimizer's
    analysis = analyze(t.trace())
    assert {c.phase for c in analysis.whole.collectives} == {"unknown"}
    assert analysis.notes == (
        "2 of 18 all-gathers and reduce-scatters were launched in neither a compiled forward nor a backward of "
        "autograd, so no phase is known",
    )


def test_kernels_by_name_alone_have_units_by_order_in_equal_windows():
    t = Timeline()
    for number in range(2):
        t.label(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 900)
        for n in range(3):
            t.kernel(
                RING, 1000 * number + 100 * n + 20, 1000 * number + 100 * n + 50, launch=1000 * number + 100 * n + 10
            )
    analysis = analyze(t.trace())
    assert [places(w) for w in analysis.steps.values()] == [[("unknown", "all_gather", f"#{n}") for n in (1, 2, 3)]] * 2
    assert analysis.notes == ()


def test_labels_of_units_are_believed_alone():
    t = Timeline()
    for number in range(2):
        step(t, number)
    t.gather("layers.0", 1850, 1870, launch=1840)
    units = [c.unit for c in analyze(t.trace()).whole.collectives]
    assert units == [None] * 16 + ["layers.0"]


def test_a_users_own_label_comes_before_the_order():
    t = Timeline()
    for number in range(2):
        step(t, number)
        for n, unit in enumerate("abc"):
            t.label(f"unit {unit}", 1000 * number + 50 * n + 7, 1000 * number + 50 * n + 14)
    analysis = analyze(t.trace(), op.Options.parse(unit_labels=[r"unit (\w)"]))
    gathers = [c.unit for c in analysis.whole.collectives if c.op == "all_gather"]
    assert gathers == ["a", "b", "c", None, None] * 2


@pytest.mark.parametrize("phases", [True, False])
def test_a_replayed_graph_launches_every_gather_at_once_and_they_keep_their_order(phases):
    # One cudaGraphLaunch a step, under the compiled forward or (captured by hand, or in Nsight Systems) under nothing.
    t = Timeline()
    for number in range(3):
        at = 1000 * number
        t.label(f"ProfilerStep#{number}", at, at + 900)
        graph = t.operation("CompiledFunction", at + 5, at + 20) if phases else -1
        for n in range(4):
            t.kernel(RING, at + 20 + 100 * n, at + 50 + 100 * n, launch=at + 10, operation=graph, stream=GATHERS)
            t.gemm(at + 50 + 100 * n, at + 150 + 100 * n, launch=at + 10, operation=graph)
    analysis = analyze(t.trace())
    phase = "forward" if phases else "unknown"
    expected = [(phase, "all_gather", f"#{n}") for n in (1, 2, 3, 4)]
    assert [places(window) for window in analysis.steps.values()] == [expected] * 3
    assert {len(window.collectives) for window in analysis.steps.values()} == {4}
    # Gathers 2 to 4 run from 120 us on beside the GEMM that ends at 150 us, and so on: three of four.
    assert op.evaluate(analysis, ["overlaps >= 3"]).status == "pass"
    assert op.evaluate(analysis, ["overlaps >= auto"]).status == "inconclusive"


def test_a_real_compiled_graph_has_phases_and_units():
    analysis = op.analyze(op.read_trace(COMPILED))
    one_step = [("forward", "all_gather", f"#{n}") for n in (1, 2, 3, 4)]
    one_step += [("backward", "reduce_scatter", f"#{n}") for n in (1, 2, 3, 4)]
    assert [places(window) for window in analysis.steps.values()] == [one_step] * 3
    assert {c.found_by for c in analysis.whole.collectives} == {"operation"}
    assert analysis.quality == "ok"
    assert op.evaluate(analysis, ["overlaps >= auto"]).status == "inconclusive"


def test_a_graph_in_an_nsight_systems_database_has_units_by_order(tmp_path):
    # One cudaGraphLaunch a step at 3 us into it, four gathers beside a GEMM each; NVTX ranges mark the steps.
    database = NsysDatabase()
    for number in range(2):
        at = 1000 * number
        database.range(f"step {number}", at, at + 900)
        correlation = database.call(at + 3, "cudaGraphLaunch_v10000")
        for node in range(4):
            graph = {"correlationId": correlation, "graphNodeId": (2 << 32) + node}
            database.kernel(RING, at + 20 + 100 * node, at + 50 + 100 * node, streamId=GATHERS, **graph)
            database.kernel(GEMM, at + 20 + 100 * node, at + 100 + 100 * node, streamId=COMPUTE, **graph)
    analysis = analyze(op.read_trace(database.write(tmp_path / "graph.sqlite")))
    expected = [("unknown", "all_gather", f"#{n}") for n in (1, 2, 3, 4)]
    assert [places(window) for window in analysis.steps.values()] == [expected] * 2
    assert op.evaluate(analysis, ["overlaps == 4"]).status == "pass"
