"""What each activity is: which witness is believed, which activities are one collective, what is a GEMM."""

from __future__ import annotations

import pytest
from timelines import GEMM, LOCAL_COPY, REDUCE, RING, Timeline, only

from overlap_probe.options import Options
from overlap_probe.overlap import analyze
from overlap_probe.results import Collective

GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
COPY_IN = "void at::native::(anonymous namespace)::multi_tensor_copy_kernel<c10::BFloat16>"


def found(t: Timeline, **options: object) -> list[tuple[str, str]]:
    """Kind and witness of each collective, in order of start."""
    return [(c.op, c.found_by) for c in analyze(t.trace(), Options.parse(**options)).whole.collectives]


# ---- the order of the witnesses


@pytest.mark.parametrize(
    ("rule", "operation", "label", "expected"),
    [
        # Each witness that speaks calls the kernel something else; its own name says reduce-scatter.
        ("broadcast=RING", "_allgather_base", "nccl:all_reduce", ("broadcast", "rule")),
        (None, "_allgather_base", "nccl:all_reduce", ("all_gather", "operation")),
        (None, None, "nccl:all_reduce", ("all_reduce", "label")),
        (None, None, None, ("reduce_scatter", "name")),
    ],
)
def test_a_rule_is_believed_before_the_operation_the_label_and_the_name(rule, operation, label, expected):
    t = Timeline()
    if label:
        t.label(label, 0, 10)
    call = t.operation("record_param_comms", 1, 9, collective=operation) if operation else -1
    t.kernel(REDUCE, 20, 40, launch=5, operation=call)
    assert found(t, rules=[rule] if rule else []) == [expected]


def test_an_operation_that_does_not_say_the_kind_leaves_it_to_the_kernels_name():
    t = Timeline()
    t.kernel(RING, 20, 40, launch=5, operation=t.operation("record_param_comms", 1, 9))
    assert found(t) == [("all_gather", "operation")]


def test_a_c10d_operation_says_the_kind_by_its_own_name():
    t = Timeline()
    t.kernel(GENERIC, 20, 40, launch=5, operation=t.operation("c10d::_allgather_base_", 1, 9))
    assert found(t) == [("all_gather", "operation")]


def test_the_collective_name_in_a_kernels_own_args_counts_as_its_operation():
    t = Timeline()
    t.kernel(GENERIC, 20, 40, collective="_reduce_scatter_base")
    assert found(t) == [("reduce_scatter", "operation")]


def test_a_kernel_of_no_known_kind_is_an_unknown_collective_and_no_compute():
    t = Timeline()
    t.kernel(GENERIC, 20, 40)
    analysis = analyze(t.trace())
    assert [(c.op, c.found_by) for c in analysis.whole.collectives] == [("unknown", "name")]
    assert analysis.whole.compute_ns == 0
    assert analysis.whole.by_op["unknown"].time_ns == 20_000


def test_a_rule_makes_a_custom_kernel_a_collective():
    t = Timeline()
    t.kernel("my_push_kernel", 20, 40)
    assert found(t) == []
    assert found(t, rules=["all_gather=my_push"]) == [("all_gather", "rule")]


def test_a_rule_makes_a_bare_peer_copy_a_collective_of_the_copy_engine():
    t = Timeline()
    t.copy(20, 40)
    assert found(t) == []
    c = only(analyze(t.trace(), Options.parse(rules=["all_gather=PtoP"])))
    assert (c.op, c.found_by, c.mechanism) == ("all_gather", "rule", "copy_engine")


def test_the_first_rule_that_matches_counts():
    t = Timeline()
    t.kernel("my_push_kernel", 20, 40)
    assert found(t, rules=["all_gather=push", "broadcast=my"]) == [("all_gather", "rule")]


# ---- which activities are one collective


def test_the_copies_of_one_call_are_one_collective_and_take_the_time_of_their_union():
    t = Timeline()
    t.gather("layers.0", 0, 0, launch=5, copies=[(20, 30), (25, 50), (60, 70)])
    c = only(analyze(t.trace()))
    # 20-50 and 60-70: 30 + 10. The gap from 50 to 60 is not its time.
    assert (c.op, c.mechanism, c.time_ns) == ("all_gather", "copy_engine", 40_000)
    assert (c.start_ns, c.end_ns) == (20_000, 70_000)


def test_two_calls_are_two_collectives_even_under_one_label():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20)
    for at in (2, 12):
        call = t.operation("record_param_comms", at, at + 5, collective="_allgather_base")
        t.kernel(RING, 100 + at, 105 + at, launch=at + 1, operation=call)
    collectives = analyze(t.trace()).whole.collectives
    assert [c.unit for c in collectives] == ["layers.0", "layers.0"]


def test_without_operations_what_shares_an_innermost_collective_label_is_one_collective():
    t = Timeline()
    t.label("FSDP::pre_forward (layers.0)", 0, 100)
    t.label("FSDP::all_gather (layers.0)", 10, 30)
    t.label("FSDP::all_gather (layers.0)", 40, 60)
    for launch in (15, 20, 45):
        t.copy(200 + launch, 203 + launch, launch=launch)
    collectives = analyze(t.trace()).whole.collectives
    assert [(c.found_by, c.time_ns) for c in collectives] == [("label", 6_000), ("label", 3_000)]


