"""Named causes against the truth: over random scenarios on simulated devices, of which the reason is known.

What counts as a border case, where more than one cause is right, is said in `ground_truth`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ground_truth import Truth, truths
from scenario_plans import plan
from scenario_traces import kineto, traces
from scenarios import Scenario, build

from overlap_probe.overlap import Measured, measure
from overlap_probe.ranks import analyze_run, join
from overlap_probe.readers import read_trace
from overlap_probe.results import Collective
from overlap_probe.tables import NO_TIME

CHUNK = 250
CHUNKS = range(4)
CAUSES = (
    *("serial", "first", "peer_wait", "late_launch", "sm_contention", "dependency", "longer_than_compute"),
    *("unknown", None),
)


def gathers(measured: Measured) -> list[Collective]:
    """In the order in which they were issued."""
    return sorted((c for c in measured.collectives if c.op == "all_gather"), key=lambda c: c.launch_ns or 0)


def judged(scenario: Scenario) -> Iterator[tuple[Collective, Truth]]:
    """Every gather of a scenario, as the analysis sees it, and the truth."""
    ranks = join([measure(trace) for trace in traces(scenario)])
    for measured, known in zip(ranks, truths(scenario), strict=True):
        yield from zip(gathers(measured), known, strict=True)


@cache
def judged_chunk(chunk: int) -> list[tuple[int, Collective, Truth]]:
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    return [(seed, c, truth) for seed in seeds for c, truth in judged(build(plan(seed)))]


def matrix(pairs: Counter[tuple[str | None, str | None]], names: tuple[str | None, ...]) -> str:
    """True causes down, named causes across."""
    lines = [" " * 20 + "".join(f"{str(name)[:11]:>12}" for name in names)]
    for true in names:
        lines.append(f"{true!s:20}" + "".join(f"{pairs[true, named]:12}" for named in names))
    return "\n".join(lines)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_named_cause_is_the_true_one(chunk: int) -> None:
    clear = [(seed, c, truth) for seed, c, truth in judged_chunk(chunk) if truth.clear]
    exposed = [case for case in clear if case[2].cause is not None]
    pairs = Counter((truth.cause, c.cause) for _, c, truth in clear)
    wrong = [(seed, c, truth) for seed, c, truth in clear if c.cause not in (truth.cause, "unknown")]
    shown = matrix(pairs, CAUSES) + "".join(
        f"\nseed {s}, {c.phase} {c.unit}: {t.cause}, named {c.cause} ({c.evidence}); {t.why}" for s, c, t in wrong
    )
    right = sum(c.cause == truth.cause for _, c, truth in exposed)
    assert right >= 0.98 * len(exposed), shown
    assert not wrong, shown
    assert len(exposed) > 0.7 * sum(c.cause is not None for _, c, _ in judged_chunk(chunk)), "too many border cases"
    few = [cause for cause in CAUSES if cause != "unknown" and sum(t.cause == cause for _, _, t in clear) < 20]
    assert not few, f"hardly any clear case of {few}"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_a_gather_waited_for_is_what_it_waited_for(chunk: int) -> None:
    clear = [(seed, c, truth) for seed, c, truth in judged_chunk(chunk) if truth.wait_is_clear]
    pairs = Counter((truth.waited_for, c.waited_for) for _, c, truth in clear)
    right = sum(count for (true, named), count in pairs.items() if true == named)
    assert right >= 0.98 * len(clear), matrix(pairs, ("sm", "peer", "dependency", None))


def test_without_launch_times_nothing_is_said_that_needs_them() -> None:
    """Then the gates of a gather cannot be told apart, and no cause that rests on one may be named."""
    named = Counter[str | None]()
    for seed in range(60):
        scenario = build(plan(seed))
        for trace in traces(scenario):
            unknown = replace(trace.activities, launch_ns=np.full(len(trace.activities), NO_TIME))
            named.update(c.cause for c in gathers(measure(replace(trace, activities=unknown))))
    assert named["unknown"] > 100
    assert not set(named) & {"late_launch", "sm_contention", "dependency", "peer_wait"}


def test_a_rank_read_alone_never_blames_its_peers() -> None:
    for seed in range(60):
        for trace in traces(build(plan(seed))):
            assert not {"peer_wait"} & {c.cause for c in measure(trace).collectives}


@pytest.mark.parametrize("seed", [3, 8, 20])
def test_clocks_that_disagree_change_nothing(seed: int) -> None:
    """The same scenario, its hosts' clocks 50 ms apart."""
    made = replace(plan(seed), world=3)
    made = replace(made, gap_ns=made.gap_ns[:1] * 3)
    results = []
    for clock_ns in ((0, 0, 0), (0, 50_000_000, -50_000_000)):
        ranks = join([measure(trace) for trace in traces(build(replace(made, clock_ns=clock_ns)))])
        results.append([(c.unit, c.cause, c.waited_for, c.wait_ns) for m in ranks for c in gathers(m)])
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", [0, 1, 3, 6, 12, 39, 53, 64])
def test_a_scenario_read_from_json_is_the_same(seed: int, tmp_path: Path) -> None:
    """The Trace that is made directly is the one that the reader makes of what Kineto would have written."""
    scenario = build(plan(seed))
    for rank, direct in enumerate(traces(scenario)):
        path = tmp_path / f"rank{rank}.json"
        path.write_text(kineto(scenario, rank))
        trace = read_trace(path)
        trace.validate()
        assert (trace.rank, trace.world_size, trace.device.sms, trace.notes) == (rank, scenario.plan.world, 132, ())
        assert measure(trace).collectives == measure(direct).collectives
    run = analyze_run(tmp_path)
    expected = join([measure(trace) for trace in traces(scenario)])
    assert [a.whole.collectives for a in run.ranks] == [m.analysis().whole.collectives for m in expected]
