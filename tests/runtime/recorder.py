"""Watches what a runtime does: the order of gathers, releases, reductions and waits for them, and bytes alive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fsdp_runtime.parameter_group import ParameterGroup
from fsdp_runtime.reduction import Reduction


class Recorder:
    """``events``: ``"gather NAME"`` and so on for wait, free, reduce and join (the wait for it), as they happened.

    Bytes are those of unsharded storage.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.alive: dict[str, int] = {}
        self.peak_bytes = 0

    @property
    def alive_bytes(self) -> int:
        return sum(self.alive.values())

    def of(self, *kinds: str) -> list[str]:
        """The events of these kinds; without the kind if it is only one."""
        chosen = [event.split() for event in self.events if event.split()[0] in kinds]
        return [" ".join(words[-1:] if len(kinds) == 1 else words) for words in chosen]


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    gather, wait, free = ParameterGroup.gather, ParameterGroup.wait, ParameterGroup.free
    reduce, join = Reduction.start, Reduction.wait

    def watched_gather(group: ParameterGroup, *args: Any) -> None:
        gather(group, *args)
        if group.parameters:
            assert group.name not in recorder.alive, f"{group.name} gathered twice"
            recorder.alive[group.name] = group.unsharded_bytes
            recorder.peak_bytes = max(recorder.peak_bytes, recorder.alive_bytes)
            recorder.events.append(f"gather {group.name}")

    def watched_wait(group: ParameterGroup, *args: Any) -> None:
        if group._in_flight is not None:
            recorder.events.append(f"wait {group.name}")
        wait(group, *args)

    def watched_free(group: ParameterGroup) -> None:
        free(group)
        if recorder.alive.pop(group.name, None) is not None:
            recorder.events.append(f"free {group.name}")

    def watched_reduce(reduction: Reduction, *args: Any) -> None:
        recorder.events.append(f"reduce {reduction._unit}")
        reduce(reduction, *args)

    def watched_join(reduction: Reduction, *args: Any) -> None:
        recorder.events.append(f"join {reduction._unit}")
        join(reduction, *args)

    with (
        mock.patch.object(ParameterGroup, "gather", watched_gather),
        mock.patch.object(ParameterGroup, "wait", watched_wait),
        mock.patch.object(ParameterGroup, "free", watched_free),
        mock.patch.object(Reduction, "start", watched_reduce),
        mock.patch.object(Reduction, "wait", watched_join),
    ):
        yield recorder
