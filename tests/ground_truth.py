"""Why each all-gather of a simulated scenario was exposed, from the gates that it passed in the simulation.

The idea: a gather passes the gates host, stream, dependency, room and peers, and the simulation knows when each
opened. The gate that opened last is the reason; where none opened later than the stream, the gather was too long for
its compute. The border, where more than one answer is right:

- a gate opened last, but less than `CLEAR_NS` after the one before it, or another opened with it;
- a kernel's waiting for its peers is between `MINOR` and `MAJOR` of its exposed time; for copies, less than `MAJOR` of
  the exposed time would have been hidden without the wait;
- hardly any compute had run in the pass before (`first` ends there), or next to none that the host came too late for;
- by chance something else ended just before the gather started, which on a timeline is what a dependency looks like; or
  it came with its peers when a kernel was just in its tail, which is what a wait for SMs looks like.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from scenario_plans import US
from scenarios import Gather, Scenario

SMALL_NS = 20 * US
"""A queue up to this is small (the design's number)."""
CLEAR_NS = 2 * SMALL_NS
TOGETHER_NS = 3 * US
"""Peers that come this soon after a rank come with it."""
MINOR, MAJOR = 0.15, 0.65

HOST, STREAM, DEPENDENCY, ROOM, PEERS = "host", "stream", "dependency", "room", "peers"
CAUSE = {HOST: "late_launch", DEPENDENCY: "dependency", ROOM: "sm_contention", PEERS: "peer_wait"}
WAITED_FOR = {DEPENDENCY: "dependency", ROOM: "sm", PEERS: "peer"}


@dataclass(frozen=True)
class Truth:
    """Of one gather. Where an answer is not clear, it is only the nearest."""

    cause: str | None
    clear: bool
    waited_for: str | None
    wait_is_clear: bool
    why: str
    """The numbers, for a person who looks at a failure."""


def truths(scenario: Scenario) -> list[list[Truth]]:
    """Of each rank's gathers, in the order in which they were issued."""
    ranks = [_Rank(scenario, number) for number in range(scenario.plan.world)]
    return [[rank.truth(g) for g in rank.gathers] for rank in ranks]


class _Rank:
    """What happened on one rank."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        ran, rank = scenario.ran, scenario.ranks[number]
        self.scenario, self.ran, self.gathers = scenario, ran, rank.gathers
        self.compute_start = [ran[n].start_ns for n in rank.compute]
        self.compute_end = [ran[n].end_ns for n in rank.compute]
        self.ended = sorted(
            (ran[row.task].end_ns, ran[row.call].start_ns, str(scenario.tasks[row.task].queue)) for row in rank.rows
        )
        """End, launch and stream of everything that the device did."""
        self.began: dict[tuple[str, int], int] = {}
        """Start of the first gather of each pass."""
        for g in rank.gathers:
            start = ran[g.visible[0]].start_ns
            self.began[g.phase, g.number] = min(start, self.began.get((g.phase, g.number), start))

    def compute_ns(self, start_ns: int, end_ns: int) -> int:
        """How long compute ran between two moments; it is tasks of one stream, one after another."""
        first, last = bisect_right(self.compute_end, start_ns), bisect_left(self.compute_start, end_ns)
        return sum(min(self.compute_end[n], end_ns) - max(self.compute_start[n], start_ns) for n in range(first, last))

    def truth(self, g: Gather) -> Truth:
        gate, excess, clear = self.last_gate(g)
        clear &= gate not in (ROOM, PEERS) or not self.ended_by_chance(g)
        clear &= gate != PEERS or self.scenario.plan.mechanism == "copies" or not self.in_tail_by_chance(g)
        cause, sharp, why = self.cause(g, gate, excess)
        waited_for = None if self.scenario.plan.serial or gate is None else WAITED_FOR.get(gate)
        certain = cause in (None, "serial", "first")
        return Truth(cause, certain or (sharp and clear), waited_for, clear, f"{gate} {excess} after the others; {why}")

    def cause(self, g: Gather, gate: str | None, excess: int) -> tuple[str | None, bool, str]:
        """The cause, whether it is clear as far as that does not depend on the gates, and the numbers."""
        ran, plan = self.ran, self.scenario.plan
        spans = [(ran[n].start_ns, ran[n].end_ns) for n in g.visible]
        start, end, began = spans[0][0], spans[-1][1], self.began[g.phase, g.number]
        time = sum(b - a for a, b in spans)
        hidden = sum(self.compute_ns(a, b) for a, b in spans)
        exposed, before = time - hidden, self.compute_ns(began, start)
        # A kernel waits for its peers while it runs; copies wait before they start, which is a gate.
        met = ran[g.first].met_ns if plan.mechanism == "ring" else start
        waited = max(met - start - self.compute_ns(start, met), 0)
        why = f"exposed {exposed} of {time}, {waited} of it for peers"
        if exposed <= max(10 * US, 0.1 * time):
            return None, True, why
        if plan.serial:
            return "serial", True, why
        if not before:
            return "first", True, why
        sharp = before > SMALL_NS
        if waited >= MAJOR * exposed:
            return "peer_wait", sharp, why
        sharp &= waited <= MINOR * exposed
        if gate == HOST:
            late_for = self.compute_ns(max(began, ran[g.first].queue_free_ns), start)
            return CAUSE[gate], sharp and late_for > CLEAR_NS, why
        if gate == PEERS:
            gained = min(time, self.compute_ns(start - excess, end)) - hidden
            return CAUSE[gate], sharp and gained >= MAJOR * exposed, why
        if gate in CAUSE:
            return CAUSE[gate], sharp, why
        first, last = (ran[g.paired[0]], ran[g.paired[-1]]) if g.paired else (ran[g.first], ran[g.first])
        inside = start - SMALL_NS <= first.start_ns and last.end_ns <= end - SMALL_NS
        return "longer_than_compute", sharp and bool(g.paired) and inside, why

    def last_gate(self, g: Gather) -> tuple[str | None, int, bool]:
        """The gate that opened last, how long after the others, and whether that is clear; None: all at once."""
        opened = self.gates(g)
        order = sorted(opened, key=opened.__getitem__)
        for before, gate in reversed(list(pairwise(order))):
            if opened[gate] - opened[before] > SMALL_NS:
                later = set(order[order.index(gate) + 1 :])
                alone = later <= {PEERS} and opened[order[-1]] - opened[gate] <= TOGETHER_NS
                return gate, opened[order[-1]] - opened[before], alone and opened[gate] - opened[before] >= CLEAR_NS
        return None, 0, True

    def gates(self, g: Gather) -> dict[str, int]:
        """When each gate opened; a kernel's peers are no gate: it starts without them."""
        ran, plan, first, shown = self.ran, self.scenario.plan, self.ran[g.first], self.ran[g.visible[0]]
        opened = {HOST: ran[g.call].end_ns, STREAM: first.queue_free_ns}
        if g.waits_for:
            opened[DEPENDENCY] = max(ran[n].end_ns for n in g.waits_for)
        if plan.mechanism != "ring" and plan.world > 1:
            opened[PEERS] = first.met_ns
        if plan.mechanism in ("ring", "own_first") and shown.start_ns > shown.ready_ns:
            opened[ROOM] = shown.start_ns
        return opened

    def ended_by_chance(self, g: Gather) -> bool:
        """Whether something of another stream, launched earlier, ended just before it started."""
        start, launch = self.ran[g.visible[0]].start_ns, self.ran[g.call].start_ns
        near = self.ended[bisect_left(self.ended, (start - SMALL_NS,)) : bisect_right(self.ended, (start + 1,))]
        stream = str(self.scenario.tasks[g.first].queue)
        return any(launched <= launch and queue != stream for _, launched, queue in near)

    def in_tail_by_chance(self, g: Gather) -> bool:
        """Whether it started in the last third of a kernel."""
        start = self.ran[g.visible[0]].start_ns
        n = bisect_left(self.compute_start, start) - 1
        return n >= 0 and 0 <= self.compute_end[n] - start <= 0.35 * (self.compute_end[n] - self.compute_start[n])
