"""One context serves an outermost unit and all below it, from its first forward until the model dies."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fsdp_runtime
from fsdp_runtime import FsdpContext, FsdpError, context_of, fully_shard
from fsdp_runtime.autograd_hooks import in_backward
from fsdp_runtime.parameter_group import ParameterGroup, State
from fsdp_runtime.streams import warn_if_serialised

from .conftest import OnRanks
from .models import Root, same_gradients, shard_children
from .recorder import recording


def _lazily_created_and_shared(rank: int, world: int) -> None:
    model = shard_children(Root())
    units = [model, *model.layers]
    assert all(context_of(unit) is None for unit in units)
    model(torch.randn(2, 16))
    context = context_of(model)
    assert isinstance(context, FsdpContext)
    assert all(context_of(unit) is context for unit in units)
    streams = {context.all_gather_stream, context.reduce_scatter_stream}
    assert len(streams) == 2
    model(torch.randn(2, 16)).sum().backward()
    assert context_of(model) is context
    assert {context.all_gather_stream, context.reduce_scatter_stream} == streams


def test_a_context_appears_with_the_first_forward_and_is_shared_by_all_units(on_ranks: OnRanks) -> None:
    on_ranks(2, _lazily_created_and_shared)


def _siblings_apart(rank: int, world: int) -> None:
    siblings = nn.Sequential(*[shard_children(Root(children=2)) for _ in range(2)])
    siblings(torch.randn(2, 16)).sum().backward()
    first, second = (context_of(module) for module in siblings)
    assert first is not second
    assert first is not None
    assert second is not None
    assert first.all_gather_stream is not second.all_gather_stream


def test_siblings_without_a_common_unit_have_contexts_of_their_own(on_ranks: OnRanks) -> None:
    on_ranks(2, _siblings_apart)


def _child_first(rank: int, world: int) -> None:
    model = shard_children(Root())
    model.layers[1](torch.randn(2, 16))
    with pytest.raises(FsdpError, match=r"unit layers\.1: its forward ran before that of Root"):
        model(torch.randn(2, 16))


def test_a_child_that_ran_before_its_root_makes_the_root_raise(on_ranks: OnRanks) -> None:
    on_ranks(2, _child_first)


def _deleted_model(rank: int, world: int, mode: str) -> None:
    """Every buffer and the context itself must go by reference counts alone."""
    gc.disable()
    try:
        model = shard_children(Root())
        output = model(torch.randn(2, 16))
        if mode == "backward":
            output.sum().backward()
        watched = [weakref.ref(context_of(model))]
        for unit in [model, *model.layers]:
            group = unit._fsdp_unit.group
            watched += [weakref.ref(group), weakref.ref(group._sharded), weakref.ref(group._unsharded)]
            watched += [weakref.ref(p.unsharded) for p in group.parameters]
        del model, unit, group, output
        deadline = time.monotonic() + 5  # gloo's thread lets go of the buffers of the last collective a moment later
        while any(ref() is not None for ref in watched) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [type(ref()).__name__ for ref in watched if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_deleted_model_frees_its_storage_without_the_garbage_collector(on_ranks: OnRanks, mode: str) -> None:
    on_ranks(2, _deleted_model, mode)


FIRST_MODEL = """
import gc, sys, weakref
import torch, torch.distributed as dist
from fsdp_runtime import fully_shard
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
gc.disable()
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
watched = [weakref.ref(model), weakref.ref(model._fsdp_unit.group)]
del model
sys.exit(any(ref() is not None for ref in watched))
"""


def test_the_first_model_of_a_process_is_freed_too(tmp_path: Path) -> None:
    """What torch imports only when it is first used leaves cycles that hold every frame on the stack."""
    root = Path(fsdp_runtime.__file__).parent.parent
    subprocess.run([sys.executable, "-c", FIRST_MODEL, str(tmp_path / "store")], cwd=root, check=True, timeout=120)


def _child_outlives_root(rank: int, world: int) -> None:
    gc.disable()
    try:
        _outlive()
    finally:
        gc.enable()


def _outlive() -> None:
    model = shard_children(Root())
    x = torch.randn(2, 16)
    model(x).sum()  # no backward: some storage is still there
    kept, others = model.layers[3], [weakref.ref(layer._fsdp_unit.group) for layer in model.layers[:3]]
    expected = x @ kept.weight.full_tensor().detach().T
    del model
    deadline = time.monotonic() + 5
    while any(ref() is not None for ref in others) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [ref() for ref in others] == [None] * 3
    assert context_of(kept) is None
    kept(x).sum().backward()
    torch.testing.assert_close(kept(x), expected)
    assert context_of(kept) is not None


def test_a_child_that_outlives_its_root_is_a_root_and_keeps_nothing_of_the_others(on_ranks: OnRanks) -> None:
    on_ranks(2, _child_outlives_root)


def _child_called_alone(rank: int, world: int) -> None:
    model = shard_children(Root())
    x = torch.randn(2, 16)
    model(x).sum().backward()
    layer = model.layers[2]
    expected = x @ layer.weight.full_tensor().detach().T
    for _ in range(2):  # the weights change in between: nothing stale may be used
        torch.testing.assert_close(layer(x), expected)
        with torch.no_grad():
            layer.weight.mul_(2)
        expected = expected * 2
    with torch.no_grad():
        layer(x)
    assert all(unit._fsdp_unit.group.state is State.SHARDED for unit in model.layers)


def test_a_child_may_be_called_alone_after_its_root_ran(on_ranks: OnRanks) -> None:
    on_ranks(2, _child_called_alone)


def _raises_in(part: str, model: Root, x: torch.Tensor) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if part == "forward":
                raise ValueError("on purpose")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ValueError("on purpose")

    if part == "backward of a unit":  # when its weight has a gradient, and nobody has taken it yet
        handle = model.layers[1].register_forward_pre_hook(lambda module, args: Failing.apply(*args))
    else:
        handle = model.layers[1].register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(ValueError, match="on purpose"):
        model(x).sum().backward()
    handle.remove()


def _goes_on_after_an_exception(rank: int, world: int, part: str) -> None:
    torch.manual_seed(1)
    reference = Root()
    model = shard_children(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(2, 16)
    model(x).sum().backward()
    optimizer.zero_grad()
    _raises_in(part, model, x)
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in [*reference.parameters(), *model.state_dict().values()]:
            parameter.mul_(0.5)  # nothing that the failed step gathered may be used
    with recording() as recorder:
        reference(x).sum().backward()
        model(x).sum().backward()
        assert not recorder.alive
        with torch.no_grad():
            model(x)
        assert not recorder.alive
    same_gradients(model, reference)


@pytest.mark.parametrize("part", ["forward", "backward", "backward of a unit"])
def test_the_next_step_is_right_after_an_exception(on_ranks: OnRanks, part: str) -> None:
    on_ranks(2, _goes_on_after_an_exception, part)


def _another_backward_after_an_exception(rank: int, world: int, retry: bool) -> None:
    """No forward comes in between: the backward that raised has left everything as it was in its middle."""
    torch.manual_seed(1)
    reference = Root()
    model = shard_children(copy.deepcopy(reference))
    first, second = torch.randn(2, 16), torch.randn(2, 16)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handles = []
    hook = model.layers[1].register_forward_hook(lambda module, args, y: handles.append(y.register_hook(fail)))
    failing = model(first).sum()
    hook.remove()
    other = model(second).sum()
    with pytest.raises(ValueError, match="on purpose"):
        failing.backward(retain_graph=True)
    handles[0].remove()
    (failing if retry else other).backward()
    reference(first if retry else second).sum().backward()
    same_gradients(model, reference)
    assert all(unit._fsdp_unit.group.state is State.SHARDED for unit in [model, *model.layers])


@pytest.mark.parametrize("retry", [False, True])
def test_the_next_backward_is_right_after_an_exception(on_ranks: OnRanks, retry: bool) -> None:
    on_ranks(2, _another_backward_after_an_exception, retry)


def _interrupted(rank: int, world: int, part: str) -> None:
    """KeyboardInterrupt: a module runs no hook for it, so units seem to run that do not."""
    torch.manual_seed(1)
    model = Root()
    reference = copy.deepcopy(model)
    layers = [fully_shard(layer) for layer in model.layers]
    if part == "repeated forward":
        model.layers = nn.ModuleList(map(checkpoint_wrapper, layers))
    fully_shard(model)
    parameters = list(model.parameters())  # as an optimizer has them
    x = torch.randn(2, 16)
    model(x).sum().backward()
    model.zero_grad()

    def interrupt(module: nn.Module, args: Any) -> None:
        if part == "forward" or in_backward():
            raise KeyboardInterrupt

    handle = layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    handle.remove()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    for _ in range(2):
        with torch.no_grad():
            for parameter in [*reference.parameters(), *parameters]:
                parameter.mul_(0.5)  # nothing that was gathered before may be used
            torch.testing.assert_close(model(x), reference(x))
    model.zero_grad()
    model(x).sum().backward()
    reference(x).sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("part", ["forward", "repeated forward"])
def test_the_next_pass_is_right_after_keyboard_interrupt(on_ranks: OnRanks, part: str) -> None:
    on_ranks(2, _interrupted, part)


def _state_inside_a_forward(rank: int, world: int) -> None:
    model = Root()
    reference = copy.deepcopy(model)
    fully_shard(model)  # its layers are its own parameters: they are in use while it runs
    saved: list[Any] = []
    model.layers[1].register_forward_pre_hook(lambda module, args: saved.extend(model.state_dict().values()))
    x = torch.randn(2, 16)
    torch.testing.assert_close(model(x), reference(x))
    model(x).sum().backward()
    assert saved
    assert all(isinstance(value, DTensor) for value in saved)


def test_a_state_dict_inside_a_forward_has_shards_and_leaves_the_forward_alone(on_ranks: OnRanks) -> None:
    on_ranks(2, _state_inside_a_forward)


def _state_outside_passes(rank: int, world: int) -> None:
    model = shard_children(Root())
    output = model(torch.randn(2, 16))
    assert all(isinstance(p, DTensor) for p in model.parameters())  # also where the unsharded storage is still there
    assert any(unit._fsdp_unit.group.state is State.PENDING for unit in [model, *model.layers])
    output.sum().backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())


def test_parameters_are_dtensors_whenever_no_unit_runs(on_ranks: OnRanks) -> None:
    on_ranks(2, _state_outside_passes)


def test_serialised_streams_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.warns(UserWarning, match="unset the variable"):
        warn_if_serialised(torch.device("cuda"))


def _no_module_is_referenced(rank: int, world: int) -> None:
    linear = fully_shard(nn.Linear(4, 4))
    linear(torch.randn(1, 4)).sum().backward()
    group: ParameterGroup = linear._fsdp_unit.group
    assert not any(isinstance(value, nn.Module) for value in vars(group).values())


def test_groups_do_not_refer_to_modules(on_ranks: OnRanks) -> None:
    on_ranks(2, _no_module_is_referenced)
