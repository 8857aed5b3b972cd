"""The places in autograd's graph that tell when the backward of a unit begins and ends, and when the whole one does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.graph import Node

from .errors import FsdpError

_BEGINS = "fsdp_runtime.begins"
"""Key of an autograd node's metadata: what to call before it runs."""


def in_backward() -> bool:
    """Whether this thread is inside a backward: then a forward is a repetition by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def call_at_end_of_backward(callback: Callable[[], None]) -> Callable[[], object | None]:
    """Has ``callback`` called when the backward that runs now is over, before ``backward()`` returns.

    If the backward raises it is dropped instead. What is returned gives None as soon as autograd keeps it no longer.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
    return weakref.ref(callback)


def call_before_backward(outputs: Sequence[torch.Tensor], begin: Callable[[], None]) -> bool:
    """Has ``begin`` called before autograd runs any operation that led to ``outputs``; False if there is none.

    On nodes, not on tensors: the hook of a view is lost when the view is modified in place, the node of its base is
    not. Nested units may return the same tensor, the inner one first; the backward of the outer one begins first.
    """
    found = False
    for tensor in outputs:
        base = tensor._base
        node: Node | None = tensor.grad_fn if base is None else base.grad_fn
        if node is None:
            continue
        found = True
        metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
        begins = metadata.get(_BEGINS)
        if begins is None:
            begins = metadata[_BEGINS] = []
            node.register_prehook(partial(_call_last_first, begins))
        if begin not in begins:
            begins.append(begin)
    return found


def call_after_backward(inputs: Sequence[torch.Tensor], end: Callable[[], None]) -> tuple[torch.Tensor, ...]:
    """The inputs, to be used instead; ``end`` is called when autograd has run every operation that used them."""
    # Past ``Function.apply``, which prepares for torch.func and takes as long again.
    watched: tuple[torch.Tensor, ...] = super(torch.autograd.Function, _EndOfBackward).apply(end, *inputs)  # type: ignore
    return watched


def _call_last_first(begins: list[Callable[[], None]], _gradients: tuple[torch.Tensor, ...]) -> None:
    for begin in reversed(begins):
        begin()


class _EndOfBackward(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.end = end
        ctx.set_materialize_grads(False)  # an input that was not used has no gradient: not one of zeros
        # Detached: autograd treats an input that is returned as it is as a view, which may not be modified in place.
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.end()
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _NoSecondBackward.apply(*gradients)  # type: ignore[no-untyped-call]
        return (None, *gradients)


class _NoSecondBackward(torch.autograd.Function):
    """The identity, and a clear error for who differentiates it: else autograd would read freed storage."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple([None if gradient is None else gradient.detach() for gradient in gradients])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> NoReturn:
        raise FsdpError(
            "second derivatives through a sharded unit are not supported: its parameters are gathered for the first "
            "backward only; leave what is differentiated twice unsharded"
        )
