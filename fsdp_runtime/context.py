"""FsdpContext: the order of units, the streams, and what happens when a unit begins and ends.

One context serves an outermost unit and everything below it. It is told four things by hooks (a unit's forward or
backward begins or ends) and does the same thing each time a unit begins::

    wait    for this unit's gather, issued earlier (or now, if nobody foresaw it)
    issue   the gathers of the units that come next
    compute

In that order: were the next gather issued before the wait, two gathers would share the link while nothing computes.

A unit that ends is *released* later, within a memory bound: see ``storage.py``.

The context refers to parameter groups only, never to modules or hooks, so that a deleted model is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from .autograd_hooks import call_at_end_of_backward, call_before_backward, in_backward
from .labels import annotate
from .parameter_group import ParameterGroup, State
from .reduction import ReductionQueue
from .schedule import Schedule
from .storage import UnshardedStorage
from .streams import CaptureRules, CurrentStream, Switched, warn_if_serialised


class FsdpContext:
    """Streams, delayed releases and recorded orders of a tree of units; made by the outermost unit's first forward."""

    def __init__(
        self, groups: list[ParameterGroup], device: torch.device, schedule: Schedule, target_length: int
    ) -> None:
        self.groups = groups
        self.schedule = schedule
        self._device: Any = torch.get_device_module(device)
        self._current_stream = CurrentStream(device)
        if schedule.concurrent:
            warn_if_serialised(device)
        # High priority: when a gather and a matmul become ready together, the gather's few blocks go first.
        self.all_gather_stream: Any = self._device.Stream(priority=-1)
        self.reduce_scatter_stream: Any = self._device.Stream(priority=-1)
        self._storage = UnshardedStorage(
            self._device, self._current_stream, self.all_gather_stream, schedule, target_length
        )

        mechanisms = {id(group.mechanism): group.mechanism for group in groups}
        self._exchanges = [mechanism.exchange() for mechanism in mechanisms.values()]
        obstacles = (mechanism.uncapturable for mechanism in mechanisms.values())
        self._capture_rules = CaptureRules(self._device, next(filter(None, obstacles), None))
        self._is_open = False  # peers may read this rank's shards

        self._running: list[tuple[ParameterGroup, AbstractContextManager[object]]] = []  # forwards, outermost first

        self._orders: dict[ParameterGroup, list[ParameterGroup]] = {}  # by outermost group: order of the last pass
        self._expected: list[ParameterGroup] = []  # the order that this pass should have
        self._order: list[ParameterGroup] = []  # the order that it has so far
        self._ended: list[ParameterGroup] = []  # groups whose backward will come, in the order their forwards ended

        self._in_backward: dict[ParameterGroup, None] = {}  # begun and not ended; a dict keeps the order
        self._backward_runs = False
        self._end_to_come: Callable[[], object | None] = lambda: None  # of the backward that runs, unless it raised
        self._reductions = ReductionQueue(self.reduce_scatter_stream)

    # What the hooks call

    def pre_forward(self, group: ParameterGroup) -> None:
        """A unit's forward begins. In a backward: activation checkpointing repeats it."""
        stream = self._current_stream()
        if in_backward():
            self._enter_backward(group)
            self._storage.use(group, stream, "backward")
            span = annotate("compute", "backward", group.name)
        else:
            # A forward inside itself, or in a backward that this thread is not in: KeyboardInterrupt, which calls no
            # hook, ended what seems to run.
            if not self._running or self._running[0][0] is group or self._backward_runs:
                self._begin_pass(group)
            upcoming = self._follow(group)
            self._storage.use(group, stream, "forward")
            self._storage.gather_ahead(upcoming, stream, "forward")
            span = annotate("compute", "forward", group.name)
        self._running.append((group, span))
        span.__enter__()

    def post_forward(self, group: ParameterGroup, outputs: list[torch.Tensor]) -> None:
        """A unit's forward ended, or raised. outputs: its tensors that require a gradient."""
        if not self._running or self._running[-1][0] is not group:
            return  # its pre_forward raised
        _, span = self._running.pop()
        span.__exit__(None, None, None)
        if in_backward():  # the unit's backward follows and ends its use
            call_before_backward(outputs, partial(self.pre_repeated_backward, group))
            return
        ended = self._ended
        if outputs and call_before_backward(outputs, partial(self.pre_backward, group, ended, len(ended))):
            ended.append(group)
        if not self._running:
            self._storage.retire_unused("forward")
        self._storage.retire(group, self._current_stream(), "forward")
        if not self._running:
            self._end_pass(group)

    def pre_backward(self, group: ParameterGroup, ended: list[ParameterGroup], index: int) -> None:
        """A unit's backward begins; in its forward pass it was the ``index``-th that ended."""
        stream = self._current_stream()
        self._enter_backward(group)
        self._storage.use(group, stream, "backward")
        self._reductions.finish(stream)
        self._storage.gather_ahead(ended[max(0, index - self.schedule.depth) : index][::-1], stream, "backward")
        self._reductions.start(stream)

    def pre_repeated_backward(self, group: ParameterGroup) -> None:
        """The same where only the repeated forward has a graph: reentrant checkpointing ran the forward without.

        So nothing tells which backward comes next; most likely that of the unit whose forward came before.
        """
        order = self._order
        self.pre_backward(group, order, order.index(group) if group in order else 0)

    def post_backward(self, group: ParameterGroup) -> None:
        """A unit's backward ended: its parameters have their gradients, or never will in this backward."""
        stream = self._current_stream()
        self._in_backward.pop(group, None)
        self._reduce(group, stream)
        if group.state is State.IN_USE:
            self._storage.retire(group, stream, "backward")

    # A pass

    def _begin_pass(self, outermost: ParameterGroup) -> None:
        self._capture_rules.begin_forward()
        self._discard_leftovers()
        for group in self.groups:
            group.refresh()
        self._open(changed=True)
        self._expected = self._orders.get(outermost, [])
        self._order = []
        self._ended = []

    def _end_pass(self, outermost: ParameterGroup) -> None:
        self._orders[outermost] = self._order
        if not self._ended:  # no backward can come: back to resting
            self._storage.release_all("forward")
        self._close()

    def _open(self, changed: bool) -> None:
        """A forward or a backward begins. changed: since the last one somebody may have written the shards."""
        if self._is_open:  # the last one was aborted
            self._close()
        stream, caller = self._storage.gather_stream, self._current_stream()
        if changed:
            # The optimizer wrote the shards on the caller's stream, which knows that peers have read the last ones.
            stream.wait_stream(caller)
            with Switched(self._device, stream, caller):
                for group in self.groups:
                    group.publish()
        for exchange in self._exchanges:
            exchange.open(stream)
        self._is_open = True

    def _close(self) -> None:
        """It ends: what the caller does next, or a CUDA graph's end, comes after all gathers, also after peers'."""
        self._is_open = False
        caller = self._current_stream()
        for exchange in self._exchanges:
            exchange.close(self._storage.gather_stream, caller)
        caller.wait_stream(self._storage.gather_stream)

    def _follow(self, group: ParameterGroup) -> list[ParameterGroup]:
        """Records that ``group`` is next; returns the groups to gather ahead: none if the order is not the expected."""
        position = len(self._order)
        self._order.append(group)
        if position >= len(self._expected) or self._expected[position] is not group:
            self._expected = []
        return self._expected[position + 1 : position + 1 + self.schedule.depth]

    def _discard_leftovers(self) -> None:
        """Forgets passes that did not end in a backward: an evaluation with gradients enabled, an exception."""
        self._running.clear()
        self._storage.discard(self.groups)
        if self._backward_runs:
            self._backward_runs = False
            self._in_backward.clear()
            self._reductions.abandon(self._current_stream())
            for group in self.groups:
                group.discard_gradients()

    # The backward

    def _enter_backward(self, group: ParameterGroup) -> None:
        if self._backward_runs and self._end_to_come() is None:
            self._discard_leftovers()
        if not self._backward_runs:
            self._capture_rules.begin_backward()
            self._backward_runs = True
            self._open(changed=False)
            self._end_to_come = call_at_end_of_backward(self._end_backward)
        self._in_backward[group] = None

    def _end_backward(self) -> None:
        """Called by autograd at the end: what is left is reduced, joined and released before ``backward()`` returns."""
        stream = self._current_stream()
        for group in list(self._in_backward):  # no input required a gradient: nothing told that the backward ended
            self.post_backward(group)
        for group in self.groups:
            self._reduce(group, stream)  # what ``no_sync`` accumulated in units that did not run in this backward
        self._reductions.start(stream)
        self._reductions.finish(stream)
        self._storage.retire_unused("backward")
        self._storage.release_all("backward")
        self._close()
        self._backward_runs = False

    def _reduce(self, group: ParameterGroup, stream: Any) -> None:
        """Packs the group's gradients and has them reduced after the next gather."""
        # Of another group, if no gather came in between: frees an input before one more comes.
        self._reductions.start(stream)
        group.collect_gradients(stream)
        if group.reduction is None or not group.reduce_gradients:
            return
        self._reductions.hold(group.reduction)
        group.reduction = None
        if not self.schedule.concurrent:
            self._reductions.start(stream)
            self._reductions.finish(stream)
