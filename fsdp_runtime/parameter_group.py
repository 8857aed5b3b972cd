"""The parameters of one unit: a flat shard that is always there, and a flat unsharded buffer that comes and goes.

The one idea: the unsharded buffer, and the parameters that are views of it, are made once and live as long as the
unit; only their *storage* is allocated before a gather and freed after use. Tensors that autograd saved in the
forward (a weight, a view of it) refer to that storage, so they are valid again as soon as the unit is gathered for
the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import FsdpError
from .gather import Gather, Handle
from .labels import ROOT, Phase, annotate
from .layout import Layout, Piece
from .mesh import ShardMesh, as_dtensor
from .precision import MixedPrecision
from .reduction import Reduction
from .slots import Registration, Slot


class State(Enum):
    """Where a unit is between two gathers."""

    SHARDED = auto()
    """The unsharded storage is freed."""
    AHEAD = auto()
    """Its gather was issued before its turn."""
    IN_USE = auto()
    """Its forward or backward runs."""
    PENDING = auto()
    """Used, and its release is delayed."""


@dataclass(eq=False)
class FlatParameter:
    """One parameter: what the optimizer sees (``sharded``), what the computation sees (``unsharded``)."""

    name: str
    piece: Piece
    slots: list[Slot]
    sharded: nn.Parameter
    """A DTensor, ``Shard(0)``; its local tensor is a view of the group's sharded buffer."""
    local: torch.Tensor = field(init=False)
    """That local tensor, to notice when somebody has replaced it."""
    unsharded: nn.Parameter = field(init=False)
    """A leaf of autograd; a view of the group's unsharded buffer."""

    @property
    def registered(self) -> nn.Parameter | None:
        """What the modules hold now."""
        return self.slots[0].parameters.get(self.slots[0].name)

    @property
    def is_current(self) -> bool:
        """False: somebody has replaced the sharded parameter, or its local tensor."""
        return self.registered is self.sharded and self.local is _local(self.sharded)


