"""The launcher's view of the ranks of this host: what each reported, whether it lives, which one is to blame.

The idea: everything is read from the ranks' own report files and from the process table, so that the launcher and the
agent see the same, and a rank needs no help to be seen dying or hanging.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_probe.job import STACK_SIGNAL, Job, signal_group
from overlap_probe.progress import Event, Follower

TAIL_LINES = 12
STACK_LINES = 8


@dataclass(slots=True)
class Reports:
    """What one rank has reported so far."""

    number: int
    state: str = "started"
    """What it reported last, as a person would read it."""
    steps: int = 0
    """Changes of state so far: the rank with the fewest is behind."""
    notes: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    wrote: bool = False
    ended: bool = False
    error: str | None = None
    error_ns: int = 0

    def take(self, event: Event) -> None:
        if event.kind == "state":
            self.state, self.steps = event.value, self.steps + 1
        elif event.kind == "note":
            self.notes.append(event.value)
        elif event.kind == "info":
            self.info |= event.value
        elif event.kind == "wrote":
            self.wrote, self.state = True, "trace written"
        elif event.kind == "error":
            self.error, self.error_ns = event.value, event.time_ns
        elif event.kind == "end":
            self.ended, self.state = True, "ended"

    def last_report(self) -> str:
        """What it said last, as part of a sentence."""
        return f"rank {self.number}'s last report was '{self.state}'"


@dataclass(slots=True)
class Rank(Reports):
    """A rank in a process of its own: its reports, and whether it lives."""

    process: int = field(kw_only=True)
    """Id of its process, and of the process group that holds its children too. It may come to be another's: where a
    profiler starts the process that trains, that one reports itself, too."""
    log: Path = field(kw_only=True)
    """Its output."""
    follower: Follower = field(kw_only=True)
    exitcode: int | None = None
    """Of its process, negative for a signal; known only when torch's launcher has ended."""
    last_sign: float = 0.0
    """`time.monotonic` when it last did something."""
    _signs: tuple[object, ...] = ()
    _output_end: int | None = None
    """Bytes of the log before the stack that was asked for."""

    def take(self, event: Event) -> None:
        if event.kind == "pid":
            self.process = event.value["pid"]
        Reports.take(self, event)

    def look_for_signs(self) -> None:
        """A heartbeat, a report or a line of output moves the files' times."""
        signs = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in (self.log, self.follower.path))
        if signs != self._signs:
            self._signs, self.last_sign = signs, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.last_sign

    @property
    def lives(self) -> bool:
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def starting(self) -> bool:
        """Whether it has not finished its warm-up yet."""
        return self.steps < 2

    def ask_for_stack(self) -> None:
        """Make it print where it is, if it still can."""
        self._output_end = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, STACK_SIGNAL)

    @property
    def stack(self) -> list[str]:
        """The innermost lines of the stack that it was asked for, innermost first."""
        printed = b"" if self._output_end is None else self.log.read_bytes()[self._output_end :]
        _, _, main_thread = printed.decode(errors="replace").partition("Current thread")
        return main_thread.splitlines()[1 : 1 + STACK_LINES]

    @property
    def waits_for_others(self) -> bool:
        """Whether its stack ends inside torch.distributed."""
        return "torch/distributed/" in "".join(self.stack[:1])

    @property
    def failed(self) -> bool:
        """It reported an error, or is gone without a trace: whatever the others do, the run cannot succeed."""
        return self.error is not None or not (self.wrote or self.ended or self.lives)

    def fate(self) -> str:
        """How it ended, as part of a sentence."""
        if self.error is not None:
            return f"failed ({self.error})"
        return "died" if self.exitcode is None else how_it_ended(self.exitcode)

    def last_lines(self) -> str:
        """What it said last, the end of its output and, if it was asked, where it is."""
        where = (
            ["it is now in (innermost first):", *(f"    {line.strip()}" for line in self.stack)] if self.stack else []
        )
        return "\n".join([last_lines(self.log, f"{self.last_report()}, its last lines", self._output_end), *where])


def how_it_ended(exitcode: int) -> str:
    """The exit code of a process, negative for a signal, as part of a sentence."""
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"


def last_lines(log: Path, title: str, end: int | None = None) -> str:
    """The last lines of ``log`` before byte ``end``, indented under a line that says where all of it is."""
    text = log.read_bytes()[:end] if log.exists() else b""
    lines = text.decode(errors="replace").splitlines()[-TAIL_LINES:]
    with contextlib.suppress(ValueError):
        log = log.relative_to(Path.cwd())
    return "\n".join([f"{title} ({log}):", *(f"    {line}" for line in lines or ["(no output)"])])


class RanksAtWork:
    """All ranks of this host that have started so far."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[Path, Rank] = {}

    @property
    def all(self) -> list[Rank]:
        return sorted(self._known.values(), key=lambda rank: rank.number)

    def update(self) -> list[tuple[Rank, Event]]:
        """Read what is new, from new ranks too."""
        for path in set(self._job.logs.glob("rank*.jsonl")) - set(self._known):
            self._meet(path)
        news = [(rank, event) for rank in self.all for event in rank.follower.new_events()]
        for rank, event in news:
            rank.take(event)
        for rank in self.all:
            rank.look_for_signs()
        return news

    def _meet(self, path: Path) -> None:
        first = next(iter(Follower(path).new_events()), None)
        if first is not None and first.kind == "pid" and first.value["token"] == self._job.token:
            number = int(path.stem.removeprefix("rank"))
            self._known[path] = Rank(
                number, process=first.value["pid"], log=path.with_suffix(".log"), follower=Follower(path)
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank and its children."""
        for rank in self.all:
            signal_group(rank.process, number)


def to_blame(ranks: Iterable[Rank]) -> Rank | None:
    """The rank that failed first, of those that failed; the others fell with it.

    A rank that a signal killed failed by itself, unless torch's launcher (SIGTERM) or NCCL (SIGABRT) sent it because
    of another. An exception is told by its time: peers notice a broken connection only afterwards.
    """

    def order(rank: Rank) -> tuple[int, int]:
        if rank.exitcode is not None and rank.exitcode < 0:
            fell = -rank.exitcode in (signal.SIGTERM, signal.SIGABRT)
            return (2 if fell else 0), 0
        return 1, rank.error_ns

    return min((rank for rank in ranks if rank.failed or rank.exitcode), key=order, default=None)
