"""The flat buffers: shards are DTensor's, parameters are views, and packing is the inverse of sharding."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_runtime.layout import ALIGNMENT, Layout

SHAPES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(torch.Size), min_size=1, max_size=4)
WORLDS = st.integers(1, 5)


def test_places_of_an_uneven_and_an_even_parameter() -> None:
    layout = Layout.of([torch.Size([5, 30]), torch.Size([4])], world=2)
    weight, bias = layout.pieces
    # 5 rows on 2 ranks: 3 each, one of them padding; 3 * 30 = 90 elements, so the next shard starts at 2 * 64.
    assert (weight.rows, weight.offset, weight.numel) == (3, 0, 90)
    assert (bias.rows, bias.offset, bias.numel) == (2, 128, 2)
    assert layout.shard_numel == 192
    assert layout.unsharded_numel == 384
    assert weight.own_rows(0) == slice(0, 3)
    assert weight.own_rows(1) == slice(3, 5)


def test_a_parameter_is_gathered_as_one_piece_and_all_of_them_for_one_rank() -> None:
    shapes = [torch.Size([4, 16]), torch.Size([0, 3]), torch.Size([4])]
    for world, gathered in ((2, [32, 2]), (1, [128])):
        layout = Layout.of(shapes, world)
        assert [shard.numel() for shard in layout.shards(torch.empty(layout.shard_numel))] == gathered
        places = layout.places(torch.empty(layout.unsharded_numel))
        assert [place.numel() for place in places] == [world * numel for numel in gathered]
    assert Layout.of([torch.Size([0, 3])], 1).shards(torch.empty(0)) == []


def test_ranks_without_rows_hold_an_empty_shard() -> None:
    (piece,) = Layout.of([torch.Size([4, 3])], world=3).pieces
    assert [piece.own_rows(rank) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 4)]
    assert piece.local(torch.zeros(64), rank=2).shape == (0, 3)


@given(SHAPES, WORLDS)
def test_shards_are_those_of_chunk(shapes: list[torch.Size], world: int) -> None:
    for piece in Layout.of(shapes, world).pieces:
        rows = torch.arange(piece.shape[0])
        chunks = [*rows.chunk(world), *[rows[:0]] * world]
        for rank in range(world):
            assert torch.equal(rows[piece.own_rows(rank)], chunks[rank])


@given(SHAPES, WORLDS)
def test_gathered_shards_are_the_parameter_and_packing_undoes_it(shapes: list[torch.Size], world: int) -> None:
    layout = Layout.of(shapes, world)
    parameters = [torch.randn(shape) for shape in shapes]
    unsharded = torch.full((layout.unsharded_numel,), float("nan"))
    sharded = torch.zeros(world, layout.shard_numel)
    for rank in range(world):
        for piece, parameter in zip(layout.pieces, parameters, strict=True):
            piece.local(sharded[rank], rank).copy_(parameter[piece.own_rows(rank)])
        for place, shard in zip(layout.places(unsharded), layout.shards(sharded[rank]), strict=True):
            place[rank * shard.numel() : (rank + 1) * shard.numel()] = shard
    for piece, parameter in zip(layout.pieces, parameters, strict=True):
        assert piece.offset % ALIGNMENT == 0
        view = layout.parameter(unsharded, piece)
        assert torch.equal(view, parameter)
        assert view.is_contiguous()
        assert not view.numel() or view.untyped_storage().data_ptr() == unsharded.untyped_storage().data_ptr()
    packed = layout.pack(parameters, torch.float32, torch.device("cpu"))
    assert torch.equal(packed.view(world, layout.shard_numel), sharded)


@given(SHAPES, WORLDS)
def test_a_missing_gradient_is_packed_as_zeros(shapes: list[torch.Size], world: int) -> None:
    layout = Layout.of(shapes, world)
    assert not layout.pack([None] * len(shapes), torch.float32, torch.device("cpu")).any()


def test_gradients_without_padding_are_packed_rank_major_and_cast() -> None:
    layout = Layout.of([torch.Size([2, 64]), torch.Size([0, 3]), torch.Size([128])], world=2)
    assert layout.has_no_padding  # 64 elements a rank, none, and 64
    weight, bias = torch.arange(128.0).view(2, 64), torch.arange(128.0) + 500
    packed = layout.pack([weight, torch.empty(0, 3), bias], torch.float64, torch.device("cpu"))
    assert packed.dtype == torch.float64
    assert torch.equal(packed, torch.cat((weight[0], bias[:64], weight[1], bias[64:])).double())


def test_writing_the_buffer_does_not_look_like_a_change_of_the_parameter() -> None:
    layout = Layout.of([torch.Size([2, 2])], world=1)
    unsharded = torch.zeros(layout.unsharded_numel)
    parameter = layout.parameter(unsharded, layout.pieces[0])
    version = parameter._version
    unsharded.fill_(1.0)
    assert parameter._version == version
    assert parameter.sum().item() == 4


def test_one_gradient_without_padding_is_laid_out_already_and_not_copied() -> None:
    layout = Layout.of([torch.Size([4, 32])], 2)  # 2 rows of 32 a rank: 64 elements, as aligned as they must be
    gradient = torch.randn(4, 32)
    packed = layout.pack([gradient], torch.float32, torch.device("cpu"))
    assert packed.data_ptr() == gradient.data_ptr()
    assert torch.equal(packed, gradient.view(-1))
    strided = torch.randn(32, 4).T
    assert torch.equal(layout.pack([strided], torch.float32, torch.device("cpu")), strided.reshape(-1))
