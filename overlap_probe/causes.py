"""Says why an all-gather was exposed, from what one rank's timeline shows.

The idea: a gather passes four gates before it starts (the host launches it, its stream is free, what it depends on has
ended, the device has room), and the gate that opened last is the reason. Each gate leaves a trace of its own: a small
queue means that the host came last, a start at the end of another stream's work a dependency, a start in the tail of a
kernel that fills the device a lack of SMs. What cannot be shown stays ``unknown`` (design, section 3, causes of
exposure). Waiting for a peer shows only where all ranks are compared: `ranks` adds it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlap_probe.collectives import Classified
from overlap_probe.compute_streams import ComputeStreams
from overlap_probe.passes import Pass
from overlap_probe.results import Collective
from overlap_probe.steady import steady_waits
from overlap_probe.tables import I64, NO_TIME, Trace
from overlap_probe.units import duration
from overlap_probe.waits import AT_ONCE_NS, SMALL_QUEUE_NS, Way, short

LEAST_EXPOSED_NS = 10_000
LEAST_EXPOSED_SHARE = 0.10


def needs_cause(c: Collective) -> bool:
    """Whether enough of it is exposed to ask why."""
    return c.op == "all_gather" and c.exposed_ns > max(LEAST_EXPOSED_NS, LEAST_EXPOSED_SHARE * c.time_ns)


def explain(
    trace: Trace,
    classified: Classified,
    compute_streams: I64,
    collectives: Sequence[Collective],
    leads: set[int],
) -> list[Collective]:
    """The same collectives with ``cause``, ``waited_for`` and ``evidence``.

    leads: indices of the gathers that the first compute of their pass waits for.
    """
    work = ComputeStreams.of(trace, classified, compute_streams)
    passes: dict[Pass, list[Collective]] = defaultdict(list)
    for c in collectives:
        if c.op == "all_gather":
            passes[c.phase, c.pass_index].append(c)
    steady = steady_waits(passes.values(), work)
    free: dict[int, int] = {}
    result = []
    for c in collectives:
        if c.op == "all_gather":
            began_ns = passes[c.phase, c.pass_index][0].start_ns
            free_ns = max(free.get(stream, began_ns) for stream in c.streams)
            way = Way(c, int(classified.first[c.index]), steady.get(c.index), work)
            waited_for, why = way.waited_for()
            gather = _Gather(c, began_ns, free_ns, c.index in leads, way)
            cause, evidence = gather.cause(waited_for, why) if needs_cause(c) else (None, why)
            c = replace(c, cause=cause, waited_for=waited_for, evidence=evidence)
        free |= dict.fromkeys(c.streams, c.end_ns)
        result.append(c)
    return result


@dataclass(frozen=True)
class _Gather:
    """One all-gather among the compute of its rank."""

    c: Collective
    began_ns: int
    """Start of the first gather of its pass."""
    free_ns: int
    """End of the collective before it on its streams; the start of its pass if there was none since."""
    leads: bool
    """It is the root's or the first child's, for which the first compute of the pass has to wait."""
    way: Way

    @property
    def work(self) -> ComputeStreams:
        return self.way.work

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
            return "first", f"no compute had run {since}: there was nothing to hide behind{self._compute_came_late()}"
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
            return {"sm": "sm_contention", "dependency": "dependency"}[waited_for], str(why)
        if longer := self._longer_than_compute():
            return "longer_than_compute", longer
        if shortly := self.way.waited_shortly():
            return "dependency", shortly
        held_up = self.way.held_up()
        return ("sm_contention", held_up) if held_up else ("unknown", self._what_is_known())

    def _compute_came_late(self) -> str:
        """That a gather for which the first compute need not wait ran beside none of it because of the host."""
        c, activities, names = self.c, self.work.trace.activities, self.work.trace.names
        row = None if self.leads else self.work.next_compute(c.start_ns)
        if row is None or activities.launch_ns[row] <= c.start_ns:
            return ""
        launch, kernel = int(activities.launch_ns[row]), short(names[activities.name[row]])
        late = f"{duration(launch - c.end_ns)} after it had ended" if launch > c.end_ns else "after it had begun"
        return f"; the next compute, {kernel}, was launched {late}: the host came late"

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
        returned_ns = int(self.work.trace.activities.returned_ns[self.way.row])
        at_once = returned_ns != NO_TIME and c.start_ns - returned_ns <= SMALL_QUEUE_NS
        return c.queue_ns <= SMALL_QUEUE_NS or at_once

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
