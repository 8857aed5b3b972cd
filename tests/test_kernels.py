"""Names of kernels and operations, one generation after another."""

from __future__ import annotations

import pytest

from overlap_probe import kernels
from overlap_probe.results import OPS

COLLECTIVE_KERNELS = {
    # NCCL before 2.18, with and without the datatype, and the oldest form.
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "reduce_scatter",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "reduce",
    "ncclAllGatherRingLLKernel_copy_i8(ncclColl)": "all_gather",
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    # NCCL from 2.19 on.
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "broadcast",
    "ncclDevKernel_Reduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    # NCCL's symmetric kernels.
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs4K)": "reduce_scatter",
    # PyTorch's own, over symmetric memory, as demangled from their anonymous namespace.
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*, unsigned long)": "all_gather",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8>(float**, unsigned long)": "all_reduce",
    "multimem_all_gather_kernel": "all_gather",
    # RCCL and MSCCL, which say little.
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "unknown",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "unknown",
    "void rcclGenericKernel<4, false>(ncclDevComm*, unsigned long, ncclWork*)": "unknown",
    "rcclGenericKernel<1>(ncclDevKernelArgsStorage<4096ul>)": "unknown",
    "mscclKernel_Sum_half_Simple_true(ncclDevComm*, mscclAlgo*, mscclWork*)": "unknown",
}

NO_COLLECTIVE_KERNELS = [
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>>",
    "void split_with_sizes_copy_out_contiguous_no_cast_kernel<c10::BFloat16>(char**, char**, long*)",
    "triton_poi_fused__to_copy_all_gather_0",
    "my_ncclDevKernel_AllGather_wrapper",
]

GEMM_KERNELS = [
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
    "nvjet_hsh_128x192_64x4_1x2_h_bz_TNN",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
    "void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_32x4_nn_align8>(cutlass::Params)",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nt_align4>(cutlass_80::Params)",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
    "ampere_sgemm_128x64_tn",
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(cublasGemmSmallNParams<float>)",
    "void cublasLt_gemm_kernel<float>",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64_MI32x32x8x1_SN_1LDSB0_GSU1_WGM8",
    "Cijk_Alik_Bljk_SB_MT64x64x16_SE_K1",
    "magma_sgemmEx_kernel<float, true, false>(int, int, int)",
    "triton_mm",
    "triton_tem_fused_mm_3",
    "triton_tem_fused_addmm_relu_0",
    "deep_gemm::fp8_gemm_kernel<4096u, 7168u>",
    # An activation in the epilogue does not make a GEMM an elementwise kernel.
    "void cutlass::Kernel<cutlass::gemm::kernel::GemmWithFusedEpilogue<cutlass::gemm::threadblock::MmaMultistage, "
    "cutlass::epilogue::threadblock::Epilogue<cutlass::epilogue::thread::LinearCombinationBiasElementwise<float>>>>",
]

NO_GEMM_KERNELS = [
    "triton_poi_fused_addmm_gelu_1",
    "triton_red_fused__to_copy_addmm_native_layer_norm_2",
    "triton_per_fused_addmm_sum_0",
    "triton_for_fused_addmm_1",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t>>(Flash_fwd_params)",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<cutlass::gemm::collective::CollectiveMma>>",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::gemm::GemmShape>::Params)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    "triton_tem_fused_flex_attention_mm_0",
    "attn_fwd_gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
    "void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>)",
    "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4, 128>>>",
    "Cijk_Ailk_Bjlk_BBS_BH_PostGSU4_VW4",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GemmScale>(int)",
    # Named after a library, not after what it does.
    "void fbgemm_gpu::permute_2D_data_kernel<float, int>(int, int)",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false>",
    "void at::native::vectorized_layer_norm_kernel<float, float>(int)",
]


@pytest.mark.parametrize(("name", "kind"), COLLECTIVE_KERNELS.items())
def test_a_communication_kernel_is_known_by_its_name(name, kind):
    assert kernels.is_communication_kernel(name)
    assert kernels.kind_of(name) == kind


@pytest.mark.parametrize("name", NO_COLLECTIVE_KERNELS)
def test_other_kernels_are_no_communication(name):
    assert not kernels.is_communication_kernel(name)


