"""The entry point, ``fully_shard``, and the hooks that it leaves on a module.

A *unit* is a module that ``fully_shard`` was called on: its parameters, without those of units below it, are gathered
together before its forward and again before its backward. The hooks only translate: what then happens, and in which
order, is in ``context.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import trace_rules
from torch.distributed.device_mesh import DeviceMesh

from .autograd_hooks import call_after_backward
from .context import FsdpContext
from .errors import FsdpError
from .gather import Gather, GatherName
from .labels import ROOT
from .mesh import ShardMesh
from .parameter_group import ParameterGroup, State
from .precision import MixedPrecision
from .schedule import Schedule, ScheduleName, resolve_schedule
from .selection import resolve_gather
from .slots import UNIT_ATTRIBUTE, collect, mark_taken
from .tree import map_tensors, tensors

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# torch.compile does not trace the hooks, nor what they call: it breaks its graph there and compiles what is inside.
trace_rules.add(__package__)


def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    *,
    schedule: Schedule | ScheduleName = "auto",
    gather: Gather | GatherName = "auto",
    mixed_precision: MixedPrecision | None = None,
    target_length: int = 1,
    reduce_group: dist.ProcessGroup | None = None,
) -> ModuleT:
    """Shards the parameters of ``module`` over ``mesh``, in place, and returns it.

    Call it bottom-up: children first, the parent's call last. Afterwards the module's parameters are DTensors,
    ``Shard(0)``: make the optimizer after this call. Parameters are not made equal across ranks: each rank keeps its
    rows of what it had. All ranks must run the same units in the same order; inside a unit they may use different
    parameters, and a parameter that got no gradient gets zeros, unless no parameter of the unit got one: then that
    must be so on every rank.

    mesh: one dimension shards; of two, the outer replicates and the inner shards. None: all ranks, on CUDA if the
        process group has NCCL.
    schedule: when gathers are issued: ``"serial"``, ``"implicit"``, ``"prefetch"`` or a ``Schedule``; ``"auto"`` is
        prefetch of depth 1. It holds for the outermost unit and everything below: name it on any of its units, but not
        two different ones.
    gather: how bytes move: ``"process_group"``, ``"zero_cta"``, ``"copy_engine"`` or a ``Gather``; ``"auto"`` is the
        best that the ranks support, and says so in the log. For this unit only. The last two work among GPUs of one
        host.
    mixed_precision: dtypes to compute and reduce in. For this unit only.
    target_length: how many used units may wait for their release. More lets gathers start earlier, for more memory:
        besides the shards, less than ``target_length + 1 + max(1, depth)`` units of the largest size are alive in a
        forward. That leaves no room to gather ahead with 0 and depth 1. Like ``schedule`` it holds for the whole tree.
    reduce_group: a process group of the same ranks to reduce-scatter in. Operations of one communicator run one after
        the other; with a second one, NCCL can gather and reduce at the same time.

    Raises FsdpError for what cannot be sharded.
    """
    if UNIT_ATTRIBUTE in module.__dict__:
        raise FsdpError(f"{type(module).__name__}: fully_shard was already called on this module")
    if type(module).forward is nn.Module.forward:
        raise FsdpError(
            f"{type(module).__name__} has no forward, so nothing would gather it; shard its children instead"
        )
    if target_length < 0:
        raise FsdpError(f"target_length: must not be negative, got {target_length}")
    chosen = None if schedule == "auto" else resolve_schedule(schedule)
    shard_mesh = ShardMesh.of(mesh, reduce_group)
    precision = mixed_precision or MixedPrecision()
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.to(shard_mesh.device)
    registrations = collect(module)
    group = ParameterGroup(registrations, shard_mesh, resolve_gather(gather, shard_mesh), precision)
    mark_taken(registrations, module)
    _Unit(group, shard_mesh.device, precision, chosen, target_length).attach(module)
    return module


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward passes inside add up gradients on each rank and reduce nothing; the next one outside reduces the sum.

    The gradients are kept whole, in the dtype that they are reduced in. Covers the units in ``module``'s tree.
    """
    groups = [unit.group for _, unit in _units(module) if unit.group.reduce_gradients]  # the others: nested no_sync
    for group in groups:
        group.reduce_gradients = False
    try:
        yield
    finally:
        for group in groups:
            group.reduce_gradients = True


