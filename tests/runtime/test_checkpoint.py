"""Saving and loading: state dicts of DTensors, torch.distributed.checkpoint, another world size."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from .conftest import OnRanks
from .models import Mlp, close, local_batch, same_parameters, shard_children


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard_children(Mlp())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _whole(state: Any) -> Any:
    """A copy of the state with every DTensor as the tensor that it is a shard of."""
    if isinstance(state, torch.Tensor):
        return (state.full_tensor() if isinstance(state, DTensor) else state).detach().clone()
    return {key: _whole(value) for key, value in state.items()} if isinstance(state, dict) else state


def _save(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Trains two steps, saves, trains one more; the whole parameters and optimizer state before and after that."""
    model, optimizer = _make(1)
    batches = torch.randn(3, 6, 5)
    for batch in batches[:2]:
        _step(model, optimizer, local_batch(batch, rank, world))
    parameters, moments = get_state_dict(model, optimizer)
    saved = _whole({"model": parameters, "optimizer": moments["state"]})
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    _step(model, optimizer, local_batch(batches[2], rank, world))
    return {"saved": saved, "batch": batches[2], "after": _whole(model.state_dict())}


def _load(rank: int, world: int, folder: str, expected: dict[str, Any]) -> None:
    """Loads into a model that has other values, was used already, and may have another number of shards."""
    model, optimizer = _make(2)
    _step(model, optimizer, torch.randn(2, 5))
    parameters, moments = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    loaded = get_state_dict(model, optimizer)
    loaded = _whole({"model": loaded[0], "optimizer": loaded[1]["state"]})
    torch.testing.assert_close(loaded, expected["saved"], rtol=0, atol=0)
    _step(model, optimizer, local_batch(expected["batch"], rank, world))
    for name, value in _whole(model.state_dict()).items():
        close(value, expected["after"][name], 1e-5)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (2, 3), (3, 2), (2, 1)])
def test_training_goes_on_from_a_checkpoint_on_any_number_of_ranks(
    on_ranks: OnRanks, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    expected = on_ranks(saved_on, _save, str(tmp_path))[0]
    on_ranks(loaded_on, _load, str(tmp_path), expected)


def _assign(rank: int, world: int) -> None:
    """``assign=True`` replaces the parameter objects: the runtime must use the new ones, shared where they were."""
    torch.manual_seed(1)
    reference = Mlp()
    source = shard_children(copy.deepcopy(reference))
    model = shard_children(Mlp())
    model(torch.randn(2, 5)).sum().backward()
    model.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 5)
    close(model(x), reference(x))
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    same_parameters(model, reference)


def test_a_state_dict_may_be_assigned(on_ranks: OnRanks) -> None:
    on_ranks(2, _assign)


def _between_forward_and_backward(rank: int, world: int) -> None:
    model = shard_children(Mlp())
    output = model(torch.randn(2, 5))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    assert list(state) == list(Mlp().state_dict())
    output.sum().backward()


def test_a_state_dict_holds_shards_also_between_forward_and_backward(on_ranks: OnRanks) -> None:
    on_ranks(2, _between_forward_and_backward)


def _copies(rank: int, world: int, folder: str) -> None:
    """What people keep of a model, a deep copy of its state dict and a file of it: neither holds more than shards."""
    model = shard_children(Mlp())
    model(torch.randn(2, 5)).sum().backward()
    for state in (model.state_dict(), {name: p.grad for name, p in model.named_parameters()}):
        copied = copy.deepcopy(state)
        path = f"{folder}/{rank}.pt"
        torch.save({name: value.to_local() for name, value in state.items()}, path)
        saved = torch.load(path)
        for name, value in state.items():
            assert torch.equal(copied[name].full_tensor(), value.full_tensor())
            assert torch.equal(saved[name], value.to_local())
            assert saved[name].untyped_storage().nbytes() == value.to_local().nbytes


def test_shards_may_be_copied_and_saved_one_by_one(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(3, _copies, str(tmp_path))