class ParameterGroup:
    """The flat buffers of one unit and its state. Knows neither modules nor the context."""

    def __init__(
        self, registrations: list[Registration], mesh: ShardMesh, gather: Gather, precision: MixedPrecision
    ) -> None:
        self.name = ROOT
        """The unit's dotted name, known when the outermost unit first runs."""
        self.state = State.SHARDED
        self.reduce_gradients = True
        """False: backward passes add to ``reduction`` and leave it there (``no_sync``)."""
        self.reduction: Reduction | None = None
        """Gradients that this unit has and nobody has begun to reduce."""
        device_module: Any = torch.get_device_module(mesh.device)
        self.consumed = device_module.Event()
        """Recorded after the last use: the storage may go when it has happened."""
        self._mesh = mesh
        self._precision = precision
        self._gather = gather
        self._gathered = device_module.Event()
        self._reduction_events = (device_module.Event(), device_module.Event())
        self._in_flight: Handle | None = None
        self._exposed = False
        self._buffers: list[torch.Tensor] = []
        """The pieces of the unsharded buffer that are gathered."""
        self._shards: Sequence[torch.Tensor] = ()
        """The pieces of the staged shard, if there is one that lasts."""
        self._layout = Layout.of((r.parameter.shape for r in registrations), mesh.world)
        self.parameters = [
            FlatParameter(r.name, piece, r.slots, self._shard(r.parameter, piece))
            for r, piece in zip(registrations, self._layout.pieces, strict=True)
        ]
        self._flatten()

    @property
    def mechanism(self) -> Gather:
        """How its bytes move."""
        return self._gather

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of unsharded storage that are allocated now."""
        return self._unsharded.untyped_storage().nbytes() if self.parameters else 0

    def refresh(self) -> None:
        """Takes over sharded parameters that were replaced since the last pass (``to_empty``, ``load_state_dict``).

        Raises FsdpError if what replaced one is not a shard of it, or has no memory yet.
        """
        if not all([p.is_current for p in self.parameters]):
            for parameter in self.parameters:
                self._take_over(parameter)
            self._flatten()
        for parameter in self.parameters:
            if parameter.sharded._backward_hooks or parameter.sharded._post_accumulate_grad_hooks:
                raise FsdpError(
                    f"unit {self.name}: parameter {parameter.name} has gradient hooks, which would never run, as its "
                    "gradient does not come from autograd; use the gradient after backward()"
                )
        if self.parameters and self._sharded.is_meta:
            raise FsdpError(
                f"unit {self.name}: parameter {self.parameters[0].name} is still on the meta device; "
                "call module.to_empty(device=...) and initialise the parameters before the first forward"
            )

    def publish(self) -> None:
        """Fills the staged shard, if there is one that lasts: the shards are what the next gathers are to see."""
        if self.parameters and self._staged is not None and self._staged is not self._sharded:
            self._staged.copy_(self._sharded)

    def gather(self, stream: Any, early: Any, phase: Phase) -> None:
        """Allocates the unsharded storage and issues the all-gather, all on ``stream``, which must be current.

        early: a stream on which a copy inside the device, if the gather needs one, runs sooner; see ``Gather.place``.
        """
        if not self._buffers:
            return
        with self._gather.memory():
            self._unsharded.untyped_storage().resize_(self._unsharded.nbytes)
        shards = self._shards
        if self._staged is None:
            shards = self._layout.shards(self._gather.stage(self._sharded, self._unsharded.dtype))
        shards = self._gather.place(self._buffers, shards, stream, early)
        with annotate("all_gather", phase, self.name):
            self._in_flight = self._gather.gather(self._buffers, shards, self._mesh.shard_group, stream, self._gathered)

    def wait(self, stream: Any) -> None:
        """Orders what ``stream`` does next after the gather. Waits once; later calls do nothing."""
        if self._in_flight is not None:
            self._in_flight.wait(stream)
            self._in_flight = None

    def free(self) -> None:
        """Frees the unsharded storage. The stream that allocated it must have been made to wait for ``consumed``."""
        if self.parameters:
            self._unsharded.untyped_storage().resize_(0)

    def expose(self) -> None:
        """Registers the unsharded parameters with the modules."""
        if self._exposed:
            return
        self._exposed = True
        for parameter in self.parameters:
            if parameter.unsharded.requires_grad != parameter.sharded.requires_grad:
                parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)
            for slot in parameter.slots:
                slot.assign(parameter.unsharded)

    def conceal(self) -> None:
        """Registers the sharded parameters with the modules: what everybody sees while the unit does not run."""
        if not self._exposed:
            return
        self._exposed = False
        for parameter in self.parameters:
            for slot in parameter.slots:
                slot.assign(parameter.sharded)

    def collect_gradients(self, stream: Any) -> None:
        """Moves the gradients that autograd left on the unsharded parameters into ``reduction``, which adds them up.

        stream: the current one.
        """
        gradients = [p.unsharded.grad for p in self.parameters]
        if all([gradient is None for gradient in gradients]):
            return
        trainable = [p for p in self.parameters if p.unsharded.requires_grad]
        if len(trainable) < len(self.parameters):
            gradients = [p.unsharded.grad for p in trainable]
        for parameter in trainable:
            parameter.unsharded.grad = None
        if self.reduction is None:
            whole = len(trainable) == len(self.parameters)
            layout = self._layout if whole else Layout.of((p.piece.shape for p in trainable), self._mesh.world)
            dtype = self._precision.reduce_dtype
            self.reduction = Reduction(self.name, trainable, layout, self._mesh, dtype, self._reduction_events)
        self.reduction.add(trainable, gradients, stream)

    def discard_gradients(self) -> None:
        """Forgets what an aborted backward left."""
        self.reduction = None
        for parameter in self.parameters:
            parameter.unsharded.grad = None

    # Building

    @torch.no_grad()
    def _shard(self, original: nn.Parameter, piece: Piece) -> nn.Parameter:
        """This rank's rows of an original parameter, as a parameter of their own."""
        device = original.device if original.is_meta else self._mesh.device
        local = (
            original.detach()[piece.own_rows(self._mesh.rank)].to(device).clone(memory_format=torch.contiguous_format)
        )
        return nn.Parameter(as_dtensor(local, self._mesh.spec(original)), requires_grad=original.requires_grad)

    def _take_over(self, parameter: FlatParameter) -> None:
        current = parameter.registered
        if not isinstance(current, DTensor) or current.shape != parameter.piece.shape:
            raise FsdpError(
                f"unit {self.name}: expected parameter {parameter.name} to be its shard, a DTensor of shape "
                f"{tuple(parameter.piece.shape)}, found {type(current).__name__}; load or assign sharded DTensors"
            )
        parameter.sharded = current

    @torch.no_grad()
    @torch.inference_mode(False)
    def _flatten(self) -> None:
        """Moves all shards into one flat buffer, of their dtype and device, and makes the unsharded buffer for it."""
        if not self.parameters:
            return
        kinds = {(p.sharded.dtype, _local(p.sharded).device) for p in self.parameters}
        if len(kinds) != 1:
            raise FsdpError(
                f"unit {self.name}: parameters of one unit must have one dtype and device, found "
                f"{sorted(f'{dtype} on {device}' for dtype, device in kinds)}; make the odd ones a unit of their own"
            )
        ((dtype, device),) = kinds
        if device.type not in (self._mesh.device.type, "meta"):
            raise FsdpError(
                f"unit {self.name}: its parameters were moved to {device}, its mesh is on {self._mesh.device}"
            )
        self._sharded = self._gather.empty_shard(self._layout.shard_numel, dtype, device).zero_()
        for parameter in self.parameters:
            local = parameter.piece.local(self._sharded, self._mesh.rank)
            local.copy_(_local(parameter.sharded))
            parameter.local = parameter.sharded._local_tensor = local  # type: ignore[attr-defined]
            for slot in parameter.slots:
                slot.assign(parameter.sharded)
        unsharded_dtype = self._precision.compute_dtype_of(dtype)
        self._staged = self._gather.staging(self._sharded, unsharded_dtype)
        self._unsharded = torch.empty(self._layout.unsharded_numel, dtype=unsharded_dtype, device=device)
        self._buffers = self._layout.places(self._unsharded)
        self._shards = () if self._staged is None else self._layout.shards(self._staged)
        if device.type == "meta":
            return
        for parameter in self.parameters:
            view = self._layout.parameter(self._unsharded, parameter.piece)
            parameter.unsharded = nn.Parameter(view, requires_grad=parameter.sharded.requires_grad)
        self.free()


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """The local tensor of a sharded parameter, without the autograd function that ``to_local`` is."""
    local: torch.Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    return local