def context_of(module: nn.Module) -> FsdpContext | None:
    """The context that a unit shares with its tree; None before the outermost unit's first forward."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    if unit is None:
        raise FsdpError(f"{type(module).__name__}: fully_shard was not called on this module")
    context: FsdpContext | None = unit.context
    return context


class _Unit:
    """What ``fully_shard`` leaves on a module. Never refers to the module."""

    def __init__(
        self,
        group: ParameterGroup,
        device: torch.device,
        precision: MixedPrecision,
        schedule: Schedule | None,
        target_length: int,
    ) -> None:
        """schedule: None is whatever other units of the tree chose."""
        self.group = group
        self.device = device
        self.precision = precision
        self.schedule = schedule
        self.target_length = target_length
        self._context: Callable[[], FsdpContext | None] = lambda: None

    @property
    def context(self) -> FsdpContext | None:
        """The context of the tree, while there is one."""
        return self._context()

    def own(self, context: FsdpContext) -> None:
        """For the outermost unit: the context lives as long as it does."""
        self._context = lambda: context

    def share(self, context: FsdpContext) -> None:
        """For the units below: when the outermost one is gone they are on their own, and keep nothing of the others."""
        self._context = weakref.ref(context)

    def attach(self, module: nn.Module) -> None:
        setattr(module, UNIT_ATTRIBUTE, self)
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        # always_call: a forward that raises (the early stop of activation checkpointing does) has ended, too.
        module.register_forward_hook(self.post_forward, always_call=True)
        module.register_state_dict_pre_hook(self.pre_state_dict)  # type: ignore[no-untyped-call]
        # partial: torch sets an attribute on a post hook, which a bound method does not take.
        module.register_state_dict_post_hook(partial(self.post_state_dict))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(self.pre_state_dict)  # type: ignore[no-untyped-call]

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = self.context or _make_context(module)
        context.pre_forward(self.group)
        if self.precision.compute_dtype is not None:
            args, kwargs = map_tensors(self.precision.cast_input, (args, kwargs))
        if torch.is_grad_enabled():
            args, kwargs = self._watch_end_of_backward(context, args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        context = self.context
        if context is not None:  # else its pre_forward raised
            watched = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
            context.post_forward(self.group, watched)

    def pre_state_dict(self, *_: Any) -> None:
        """A state dict has shards, also where the unit runs; what was interrupted seems to."""
        self.group.conceal()

    def post_state_dict(self, *_: Any) -> None:
        if self.group.state is State.IN_USE:
            self.group.expose()

    def _watch_end_of_backward(
        self, context: FsdpContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = [t for t in (*tensors(args), *tensors(kwargs)) if t.requires_grad]
        if not inputs:
            return args, kwargs
        watched = iter(call_after_backward(inputs, partial(context.post_backward, self.group)))

        def replaced(tensor: torch.Tensor) -> torch.Tensor:
            return next(watched) if tensor.requires_grad else tensor

        return map_tensors(replaced, args), map_tensors(replaced, kwargs)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise FsdpError(
            "a sharded module cannot be deep-copied or pickled; copy it before fully_shard, or save its state dict"
        )


def _units(module: nn.Module) -> Iterator[tuple[str, _Unit]]:
    """The units in a module tree with their dotted names, outer before inner."""
    for name, child in module.named_modules():
        unit = child.__dict__.get(UNIT_ATTRIBUTE)
        if unit is not None:
            yield name, unit


def _make_context(module: nn.Module) -> FsdpContext:
    """Makes the context of the tree below ``module``, its outermost unit. Raises FsdpError if it cannot have one."""
    tree = list(_units(module))
    for name, unit in tree:
        if unit.context is not None:
            raise FsdpError(
                f"unit {name}: its forward ran before that of {type(module).__name__}, its outermost unit, which owns "
                "the context that all units share; run the outermost unit's forward first, or do not shard it"
            )
    schedule = _agreed("schedule", None, [(name, unit.schedule) for name, unit in tree]) or resolve_schedule("auto")
    target_length = _agreed("target_length", 1, [(name, unit.target_length) for name, unit in tree])
    context = FsdpContext([unit.group for _, unit in tree], tree[0][1].device, schedule, target_length)
    for name, unit in tree:
        unit.share(context)
        unit.group.name = name or ROOT
    tree[0][1].own(context)
    return context


OptionT = TypeVar("OptionT")


def _agreed(option: str, default: OptionT, choices: list[tuple[str, OptionT]]) -> OptionT:
    """The one value other than the default that units of a tree chose."""
    chosen = {value: name or ROOT for name, value in choices if value != default}
    if len(chosen) > 1:
        conflict = " and ".join(f"{value!r} (unit {name})" for value, name in chosen.items())
        raise FsdpError(f"{option}: one holds for a whole tree of units, got {conflict}")
    return next(iter(chosen), default)
