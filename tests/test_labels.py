"""Each grammar of range labels, on names as the runtimes write them."""

from __future__ import annotations

import re

import pytest

from overlap_probe.labels import ROOT, Label, LabelReader

AG, RS = "all_gather", "reduce_scatter"

FSDP2 = {
    "FSDP::all_gather (layers.0)": Label(AG, "layers.0", None),
    "FSDP::all_gather": Label(AG, ROOT, None),
    "FSDP::all_gather (model.layers.7.mlp (experts))": Label(AG, "model.layers.7.mlp (experts)", None),
    "FSDP::all_gather_copy_out (layers.0)": Label(None, "layers.0", None),
    "FSDP::pre_forward (layers.0)": Label(None, "layers.0", "forward"),
    "FSDP::pre_forward": Label(None, ROOT, "forward"),
    "FSDP::root_pre_forward": Label(None, ROOT, "forward"),
    "FSDP::post_forward (layers.0)": Label(None, "layers.0", "forward"),
    "FSDP::pre_backward (layers.0)": Label(None, "layers.0", "backward"),
    "FSDP::pre_backward": Label(None, ROOT, "backward"),
    "FSDP::post_backward_reduce (layers.0)": Label(RS, "layers.0", "backward"),
    "FSDP::post_backward_reduce": Label(RS, ROOT, "backward"),
    "FSDP::post_backward_reshard (layers.0)": Label(None, "layers.0", "backward"),
    "FSDP::post_backward_rs_wait (layers.0)": Label(None, "layers.0", "backward"),
    "FSDP::root_post_backward_callback": Label(None, ROOT, "backward"),
    # The unit that is prefetched is not the one whose backward issues it, and says so itself in a label inside.
    "FSDP::backward_prefetch for layers.1": Label(None, None, "backward"),
    "FSDP::forward_prefetch for layers.1": Label(None, None, "forward"),
}
MEGATRON = {
    "MFSDP <root> forward": Label(None, ROOT, "forward"),
    "MFSDP <root> backward": Label(None, ROOT, "backward"),
    "MFSDP decoder.layers.3 forward": Label(None, "decoder.layers.3", "forward"),
    "MFSDP decoder.layers.3 backward": Label(None, "decoder.layers.3", "backward"),
}
OURS = {
    "fsdp_runtime::all_gather forward (layers.0)": Label(AG, "layers.0", "forward"),
    "fsdp_runtime::all_gather backward (layers.0)": Label(AG, "layers.0", "backward"),
    "fsdp_runtime::all_gather forward (<root>)": Label(AG, ROOT, "forward"),
    "fsdp_runtime::reduce_scatter backward (layers.0)": Label(RS, "layers.0", "backward"),
    "fsdp_runtime::all_reduce backward (layers.0)": Label("all_reduce", "layers.0", "backward"),
    "fsdp_runtime::compute forward (layers.0)": Label(None, "layers.0", "forward"),
    "fsdp_runtime::release backward (<root>)": Label(None, ROOT, "backward"),
}
# Ranges are qualified names of the functions that DeepSpeed decorates with instrument_w_nvtx.
HOOKS = "DeepSpeedZeRoOffload._register_deepspeed_module.<locals>."
OLD_HOOKS = "DeepSpeedZeroOptimizer_Stage3._register_hooks_recursively.<locals>."
GRADIENTS = "DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks.<locals>.wrapper.<locals>."
ZERO3 = {
    "DeepSpeedEngine.forward": Label(None, None, "forward"),
    "DeepSpeedEngine.backward": Label(None, None, "backward"),
    "DeepSpeedHybridEngine.forward": Label(None, None, "forward"),
    "Init._convert_to_deepspeed_param.<locals>.all_gather_coalesced": Label(AG),
    "allgather_fn": Label(AG),
    "reduce_scatter_coalesced": Label(RS),
    "reduce_scatter_fn": Label(RS),
    HOOKS + "_run_before_backward_function": Label(None, None, "backward"),
    HOOKS + "_run_after_backward_function": Label(None, None, "backward"),
    HOOKS + "_pre_backward_module_hook.<locals>._run_before_backward_function": Label(None, None, "backward"),
    OLD_HOOKS + "_pre_backward_module_hook.<locals>._run_before_backward_function": Label(None, None, "backward"),
    GRADIENTS + "reduce_partition_and_remove_grads": Label(None, None, "backward"),
    "DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads": Label(None, None, "backward"),
    "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads": Label(None, None, "backward"),
    "DeepSpeedZeroOptimizer_Stage3.__avg_scatter_contiguous_grads": Label(None, None, "backward"),
    "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue": Label(None, None, "backward"),
}
BACKENDS = {
    "nccl:_all_gather_base": Label(AG),
    "nccl:all_gather": Label(AG),
    "nccl:all_gather_into_tensor_coalesced": Label(AG),
    "nccl:_reduce_scatter_base": Label(RS),
    "nccl:all_reduce": Label("all_reduce"),
    "nccl:all_to_all": Label("all_to_all"),
    "nccl:broadcast": Label("broadcast"),
    "nccl:reduce": Label("reduce"),
    "nccl:send": Label("send_recv"),
    "nccl:send 0->1": Label("send_recv"),
    "nccl:recv 0<-1": Label("send_recv"),
    # NCCL's own NVTX domain.
    "ncclAllGather": Label(AG),
    "ncclReduceScatter": Label(RS),
    "ncclAllReduce": Label("all_reduce"),
    "ncclAlltoAll": Label("all_to_all"),
    "ncclBroadcast": Label("broadcast"),
    "ncclReduce": Label("reduce"),
    "ncclSend": Label("send_recv"),
    "ncclRecv": Label("send_recv"),
}


