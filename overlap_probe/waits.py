"""Finds out what an all-gather waited for on its own rank, between its launch and its start.

The idea: what waits says so by when it starts: right at the end of something on another stream, or in the tail of a
kernel that fills the device. A gather has its way to go before it starts: what its runtime packs for it under the same
label, what stands before it on its stream. Whatever held one of these up held up the gather, as far as it would have
run beside compute without that wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overlap_probe.compute_streams import ComputeStreams
from overlap_probe.results import Collective
from overlap_probe.room import blocks_of, fills_device, needs_sms, tail_share, waves_of
from overlap_probe.tables import CPU_COLLECTIVE, NO_TIME
from overlap_probe.units import duration

SMALL_QUEUE_NS = 20_000
"""Up to this long a collective started as soon as it was launched (design, section 3)."""
AT_ONCE_NS = 10_000
"""What starts this soon after something else ended started right at its end."""
COPIES_AT_ONCE_NS = 2 * SMALL_QUEUE_NS
"""The same for copies that are ready: before the first of them, ranks tell each other that they have come."""


def at_once_ns(c: Collective) -> int:
    """How soon after its last gate a collective starts at most."""
    return COPIES_AT_ONCE_NS if c.mechanism == "copy_engine" else AT_ONCE_NS


@dataclass(frozen=True)
class Way:
    """The way of one all-gather from its launch to its start."""

    c: Collective
    row: int
    """Row of its first activity."""
    steady: int | None
    """Row of the compute that it waited for as all gathers of its pass (`steady`)."""
    work: ComputeStreams

    def waited_for(self) -> tuple[str | None, str | None]:
        """What a gather with more than a small queue waited for on its own rank, and what shows it."""
        c, work = self.c, self.work
        if c.launch_ns is None or c.queue_ns is None or c.queue_ns <= SMALL_QUEUE_NS or work.streams & set(c.streams):
            return None, None
        activities = work.trace.activities
        if activities.kind[self.row] == CPU_COLLECTIVE:
            return None, None
        waited_on = self._ended_elsewhere(c.start_ns - AT_ONCE_NS)
        own_business = [row for row in waited_on if activities.stream[row] not in work.streams]
        if own_business:
            return "dependency", self._right_after(own_business[0])
        shown = self._lack_of_sms(self.row, c.start_ns - c.queue_ns)
        if shown:
            return "sm", shown
        waited_on = waited_on if self.steady is None else [self.steady]
        return ("dependency", self._right_after(waited_on[0])) if waited_on else (None, None)

    def waited_shortly(self) -> str | None:
        """Whether it did wait for compute, as all of its pass, though its stream had not been free for long."""
        free_ns = self.c.start_ns - (self.c.queue_ns or 0)
        ended_last = self.steady is not None and self.work.trace.activities.end_ns[self.steady] > free_ns
        return self._right_after(self.steady) if self.steady is not None and ended_last else None

    def held_up(self) -> str | None:
        """Whether what it came right behind on its stream had waited for SMs, and it would else have been hidden."""
        c, work = self.c, self.work
        activities = work.trace.activities
        if c.launch_ns is None or c.queue_ns is None or activities.kind[self.row] == CPU_COLLECTIVE:
            return None
        row, before = self.row, int(work.before[self.row])
        if before < 0:
            return None
        free_ns = int(activities.end_ns[before])
        soon_ns = SMALL_QUEUE_NS if work.packed_for(row) is None else at_once_ns(c)
        if c.start_ns - free_ns > soon_ns or self._ended_elsewhere(free_ns):
            return None
        while before >= 0 and c.launch_ns < activities.start_ns[before]:
            row, before = before, int(work.before[before])
            start, ready = int(activities.start_ns[row]), max(work.ready_ns(row), c.launch_ns)
            if start - ready > SMALL_QUEUE_NS:
                shown = self._lack_of_sms(row, ready)
                hidden = min(c.time_ns, work.amount(c.start_ns - (start - ready), c.end_ns))
                if not shown or 2 * (hidden - c.hidden_ns) <= c.exposed_ns:
                    return None
                return f"it came right behind {self._name(row)} on stream {activities.stream[row]}: that was {shown}"
        return None

    def _ended_elsewhere(self, since_ns: int) -> list[int]:
        """Rows of what it may have been made to wait for: on other streams, launched before it, ended just before.

        Of compute that was launched before its packing, only the packing may have had to wait. A collective may wait
        for one on another stream after it was packed: those of one group run one after another.
        """
        c, work, activities = self.c, self.work, self.work.trace.activities
        packed = work.packed_for(self.row)
        earliest = NO_TIME if packed is None else int(activities.launch_ns[packed])
        ended = work.ended_between(since_ns, c.start_ns).tolist()
        others = [row for row in ended if activities.stream[row] not in c.streams]
        others = [row for row in others if activities.launch_ns[row] <= (c.launch_ns or 0)]
        return [r for r in others if activities.launch_ns[r] >= earliest or activities.stream[r] not in work.streams]

    def _right_after(self, row: int) -> str:
        """What shows that it waited for an activity of another stream."""
        c, activities = self.c, self.work.trace.activities
        waited, gap = c.start_ns - (c.launch_ns or 0), c.start_ns - int(activities.end_ns[row])
        alike = ", as all gathers of its pass did after theirs" if row == self.steady else ""
        return (
            f"launched {duration(waited)} before it started, its stream free for {duration(c.queue_ns or 0)}; "
            f"it started {duration(gap)} after {self._name(row)} on stream {activities.stream[row]} ended{alike}"
        )

    def _lack_of_sms(self, row: int, ready_ns: int) -> str | None:
        """Whether an activity started only in the tail, or at the end, of a kernel that filled the device."""
        trace, activities = self.work.trace, self.work.trace.activities
        started = int(activities.start_ns[row])
        if not needs_sms(trace, row):
            return None
        for kernel in self._may_have_had_the_sms(row):
            start, end = int(activities.start_ns[kernel]), int(activities.end_ns[kernel])
            left_ns, beside_ns = end - started, min(started, end) - max(start, ready_ns)
            in_tail = left_ns <= tail_share(trace, kernel) * (end - start)
            if not fills_device(trace, kernel) or not in_tail or beside_ns <= SMALL_QUEUE_NS:
                continue
            mine, waves = blocks_of(trace, row), waves_of(trace, kernel)
            what = f"its {mine}" if mine else "its copy inside the device"
            when = f"{duration(left_ns)} before that ended" if left_ns > 0 else f"{duration(-left_ns)} after its end"
            full = f"{blocks_of(trace, kernel)} on {trace.device.sms} SMs" + (f", {waves}" if waves else "")
            return (
                f"ready {duration(started - ready_ns)} before it started; {what} waited for {self._name(kernel)} "
                f"({full}) and started {when}"
            )
        return None

    def _may_have_had_the_sms(self, row: int) -> Iterator[int]:
        """Rows of the kernels of compute that an activity started beside, then of those that ended just before.

        What was launched before it and ended just before may be what it was made to wait for; what was launched later
        cannot be.
        """
        activities, started = self.work.trace.activities, int(self.work.trace.activities.start_ns[row])
        yield from self.work.running_at(started)
        for other in self.work.ended_between(started - AT_ONCE_NS, started).tolist():
            if (
                activities.stream[other] != activities.stream[row]
                and activities.launch_ns[other] > activities.launch_ns[row]
            ):
                yield other

    def _name(self, row: int) -> str:
        return short(self.work.trace.names[self.work.trace.activities.name[row]])


def short(name: str) -> str:
    """A kernel's name without its parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = plain.split("<")[0].split("(")[0].strip() or name
    return head if len(head) <= 60 else head[:57] + "..."