@pytest.mark.parametrize("name", GEMM_KERNELS)
def test_a_gemm_is_known_by_its_name(name):
    assert kernels.is_gemm_kernel(name)


@pytest.mark.parametrize("name", NO_GEMM_KERNELS)
def test_exclusions_win_over_whatever_a_name_contains(name):
    assert not kernels.is_gemm_kernel(name)


@pytest.mark.parametrize(
    "name",
    [
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_poi_fused_addmm_1",
        "void flash_fwd_kernel<cutlass::bfloat16_t>",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
    ],
)
def test_some_kernels_are_no_gemm_even_if_a_matmul_launched_them(name):
    assert kernels.is_not_gemm(name)


@pytest.mark.parametrize(
    "name",
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "_scaled_mm", "_grouped_mm", "addmm_out", "addmm_"],
)
def test_matmul_operations_are_known(name):
    assert kernels.is_matmul_operation(f"aten::{name}")


@pytest.mark.parametrize(
    "name",
    [
        "aten::mul",
        "aten::mm_backward_hook",
        "aten::_scaled_dot_product_flash_attention",
        "aten::cat",
        "aten::bmm2",
        "mm",
    ],
)
def test_other_operations_multiply_no_matrices(name):
    assert not kernels.is_matmul_operation(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    {
        "c10d::_allgather_base_": "all_gather",
        "c10d::allgather_": "all_gather",
        "c10d::allgather_into_tensor_coalesced_": "all_gather",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
        "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "c10d::allreduce_": "all_reduce",
        "c10d::alltoall_base_": "all_to_all",
        "c10d::broadcast_": "broadcast",
        "c10d::reduce_": "reduce",
        "c10d::send": "send_recv",
        "c10d::recv_": "send_recv",
        "_c10d_functional::all_gather_into_tensor": "all_gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
        "_c10d_functional::all_reduce": "all_reduce",
        "_c10d_functional_autograd::all_to_all_single": "all_to_all",
        "record_param_comms": "unknown",
    }.items(),
)
def test_a_collective_operation_says_its_kind(name, kind):
    assert kernels.is_collective_operation(name)
    assert kernels.kind_of(name) == kind


@pytest.mark.parametrize(
    ("collective", "kind"),
    {
        "_allgather_base": "all_gather",
        "allgather": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "allreduce": "all_reduce",
        "all_to_allv": "all_to_all",
        "broadcast": "broadcast",
        "barrier": "all_reduce",
        "send": "send_recv",
        "gloo:all_reduce": "all_reduce",
        "coalesced": "unknown",
    }.items(),
)
def test_a_collective_name_says_its_kind(collective, kind):
    assert kernels.kind_of(collective) == kind
    assert kind in OPS


@pytest.mark.parametrize(
    "name",
    [
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
        "c10d::monitored_barrier_",
        "aten::copy_",
        "my::all_gather",
        "FSDP::all_gather (layers.0)",
    ],
)
def test_waiting_for_a_collective_is_not_calling_one(name):
    assert not kernels.is_collective_operation(name)


def test_a_backends_own_record_is_no_call_of_the_users():
    assert kernels.is_c10d_call("c10d::_allgather_base_")
    assert not kernels.is_c10d_call("record_param_comms")


@pytest.mark.parametrize("name", ["aten::mm", "aten::copy_", "aten::add", "mylib::fused_norm"])
def test_an_operator_that_does_something_to_data_computes(name):
    assert kernels.is_compute_operator(name)


@pytest.mark.parametrize(
    "name", ["aten::view", "aten::empty", "aten::t", "aten::detach", "c10d::_allgather_base_", "record_param_comms"]
)
def test_an_operator_that_only_changes_a_shape_or_communicates_does_not_compute(name):
    assert not kernels.is_compute_operator(name)


def test_gloo_runs_a_reduce_scatter_as_an_all_reduce():
    assert kernels.family_of("reduce_scatter") == kernels.family_of("all_reduce")
    assert kernels.family_of("all_gather") not in (kernels.family_of("reduce_scatter"), kernels.family_of("broadcast"))