def test_without_operation_and_label_each_kernel_is_a_collective():
    t = Timeline()
    t.kernel(RING, 20, 40)
    t.kernel(RING, 50, 70)
    assert found(t) == [("all_gather", "name")] * 2


def test_collectives_are_numbered_in_the_order_of_their_start():
    t = Timeline()
    t.gather("b", 300, 320, launch=10)
    t.gather("a", 100, 120, launch=20)
    assert [(c.unit, c.index) for c in analyze(t.trace()).whole.collectives] == [("a", 0), ("b", 1)]


# ---- what a label may claim


def test_a_label_claims_the_communication_kernel_and_not_the_copy_in_beside_it():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20)
    t.kernel(COPY_IN, 30, 35, launch=5)
    t.copy(35, 40, name=LOCAL_COPY, launch=8)
    t.kernel(GENERIC, 50, 90, launch=10, stream=20)
    analysis = analyze(t.trace())
    c = only(analysis)
    assert (c.op, c.found_by, c.mechanism, c.time_ns) == ("all_gather", "label", "sm", 40_000)
    assert analysis.whole.compute_ns == 5_000


def test_a_label_claims_copies_where_no_communication_kernel_ran_and_not_the_kernels_beside_them():
    t = Timeline()
    t.label("fsdp_runtime::all_gather forward (layers.0)", 0, 20)
    t.kernel(COPY_IN, 30, 35, launch=5)
    t.copy(40, 60, launch=10)
    c = only(analyze(t.trace()))
    assert (c.found_by, c.mechanism, c.time_ns) == ("label", "copy_engine", 20_000)


def test_a_label_claims_a_custom_kernel_where_nothing_better_ran():
    t = Timeline()
    t.label("fsdp_runtime::all_gather forward (layers.0)", 0, 20)
    t.kernel("my_push_kernel", 40, 60, launch=10)
    c = only(analyze(t.trace()))
    assert (c.op, c.found_by, c.mechanism, c.unit) == ("all_gather", "label", "sm", "layers.0")


def test_a_label_never_claims_a_gemm():
    t = Timeline()
    t.label("fsdp_runtime::all_gather forward (layers.0)", 0, 20)
    t.gemm(40, 60, launch=10)
    analysis = analyze(t.trace())
    assert analysis.whole.collectives == ()
    assert analysis.whole.gemm_ns == 20_000


def test_a_label_claims_nothing_where_the_operation_has_named_the_collective():
    # FSDP2's all_gather range holds the copy-in, the gather itself (in a range of its own) and a memset.
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 30)
    t.label("nccl:_all_gather_base", 10, 20)
    call = t.operation("record_param_comms", 11, 19, collective="_allgather_base")
    t.kernel(COPY_IN, 30, 35, launch=5)
    t.copy(35, 40, name=LOCAL_COPY, launch=8)
    t.memset(40, 41, launch=9)
    t.kernel(RING, 50, 90, launch=15, operation=call, stream=20)
    c = only(analyze(t.trace()))
    assert (c.found_by, c.time_ns, c.unit) == ("operation", 40_000, "layers.0")


def test_a_label_of_no_known_kind_leaves_the_kind_to_the_label_around_it():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20)
    t.label("nccl:coalesced", 2, 18)
    t.kernel(GENERIC, 30, 50, launch=10)
    assert found(t) == [("all_gather", "label")]


def test_an_operation_of_no_known_kind_leaves_the_kind_to_the_label():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20)
    t.kernel(GENERIC, 30, 50, launch=10, operation=t.operation("record_param_comms", 5, 15, collective="coalesced"))
    assert found(t) == [("all_gather", "operation")]


def test_fsdp2_copies_out_under_a_label_of_their_own_that_is_no_gather():
    t = Timeline()
    t.label("FSDP::all_gather_copy_out (layers.0)", 0, 20)
    t.kernel("void split_with_sizes_copy_out_contiguous_no_cast_kernel<c10::BFloat16>", 30, 50, launch=5)
    t.copy(60, 70, name=LOCAL_COPY, launch=8)
    assert found(t) == []


def test_copies_that_nothing_calls_a_collective_are_memory():
    t = Timeline()
    t.copy(10, 30)
    t.copy(40, 50, name=LOCAL_COPY)
    t.memset(60, 70)
    whole = analyze(t.trace()).whole
    assert whole.collectives == ()
    assert whole.compute_ns == 0


def test_a_copy_of_an_ordinary_operation_stays_memory():
    t = Timeline()
    t.copy(10, 30, operation=t.operation("aten::copy_", 1, 5), launch=2)
    assert found(t) == []


def test_a_label_around_the_operation_counts_where_the_launch_is_not_known():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20)
    call = t.operation("record_param_comms", 5, 10, collective="_allgather_base")
    t.kernel(RING, 50, 90, operation=call)
    assert only(analyze(t.trace())).unit == "layers.0"


