"""The waves of a kernel, and how long its tail may be."""

from __future__ import annotations

import pytest
from timelines import GEMM, POINTWISE, Timeline

from overlap_probe.kernels import tile_of
from overlap_probe.room import TAIL_SHARE, fills_device, tail_share, waves_of


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", (256, 128)),
        ("nvjet_hsh_128x192_64x4_1x2_h_bz_TNN", (128, 192)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_warpgroupsize1x1x1_kernel", (128, 64)),
        ("void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x4_nn_align8>(Params)", (128, 256)),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", (128, 256)),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int>>>", None),
        (POINTWISE, None),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128x128_>>(Flash_fwd_params)", None),
    ],
)
def test_a_gemms_name_tells_its_tile(kernel, tile):
    assert tile_of(kernel) == tile


@pytest.mark.parametrize(
    ("shapes", "tiles", "waves"),
    [
        ("[[2048, 4096], [4096, 4096]]", 256, 2),  # 2048 x 4096 / (256 x 128); 256 tiles on 132 blocks
        ("[[4096, 4096], [4096, 4096]]", 512, 4),
        ("[[4096], [8192, 4096], [4096, 4096], [], []]", 1024, 8),  # aten::addmm: the bias first
        ("[[4, 2048, 1024], [4096, 1024], []]", 1024, 8),  # aten::linear: the weight is transposed; 8192 rows
        ("[[16, 512, 64], [16, 64, 512]]", 128, None),  # aten::bmm: a tile a block at most
        ("[[300, 4096], [4096, 4096]]", 38, None),
        ("[[2048, 4096], [512, 512]]", None, None),  # not a product of these two
        ("[[4096]]", None, None),
        (None, None, None),
    ],
)
def test_waves_are_told_by_tile_and_shapes(shapes, tiles, waves):
    t = Timeline()
    product = t.operation("aten::mm", 0, 5, shapes=shapes)
    t.gemm(10, 100, blocks=132, operation=product)
    found = waves_of(t.trace(), 0)
    assert (found and (found.tiles, found.count)) == (None if waves is None else (tiles, waves))
    assert tail_share(t.trace(), 0) == pytest.approx(max(TAIL_SHARE, 1.2 / waves if waves else 0))


def test_a_kernel_with_a_block_for_each_tile_is_not_persistent():
    t = Timeline()
    product = t.operation("aten::mm", 0, 5, shapes="[[2048, 4096], [4096, 4096]]")
    t.gemm(10, 100, blocks=256, operation=product)
    assert waves_of(t.trace(), 0) is None


@pytest.mark.parametrize(("blocks", "sms", "fills"), [(132, 132, True), (131, 132, False), (132, None, False)])
def test_a_kernel_fills_the_device_if_it_has_a_block_for_each_sm(blocks, sms, fills):
    t = Timeline(sms=sms)
    t.gemm(10, 100, name=GEMM, blocks=blocks)
    assert fills_device(t.trace(), 0) == fills