@pytest.mark.parametrize(("name", "label"), (FSDP2 | MEGATRON | ZERO3 | OURS | BACKENDS).items())
def test_a_label_says_what_happens_inside_it(name, label):
    assert LabelReader().read(name) == label


@pytest.mark.parametrize(
    "name",
    [
        "aten::mm",
        "ProfilerStep#3",
        "all_gather",
        "my FSDP::all_gather (layers.0)",
        "MFSDP layers.0",
        "ncclGroupStart",
        "ncclCommInitRank",
        "forward (layers.0)",
        "fsdp_runtime::all_gather (layers.0)",
        # What ZeRO-3 does in both phases, or in neither; activation checkpointing runs forward hooks in the backward.
        "PartitionedParameterCoordinator.fetch_sub_module",
        "PartitionedParameterCoordinator.__all_gather_params",
        "PartitionedParameterCoordinator.release_sub_module",
        HOOKS + "_pre_forward_module_hook",
        HOOKS + "_post_forward_module_hook",
        "Init._all_gather",
        "DeepSpeedEngine.step",
        "DeepSpeedZeroOptimizer_Stage3.step",
        "",
    ],
)
def test_a_name_that_no_grammar_knows_says_nothing(name):
    assert LabelReader().read(name) is None


def test_a_grammar_of_the_users_own_names_its_groups():
    reader = LabelReader([re.compile(r"(?P<phase>fwd_forward|bwd_backward)/(?P<op>gather_all_gather)/(?P<unit>.*)")])
    assert reader.read("bwd_backward/gather_all_gather/block3") == Label(AG, "block3", "backward")


def test_the_first_group_of_a_users_grammar_is_the_unit_if_none_is_named():
    reader = LabelReader([re.compile(r"unit(\d+)")])
    assert reader.read("unit12") == Label(None, "12", None)


def test_a_users_grammar_comes_before_those_that_are_known():
    reader = LabelReader([re.compile(r"FSDP::all_gather \(wrapped\.(.*)\)")])
    assert reader.read("FSDP::all_gather (wrapped.layers.0)") == Label(None, "layers.0", None)
    assert reader.read("FSDP::all_gather (layers.0)") == Label(AG, "layers.0", None)


def test_a_users_grammar_must_match_the_whole_label():
    assert LabelReader([re.compile(r"unit(\d+)")]).read("subunit12") is None


def test_a_users_grammar_that_finds_an_empty_unit_means_the_root():
    assert LabelReader([re.compile(r"gather:(?P<unit>\w*)")]).read("gather:") == Label(None, ROOT, None)
