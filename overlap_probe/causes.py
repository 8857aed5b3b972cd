"""Says why an all-gather was exposed, from what one rank's timeline shows.

The idea: a gather passes four gates before it starts (the host launches it, its stream is free, what it depends on has
ended, the device has room), and the gate that opened last is the reason. Each gate leaves a trace of its own: a small
queue means that the host came last, a start at the end of another stream's work a dependency, a start in the tail of a
kernel that fills the device a lack of SMs. What cannot be shown stays ``unknown`` (design, section 3, causes of
exposure). Waiting for a peer shows only where all ranks are compared: `ranks` adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_probe.collectives import Classified
from overlap_probe.intervals import Intervals, covered, union
from overlap_probe.results import Collective
from overlap_probe.tables import CPU_COLLECTIVE, I64, KERNEL, MEMCPY, NO_TIME, Trace
from overlap_probe.units import duration

SMALL_QUEUE_NS = 20_000
"""Up to this long a collective started as soon as it was launched (design, section 3)."""
LEAST_EXPOSED_NS = 10_000
LEAST_EXPOSED_SHARE = 0.10
AT_ONCE_NS = 10_000
"""What starts this soon after something else ended started right at its end."""
TAIL_SHARE = 0.35
"""The tail of a kernel: the last partial wave of its blocks, at most this share of its time."""


def needs_cause(c: Collective) -> bool:
    """Whether enough of it is exposed to ask why."""
    return c.op == "all_gather" and c.exposed_ns > max(LEAST_EXPOSED_NS, LEAST_EXPOSED_SHARE * c.time_ns)


def needs_sms(trace: Trace, row: int) -> bool:
    """Whether an activity needs SMs: a kernel does, so does a copy inside one device, one between devices does not."""
    activities = trace.activities
    source, target = activities.source[row], activities.target[row]
    inside = source == target if source >= 0 and target >= 0 else "DtoD" in trace.names[activities.name[row]]
    return bool(activities.kind[row] == KERNEL or (activities.kind[row] == MEMCPY and inside))


@dataclass(frozen=True)
class ComputeStreams:
    """The activities of the compute streams that are no collectives, in order of start."""

    trace: Trace
    rows: I64
    start_ns: I64
    end_ns: I64
    reach_ns: I64
    """Latest end among an activity and all before it."""
    compute: Intervals
    """When compute ran on them."""
    streams: frozenset[int]
    by_end: I64
    """Rows of all activities of the trace, in order of end."""

    @classmethod
    def of(cls, trace: Trace, classified: Classified, streams: I64) -> ComputeStreams:
        activities = trace.activities
        on_them = np.isin(activities.stream, streams)
        rows = np.flatnonzero(on_them & (classified.collective < 0))
        compute = on_them & classified.is_compute
        start, end = activities.start_ns[rows], activities.end_ns[rows]
        reach = np.maximum.accumulate(end) if len(end) else end
        times = union(activities.start_ns[compute], activities.end_ns[compute])
        by_end = np.argsort(activities.end_ns, kind="stable")
        return cls(trace, rows, start, end, reach, times, frozenset(streams.tolist()), by_end)

    def running_at(self, at_ns: int) -> list[int]:
        """Rows of the activities that began before a moment and had not ended."""
        found = []
        place = int(np.searchsorted(self.start_ns, at_ns, side="left")) - 1
        while place >= 0 and self.reach_ns[place] >= at_ns:
            if self.end_ns[place] >= at_ns:
                found.append(int(self.rows[place]))
            place -= 1
        return found

    def ended_between(self, start_ns: int, end_ns: int) -> I64:
        """Rows of the activities, of any stream, that ended between two moments, the latest first."""
        end = self.trace.activities.end_ns
        first = np.searchsorted(end, start_ns, side="left", sorter=self.by_end)
        last = np.searchsorted(end, end_ns, side="right", sorter=self.by_end)
        rows: I64 = self.by_end[first:last][::-1]
        return rows

    def amount(self, start_ns: int, end_ns: int) -> int:
        """How long compute ran between two moments, ns."""
        return int(covered(np.array([start_ns]), np.array([end_ns]), self.compute)[0]) if end_ns > start_ns else 0


def explain(
    trace: Trace,
    classified: Classified,
    compute_streams: I64,
    collectives: Sequence[Collective],
    window_of: I64,
) -> list[Collective]:
    """The same collectives with ``cause``, ``waited_for`` and ``evidence``; window_of: window of each activity."""
    work = ComputeStreams.of(trace, classified, compute_streams)
    began: dict[tuple[str, int, int], int] = {}
    for c in collectives:
        if c.op == "all_gather":
            began.setdefault(_pass(c, window_of, classified), c.start_ns)
    free: dict[int, int] = {}
    result = []
    for c in collectives:
        if c.op == "all_gather":
            began_ns = began[_pass(c, window_of, classified)]
            free_ns = max(free.get(stream, began_ns) for stream in c.streams)
            gather = _Gather(c, int(classified.first[c.index]), began_ns, free_ns, work)
            waited_for, why = gather.waited_for()
            cause, evidence = gather.cause(waited_for, why) if needs_cause(c) else (None, why)
            c = replace(c, cause=cause, waited_for=waited_for, evidence=evidence)
        free |= dict.fromkeys(c.streams, c.end_ns)
        result.append(c)
    return result


def _pass(c: Collective, window_of: I64, classified: Classified) -> tuple[str, int, int]:
    return c.phase, c.pass_index, int(window_of[classified.first[c.index]])


@dataclass(frozen=True)
class _Gather:
    """One all-gather among the compute of its rank."""

    c: Collective
    row: int
    """Row of its first activity."""
    began_ns: int
    """Start of the first gather of its pass."""
    free_ns: int
    """End of the collective before it on its streams; the start of its pass if there was none since."""
    work: ComputeStreams

    def cause(self, waited_for: str | None, why: str | None) -> tuple[str, str]:
        """The first cause of the design's table that the timeline shows, and the numbers that show it."""
        c, work = self.c, self.work
        shared = sorted(work.streams.intersection(c.streams))
        if shared:
            return "serial", f"it ran on stream {shared[0]}, on which compute runs too"
        if not work.amount(self.began_ns, c.start_ns):
            since = (
                f"since its pass began {duration(c.start_ns - self.began_ns)} earlier"
                if c.start_ns > self.began_ns
                else "before it"
            )
            return "first", f"no compute had run {since}: there was nothing to hide behind"
        if c.mechanism == "cpu" and c.launch_ns is not None and not work.amount(c.launch_ns, c.end_ns):
            waited = duration(c.end_ns - c.launch_ns)
            return (
                "serial",
                f"the host, which on a CPU is the compute stream, launched it and waited {waited} for its end",
            )
        late = self._late_launch()
        if late:
            return "late_launch", late
        if waited_for:
            return {"sm": "sm_contention"}.get(waited_for, waited_for), str(why)
        longer = self._longer_than_compute()
        return ("longer_than_compute", longer) if longer else ("unknown", self._what_is_known())

    def _late_launch(self) -> str | None:
        """Whether the host came last: it started when launched, and compute that could hide it had begun before."""
        c, compute = self.c, self.work.compute
        if c.launch_ns is None or not self._came_from_the_host():
            return None
        first = int(np.searchsorted(compute.end_ns, self.free_ns, side="right"))
        last = int(np.searchsorted(compute.start_ns, c.launch_ns, side="right")) - 1
        if last < first:
            return None
        begun, ended = max(int(compute.start_ns[first]), self.free_ns), int(compute.end_ns[last])
        if c.launch_ns - begun <= SMALL_QUEUE_NS:
            return None
        after = f" and {duration(c.launch_ns - ended)} after it had ended" if ended <= c.launch_ns else ""
        return (
            f"launched {duration(c.launch_ns - begun)} after the compute that could hide it had begun{after}, "
            f"and started {duration(c.start_ns - c.launch_ns)} after its launch: the host came late"
        )

    def _came_from_the_host(self) -> bool:
        """Whether nothing but the host was in its way: it started as soon as it was launched.

        A call that copies between devices takes as long as a small queue; the host is at it until the call returns.
        """
        c = self.c
        if c.launch_ns is None or c.queue_ns is None or c.start_ns - c.launch_ns > SMALL_QUEUE_NS + c.queue_ns:
            return False
        returned_ns = int(self.work.trace.activities.returned_ns[self.row])
        at_once = returned_ns != NO_TIME and c.start_ns - returned_ns <= SMALL_QUEUE_NS
        return c.queue_ns <= SMALL_QUEUE_NS or at_once

    def waited_for(self) -> tuple[str | None, str | None]:
        """What a gather with more than a small queue waited for on its own rank, and what shows it."""
        c, work = self.c, self.work
        if c.launch_ns is None or c.queue_ns is None or c.queue_ns <= SMALL_QUEUE_NS or work.streams & set(c.streams):
            return None, None
        if work.trace.activities.kind[self.row] == CPU_COLLECTIVE:
            return None, None
        ended = work.ended_between(c.start_ns - AT_ONCE_NS, c.start_ns)
        activities = work.trace.activities
        elsewhere = [int(row) for row in ended if activities.stream[row] not in c.streams]
        waited_on = [row for row in elsewhere if activities.launch_ns[row] <= c.launch_ns]
        own_business = [row for row in waited_on if activities.stream[row] not in work.streams]
        if own_business:
            return "dependency", self._right_after(own_business[0])
        # A kernel that was launched later cannot be what it was made to wait for: it took the SMs before it.
        took_over = [row for row in elsewhere if activities.launch_ns[row] > c.launch_ns]
        for row in [*work.running_at(c.start_ns), *took_over]:
            shown = self._lack_of_sms(row)
            if shown:
                return "sm", shown
        return ("dependency", self._right_after(waited_on[0])) if waited_on else (None, None)

    def _right_after(self, row: int) -> str:
        """What shows that it waited for an activity of another stream."""
        c, activities, names = self.c, self.work.trace.activities, self.work.trace.names
        waited, gap = c.start_ns - (c.launch_ns or 0), c.start_ns - int(activities.end_ns[row])
        return (
            f"launched {duration(waited)} before it started, its stream free for {duration(c.queue_ns or 0)}; "
            f"it started {duration(gap)} after {short(names[activities.name[row]])} "
            f"on stream {activities.stream[row]} ended"
        )

    def _lack_of_sms(self, row: int) -> str | None:
        """Whether it started only in the tail, or at the end, of a kernel that filled the device while it was ready."""
        trace, c = self.work.trace, self.c
        activities, device = trace.activities, trace.device
        start, end, blocks = (int(x[row]) for x in (activities.start_ns, activities.end_ns, activities.blocks))
        fills = activities.kind[row] == KERNEL and device.sms is not None and blocks >= device.sms
        if not fills or not needs_sms(trace, self.row):
            return None
        left_ns, ready_ns = end - c.start_ns, c.start_ns - (c.queue_ns or 0)
        if left_ns > TAIL_SHARE * (end - start) or min(c.start_ns, end) - max(start, ready_ns) <= SMALL_QUEUE_NS:
            return None
        mine, kernel = self._blocks(self.row), short(trace.names[activities.name[row]])
        what = f"its {mine}" if mine else "its copy inside the device"
        when = f"{duration(left_ns)} before that ended" if left_ns > 0 else f"{duration(-left_ns)} after its end"
        return (
            f"ready {duration(c.queue_ns or 0)} before it started; {what} waited for {kernel} "
            f"({self._blocks(row)} on {device.sms} SMs) and started {when}"
        )

    def _blocks(self, row: int) -> str:
        """A kernel's grid: ``24 blocks of 544 threads, 96 registers each``; empty for a copy."""
        blocks, threads, registers = (
            int(column[row])
            for column in (
                self.work.trace.activities.blocks,
                self.work.trace.activities.threads,
                self.work.trace.activities.registers,
            )
        )
        if blocks <= 0:
            return ""
        each = f", {registers} registers each" if registers > 0 else ""
        return f"{blocks} blocks" + (f" of {threads} threads{each}" if threads > 0 else "")

    def _longer_than_compute(self) -> str | None:
        """Whether it covers all the compute that began beside it, and more, and could not have started much earlier."""
        c, compute = self.c, self.work.compute
        # On a CPU it begins when the system gives its thread a core, which compute may be faster to get.
        since_ns = c.start_ns if c.mechanism != "cpu" or c.launch_ns is None else c.launch_ns
        first = int(np.searchsorted(compute.start_ns, since_ns - AT_ONCE_NS, side="left"))
        last = int(np.searchsorted(compute.start_ns, c.end_ns, side="left"))
        if last <= first or compute.end_ns[last - 1] >= c.end_ns:
            return None
        missed = self.work.amount(since_ns, int(compute.start_ns[first]))
        if missed > SMALL_QUEUE_NS and since_ns - self.free_ns > SMALL_QUEUE_NS:
            return None
        beside = self.work.amount(c.start_ns, c.end_ns)
        took = f"it took {duration(c.time_ns)}, all the compute beside it {duration(beside)}"
        return f"{took}: there was not enough to hide it"

    def _what_is_known(self) -> str:
        c = self.c
        if c.launch_ns is None:
            return "the trace does not say when it was launched"
        return (
            f"launched {duration(c.start_ns - c.launch_ns)} before it started, queued for {duration(c.queue_ns or 0)}"
        )


def short(name: str) -> str:
    """A kernel's name without its parameters."""
    head = name.removeprefix("void ").split("<")[0].split("(")[0] or name
    return head if len(head) <= 60 else head[:57] + "..."
