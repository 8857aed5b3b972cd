"""The gradients of one unit on their way from autograd to the optimizer.

Packed (the copy lays them out rank-major and casts them), reduce-scattered, and added to the ``grad`` of the sharded
parameters. Packing and adding run on the caller's stream, only the collectives on the reduce-scatter stream: then every
buffer belongs to the caller's stream and can be freed as soon as that stream has waited for the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import collectives
from .errors import FsdpError
from .gather import Handle
from .labels import annotate
from .layout import Layout
from .mesh import ShardMesh, as_dtensor
from .streams import Switched

if TYPE_CHECKING:
    from .parameter_group import FlatParameter


class Reduction:
    """All gradients of a unit in one flat buffer, and the collectives that average it over ranks.

    Every trainable parameter of the unit takes part, with zeros if autograd gave it no gradient on this rank: the
    collective must have the same size on all ranks, even if they took different branches inside the unit.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[FlatParameter],
        layout: Layout,
        mesh: ShardMesh,
        dtype: torch.dtype | None,
        events: tuple[Any, Any],
    ) -> None:
        """layout: of these parameters. dtype: to accumulate and reduce in; None is that of the gradients.

        events: the unit's, for one reduction at a time: packed, reduced.
        """
        self._unit = unit
        self._parameters = list(parameters)
        self._layout = layout
        self._mesh = mesh
        self._device: Any = torch.get_device_module(mesh.device)
        self._dtype = parameters[0].unsharded.dtype if dtype is None else dtype
        self._packed: torch.Tensor | None = None
        self._ready, self._reduced = events
        self._shard: torch.Tensor | None = None
        self._handle: Handle | None = None

    def add(self, parameters: Sequence[FlatParameter], gradients: Sequence[torch.Tensor | None], stream: Any) -> None:
        """Adds full gradients, in the order of ``parameters``, which must be those that this was made for.

        stream: the current one.
        """
        if list(parameters) != self._parameters:
            raise FsdpError(
                f"unit {self._unit}: requires_grad changed while gradients were being accumulated; "
                "freeze and unfreeze parameters only after a backward that reduces gradients"
            )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise FsdpError(
                    f"parameter {parameter.name} of unit {self._unit}: sparse gradients are not supported; "
                    "use a dense gradient (for an embedding, sparse=False)"
                )
        # Detached: a backward that creates a graph leaves gradients that have one.
        values = [None if gradient is None else gradient.detach() for gradient in gradients]
        packed = self._layout.pack(values, self._dtype, self._mesh.device)
        self._packed = packed if self._packed is None else self._packed.add_(packed)
        if self._shard is None:  # before the event: then whoever used its memory until now comes before it, too
            self._shard = packed.new_empty(self._layout.shard_numel)
        self._ready.record(stream)

    def start(self, stream: Any, caller: Any) -> None:
        """Issues the collectives on ``stream``, after the packing. caller: the current stream."""
        assert self._packed is not None
        assert self._shard is not None
        mesh = self._mesh
        stream.wait_event(self._ready)
        with Switched(self._device, stream, caller):
            with annotate("reduce_scatter", "backward", self._unit):
                work = collectives.reduce_scatter(self._shard, self._packed, mesh.reduce_operation, mesh.reduce_group)
            if mesh.replicate_group is not None:
                if work is not None:  # on a CPU nothing else orders the two
                    work.wait()
                with annotate("all_reduce", "backward", self._unit):
                    work = collectives.all_reduce(self._shard, mesh.reduce_operation, mesh.replicate_group)
            self._reduced.record(stream)
        self._handle = Handle(self._reduced, work)

    def wait(self, stream: Any) -> None:
        """Makes ``stream``, the current one, wait for the collectives, and frees their input."""
        assert self._handle is not None
        self._handle.wait(stream)
        self._packed = None

    def finish(self, stream: Any) -> None:
        """Waits, and adds the average to the ``grad`` of the sharded parameters."""
        self.wait(stream)
        assert self._shard is not None
        averaged = self._shard if self._mesh.divisor == 1 else self._shard.div_(self._mesh.divisor)
        averaged = averaged.to(self._parameters[0].local.dtype)
        for parameter, piece in zip(self._parameters, self._layout.pieces, strict=True):
            local = piece.like(parameter.local, averaged)
            if parameter.sharded.grad is None:
                parameter.sharded.grad = as_dtensor(local, parameter.sharded._spec)  # type: ignore[attr-defined]
            else:
                parameter.sharded.grad.to_local().add_(local)  # type: ignore[attr-defined]


class ReductionQueue:
    """At most one reduction that is held back and one that runs: what they hold does not grow with the number of units.

    One is held back until the next unit's gather has been issued, so that the gather does not queue behind it, and
    finished one unit later, when it had a whole unit's backward to run beside.
    """

    def __init__(self, stream: Any) -> None:
        """stream: to reduce on. Where methods take another ``stream``, that is the current one."""
        self._stream = stream
        self._held: Reduction | None = None
        self._running: Reduction | None = None

    def hold(self, reduction: Reduction) -> None:
        """Takes a reduction over; the one before must have been started."""
        assert self._held is None
        self._held = reduction

    def start(self, stream: Any) -> None:
        """Issues the one that is held, if there is one."""
        if self._held is not None:
            self.finish(stream)
            self._running, self._held = self._held, None
            self._running.start(self._stream, stream)

    def finish(self, stream: Any) -> None:
        """Joins the one that runs, if there is one: its gradients are where the optimizer looks for them."""
        if self._running is not None:
            self._running.finish(stream)
            self._running = None

    def abandon(self, stream: Any) -> None:
        """Forgets both, after the one that runs: its buffers are in use."""
        if self._running is not None:
            self._running.wait(stream)
        self._held = self._running = None