def test_a_label_of_another_thread_is_not_around():
    t = Timeline()
    t.label("FSDP::all_gather (layers.0)", 0, 20, thread="other")
    t.kernel(RING, 50, 90, launch=10)
    c = only(analyze(t.trace()))
    assert (c.found_by, c.unit) == ("name", None)


# ---- unit and phase


def fsdp2(*around: str) -> Collective:
    """The gather of a kernel with these labels around its launch, the outermost first."""
    t = Timeline()
    for depth, name in enumerate(around):
        t.label(name, depth, 100 - depth)
    call = t.operation("record_param_comms", 45, 55, collective="_allgather_base")
    t.kernel(RING, 200, 240, launch=50, operation=call)
    return only(analyze(t.trace()))


@pytest.mark.parametrize(
    ("around", "unit", "phase"),
    [
        (["FSDP::pre_forward (layers.0)", "FSDP::all_gather (layers.0)"], "layers.0", "forward"),
        (["FSDP::root_pre_forward", "FSDP::all_gather"], "<root>", "forward"),
        (["FSDP::pre_backward (layers.2)", "FSDP::all_gather (layers.2)"], "layers.2", "backward"),
        (
            ["FSDP::pre_backward (layers.2)", "FSDP::backward_prefetch for layers.1", "FSDP::all_gather (layers.1)"],
            "layers.1",
            "backward",
        ),
        # Activation checkpointing runs a forward inside the backward.
        (
            ["FSDP::pre_backward (layers.2)", "FSDP::pre_forward (layers.2)", "FSDP::all_gather (layers.2)"],
            "layers.2",
            "backward",
        ),
        (["FSDP::all_gather (layers.0)"], "layers.0", "unknown"),
        (["FSDP::all_gather (layers.0)", "nccl:_all_gather_base"], "layers.0", "unknown"),
        (["MFSDP <root> forward", "MFSDP layers.1 forward"], "layers.1", "forward"),
        (["MFSDP <root> forward"], "<root>", "forward"),
        (["MFSDP <root> backward", "MFSDP layers.1 backward"], "layers.1", "backward"),
        (["MFSDP <root> backward", "MFSDP layers.1 forward"], "layers.1", "backward"),
        (["fsdp_runtime::all_gather backward (layers.0)"], "layers.0", "backward"),
        (["train", "ProfilerStep#1"], None, "unknown"),
    ],
)
def test_unit_and_phase_come_from_the_labels_around_the_launch(around, unit, phase):
    c = fsdp2(*around)
    assert (c.unit, c.phase) == (unit, phase)


def test_a_users_own_grammar_names_units_that_no_other_knows():
    t = Timeline()
    t.label("unit3", 0, 20)
    t.kernel(RING, 50, 90, launch=10)
    assert only(analyze(t.trace(), Options.parse(unit_labels=[r"unit(\d+)"]))).unit == "3"


# ---- mechanism


def test_a_collective_of_kernels_and_copies_is_mixed():
    t = Timeline()
    call = t.operation("record_param_comms", 0, 10, collective="_allgather_base")
    t.copy(20, 30, name=LOCAL_COPY, launch=3, operation=call)
    t.kernel(RING, 40, 60, launch=5, operation=call)
    c = only(analyze(t.trace()))
    assert (c.mechanism, c.time_ns) == ("mixed", 30_000)


# ---- GEMMs


def gemm_ns(name: str, operation: str | None = None) -> tuple[int, int]:
    """GEMM and compute time of one kernel of 10 us."""
    t = Timeline()
    t.kernel(name, 10, 20, launch=5, operation=t.operation(operation, 1, 9) if operation else -1)
    whole = analyze(t.trace()).whole
    return whole.gemm_ns, whole.compute_ns


@pytest.mark.parametrize(
    ("name", "operation", "is_gemm"),
    [
        (GEMM, None, True),
        ("my_matrix_kernel", "aten::mm", True),
        ("my_matrix_kernel", "aten::mul", False),
        ("my_matrix_kernel", None, False),
        # Exclusions win over the operation and over the name.
        ("void splitKreduce_kernel<float, float>", "aten::mm", False),
        ("triton_poi_fused_addmm_1", "aten::addmm", False),
        ("void flash_fwd_kernel<cutlass::gemm::GemmShape>", None, False),
    ],
)
def test_a_gemm_is_what_a_matmul_launched_or_a_gemms_name(name, operation, is_gemm):
    assert gemm_ns(name, operation) == (10_000 if is_gemm else 0, 10_000)


def test_a_memset_that_a_matmul_launched_is_no_gemm():
    t = Timeline()
    t.memset(10, 20, launch=5, operation=t.operation("aten::mm", 1, 9))
    whole = analyze(t.trace()).whole
    assert (whole.gemm_ns, whole.compute_ns) == (0, 0)


def test_a_collective_is_no_gemm_even_if_its_name_says_so():
    t = Timeline()
    t.kernel("fused_all_gather_gemm", 10, 20)
    whole = analyze(t.trace(), Options.parse(rules=["all_gather=all_gather_gemm"])).whole
    assert (whole.all_gather.count, whole.gemm_ns, whole.compute_ns) == (1, 0, 0)
