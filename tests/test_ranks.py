"""Ranks compared: waiting and transfer, clocks of several hosts, and which ranks a run has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from timelines import COMPUTE, Timeline, gathers

from overlap_probe import evaluate, ranks
from overlap_probe.errors import TraceError
from overlap_probe.overlap import measure
from overlap_probe.ranks import analyze_run, join, trace_files
from overlap_probe.render import render
from overlap_probe.results import Analysis, Collective, RunAnalysis


def world(size: int, **options: Any) -> list[Timeline]:
    return [Timeline(rank=rank, world_size=size, **options) for rank in range(size)]


def joined(timelines: list[Timeline]) -> list[Analysis]:
    return [m.analysis() for m in join([measure(t.trace()) for t in timelines])]


def of_each_rank(timelines: list[Timeline], unit: str = "a") -> list[Collective]:
    return [gathers(a)[unit] for a in joined(timelines)]


def waits(timelines: list[Timeline], unit: str = "a") -> list[float | None]:
    """Wait on each rank, us."""
    return [None if c.wait_ns is None else c.wait_ns / 1000 for c in of_each_rank(timelines, unit)]


# ---- kernels wait while they run


def test_the_shortest_duration_among_ranks_is_the_transfer_and_the_rest_is_waiting():
    early, late = world(2)
    early.gather("a", 100, 300)
    late.gather("a", 220, 300)
    assert [(c.transfer_ns, c.wait_ns) for c in of_each_rank([early, late])] == [(80_000, 120_000), (80_000, 0)]


def test_one_rank_alone_knows_of_no_waiting():
    (alone,) = world(2)[:1]
    alone.gather("a", 100, 300)
    assert waits([alone]) == [None]


def test_calls_are_the_same_by_their_place_in_the_process_group():
    # The second trace began a call later: its only call is the second one of the group.
    first, second = world(2)
    first.gather("a", 100, 110, group="fsdp", sequence=7)
    first.gather("b", 200, 300, group="fsdp", sequence=8)
    second.gather("b", 250, 300, group="fsdp", sequence=8)
    assert gathers(joined([first, second])[0])["a"].wait_ns is None
    assert waits([first, second], "b") == [50, 0]


def test_without_a_place_calls_are_the_same_by_their_order():
    first, second = world(2)
    for t, lengths in ((first, (50, 90)), (second, (70, 30))):
        for place, (unit, length) in enumerate(zip("ab", lengths, strict=True)):
            t.gather(unit, 1000 * place, 1000 * place + length)
    assert waits([first, second], "a") == [0, 20]
    assert waits([first, second], "b") == [60, 0]


def test_without_a_place_a_call_of_another_unit_is_not_the_same():
    # The second trace began a call earlier. a: 50 and 30 long; b: 30 on both.
    first, second = world(2)
    second.gather("z", 30, 70)
    first.gather("a", 100, 150)
    second.gather("a", 120, 150)
    for t in (first, second):
        t.gather("b", 200, 230)
    assert waits([first, second], "a") == [20, 0]
    assert waits([first, second], "b") == [0, 0]
    assert gathers(joined([first, second])[1])["z"].wait_ns is None


@pytest.mark.parametrize("units", [("{0}", None), ("rank0.{0}", "rank1.{0}")])
def test_ranks_that_label_nothing_alike_are_joined_by_order(units: tuple[str, str | None]):
    traces = world(2)
    for rank, (t, unit) in enumerate(zip(traces, units, strict=True)):
        for n, name in enumerate("ab"):
            start = 100 * n + 20 * rank
            t.gather(unit and unit.format(name), start, 100 * n + 50, launch=start - 5, phase="forward")
    found = joined(traces)
    assert [[c.wait_ns for c in a.whole.collectives] for a in found] == [[20_000] * 2, [0] * 2]


def test_the_order_is_counted_anew_in_each_window():
    # The second rank's trace lacks the first step's gather.
    first, second = world(2)
    for t in (first, second):
        for step in range(2):
            t.label(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 1000)
    first.gather("a", 100, 150)
    first.gather("b", 1100, 1200)
    second.gather("b", 1140, 1200)
    assert waits([first, second], "b") == [40, 0]
    assert gathers(joined([first, second])[0])["a"].wait_ns is None


def test_windows_are_the_same_by_their_name():
    # The first rank recorded one step more.
    first, second = world(2)
    for t, numbers in ((first, (0, 1)), (second, (1,))):
        for number in numbers:
            t.label(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 1000)
    first.gather("a", 100, 150)
    first.gather("b", 1100, 1200)
    second.gather("b", 1140, 1200)
    assert waits([first, second], "b") == [40, 0]


def test_kinds_are_counted_apart():
    first, second = world(2)
    first.reduce_scatter("a", 0, 20)
    first.gather("a", 100, 160)
    second.gather("a", 100, 150)
    second.reduce_scatter("a", 200, 220)
    assert waits([first, second]) == [10, 0]


# ---- groups


def test_a_group_of_some_ranks_needs_only_those():
    timelines = world(4, groups={"fsdp": (1, 3)})
    for t, length in zip(timelines, (10, 90, 10, 70), strict=True):
        if t.rank in (1, 3):
            t.gather("a", 100, 100 + length, group="fsdp")
    assert waits([timelines[1], timelines[3]]) == [20, 0]


def test_a_collective_is_not_compared_while_ranks_of_its_group_are_missing():
    timelines = world(4, groups={"fsdp": (0, 1, 2, 3)})
    for t in timelines:
        t.gather("a", 100, 150 + 10 * t.rank, group="fsdp")
    assert waits(timelines[:3]) == [None, None, None]
    assert waits(timelines) == [0, 10, 20, 30]


def test_without_groups_all_ranks_of_the_world_are_needed():
    timelines = world(3)
    for t in timelines:
        t.gather("a", 100, 150)
    assert waits(timelines[:2]) == [None, None]


def test_groups_of_one_name_on_other_ranks_are_other_groups():
    # Two shards of a mesh, each of which calls its group "1".
    timelines = world(4)
    for t, length in zip(timelines, (50, 90, 20, 30), strict=True):
        t.groups = {"1": (0, 1) if t.rank < 2 else (2, 3)}
        t.gather("a", 100, 100 + length, group="1", sequence=0)
    assert waits(timelines) == [0, 40, 0, 10]


# ---- copies wait in their queue


def by_copies(t: Timeline, launch: float, start: float, end: float, unit: str = "a", **options: Any) -> None:
    t.gather(unit, 0, 0, launch=launch, copies=[(start, end)], **options)


def test_a_gather_of_copies_waits_in_its_queue():
    early, late = world(2)
    by_copies(early, 100, 400, 446)
    by_copies(late, 390, 400, 446)
    # The first was ready 290 us before the other rank came; of its queue of 300 that was the wait.
    assert waits([early, late]) == [290, 0]
    assert [c.transfer_ns for c in of_each_rank([early, late])] == [46_000, 46_000]


def test_a_clock_that_is_ahead_does_not_look_like_a_late_rank():
    early, late = world(2)
    late.ahead_ns = 700_000
    by_copies(early, 100, 400, 446)
    by_copies(late, 390, 400, 446)
    assert waits([early, late]) == [290, 0]
    early, late = world(2)
    early.ahead_ns = 700_000
    by_copies(early, 100, 400, 446)
    by_copies(late, 390, 400, 446)
    assert waits([early, late]) == [290, 0]


def test_a_clock_is_aligned_on_most_collectives_and_not_on_one_that_ended_apart():
    early, late = world(2)
    late.ahead_ns = 700_000
    by_copies(early, 100, 400, 446)
    by_copies(late, 390, 400, 446)
    for n, apart in enumerate((0, 0, 400), start=1):
        early.reduce_scatter("x", 1000 * n, 1000 * n + 50)
        late.reduce_scatter("x", 1000 * n, 1000 * n + 50 + apart)
    assert waits([early, late]) == [290, 0]


def test_the_clocks_of_hosts_are_aligned_through_whatever_group_joins_them():
    # Two hosts of two ranks; the clock of the second host (ranks 2, 3) is 700 us ahead. Groups: the ranks of a host,
    # in which most collectives run, and the pairs across hosts, with one collective each.
    timelines = world(4)
    for t in timelines:
        t.ahead_ns = 700_000 if t.rank >= 2 else 0
        host, across = ((0, 1) if t.rank < 2 else (2, 3)), ((0, 2) if t.rank % 2 == 0 else (1, 3))
        names = f"host{host}", f"across{across}"
        t.groups = dict(zip(names, (host, across), strict=True))
        for n in range(5):
            t.reduce_scatter("x", 1000 * n, 1000 * n + 50, group=names[0], sequence=n)
        # Across hosts, ranks 0 and 1 come at 6100, ranks 2 and 3 at 6390.
        by_copies(t, 6100 if t.rank < 2 else 6390, 6400, 6446, group=names[1], sequence=0)
    assert waits(timelines) == [290, 290, 0, 0]


def test_the_clocks_of_ranks_that_share_no_group_are_compared_through_a_third():
    # 0 and 1 are one group, 1 and 2 another; the clocks of 1 and 2 are ahead of that of 0, and not by the same.
    timelines = world(3, groups={"low": (0, 1), "high": (1, 2)})
    for t, ahead_ns in zip(timelines, (0, 700_000, 1_000_000), strict=True):
        t.ahead_ns = ahead_ns
    for t in timelines[:2]:
        t.gather("x", 1000, 1050, group="low")
    by_copies(timelines[1], 100, 400, 446, group="high")
    by_copies(timelines[2], 390, 400, 446, group="high")
    assert waits(timelines[1:]) == [290, 0]
    assert [gathers(a)["a"].wait_ns for a in joined(timelines)[1:]] == [290_000, 0]


def test_a_rank_did_not_wait_for_a_peer_that_came_after_it_had_started():
    # Copies of a peer's shard need no call of the peer's: the first rank started at 400, the other came at 500.
    first, other = world(2)
    for n in range(1, 4):
        for t in (first, other):
            t.reduce_scatter("x", 1000 * n, 1000 * n + 50)
    by_copies(first, 100, 400, 446)
    by_copies(other, 500, 510, 556)
    a, b = of_each_rank([first, other])
    assert (a.wait_ns, b.wait_ns) == (0, 0)
    assert a.waited_for != "peer"


def test_a_queue_that_no_peer_caused_is_no_wait():
    first, second = world(2)
    for t in (first, second):
        by_copies(t, 100, 400, 446)
    assert waits([first, second]) == [0, 0]


def test_a_rank_waits_at_most_as_long_as_its_queue():
    # The stream of the first rank was busy until 395.
    early, late = world(2)
    early.pointwise(0, 395, stream=20)
    by_copies(early, 100, 400, 446)
    by_copies(late, 399, 400, 446)
    assert waits([early, late]) == [4, 0]


def test_clocks_that_are_aligned_to_a_few_us_do_not_make_a_wait_longer_than_the_queue():
    # By the aligned clocks the peer came 5 us after the copies had started; the ends of the others say so.
    early, late = world(2)
    for n in range(1, 4):
        for t in (early, late):
            t.reduce_scatter("x", 1000 * n, 1000 * n + 50)
    by_copies(early, 100, 400, 446)
    by_copies(late, 405, 406, 451)
    assert waits([early, late]) == [300, 0]


# ---- peer_wait


def started(rank: int, gemm: tuple[float, float] = (20, 40)) -> Timeline:
    """A rank whose root was gathered and which has computed, so that the next gather is not the first."""
    t = Timeline(rank=rank, world_size=2)
    t.gather("<root>", 0, 10, launch=-5)
    t.gemm(*gemm)
    return t


def test_peer_wait_is_exposed_time_spent_waiting_for_a_later_rank():
    early, late = started(0), started(1)
    early.gather("a", 100, 300)
    late.gather("a", 220, 300)
    a, b = of_each_rank([early, late])
    assert (a.cause, a.exposed_ns) == ("peer_wait", 200_000)
    assert b.cause != "peer_wait"


def test_a_wait_that_compute_hides_is_not_why_a_gather_is_exposed():
    # The wait, 100-220, is hidden; only the transfer, 220-300, is exposed.
    early, late = started(0), started(1)
    early.gather("a", 100, 300)
    early.gemm(100, 220)
    late.gather("a", 220, 300)
    c = of_each_rank([early, late])[0]
    assert (c.wait_ns, c.exposed_ns) == (120_000, 80_000)
    assert c.cause != "peer_wait"


def test_less_waiting_than_half_of_what_is_exposed_is_not_the_cause():
    early, late = started(0), started(1)
    early.gather("a", 100, 300)
    late.gather("a", 180, 300)
    assert of_each_rank([early, late])[0].cause != "peer_wait"


@pytest.mark.parametrize(("stream", "cause"), [(COMPUTE, "serial"), (20, "peer_wait")])
def test_serial_comes_before_peer_wait(stream, cause):
    early, late = started(0), started(1)
    early.gather("a", 100, 300, stream=stream)
    late.gather("a", 220, 300)
    assert of_each_rank([early, late])[0].cause == cause


def test_first_comes_before_peer_wait():
    early, late = world(2)
    early.gather("a", 100, 300)
    late.gather("a", 220, 300)
    for t in (early, late):
        t.gemm(400, 500)
    assert of_each_rank([early, late])[0].cause == "first"


def test_a_gather_of_copies_that_a_peer_held_up_beyond_its_compute_is_peer_wait():
    # Ready at 110, under a GEMM of 100-350; the peer came at 390. At 110-156 it would have been hidden.
    early, late = started(0), started(1)
    early.gemm(100, 350)
    by_copies(early, 110, 400, 446)
    by_copies(late, 390, 400, 446)
    c = of_each_rank([early, late])[0]
    assert (c.cause, c.waited_for) == ("peer_wait", "peer")


def test_a_gather_of_copies_whose_queue_was_mostly_something_else_is_not_peer_wait():
    # Ready at 110 like above, and held up by a GEMM until 399; the peer came at 170: 60 of a queue of 290.
    early, late = started(0), started(1)
    early.gemm(100, 399)
    by_copies(early, 110, 400, 446)
    by_copies(late, 170, 400, 446)
    c = of_each_rank([early, late])[0]
    assert c.wait_ns == 60_000
    assert c.cause != "peer_wait"
    assert c.waited_for != "peer"


def test_a_gather_of_copies_that_would_have_been_exposed_anyway_is_not_peer_wait():
    # As above, but nothing computed at 110-156 either.
    early, late = started(0), started(1)
    by_copies(early, 110, 400, 446)
    by_copies(late, 390, 400, 446)
    c = of_each_rank([early, late])[0]
    assert c.cause != "peer_wait"
    assert c.waited_for == "peer"


def test_a_hidden_gather_of_copies_that_waited_for_a_peer_says_so_without_a_cause():
    early, late = started(0), started(1)
    early.gemm(100, 500)
    by_copies(early, 110, 400, 446)
    by_copies(late, 390, 400, 446)
    c = of_each_rank([early, late])[0]
    assert (c.cause, c.waited_for) == (None, "peer")


# ---- which ranks a run has


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Makes a folder of traces: what the reader finds in a file is the timeline of that name."""

    def make(**timelines: Timeline) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        for name, t in timelines.items():
            (run / f"{name}.json").write_text("{}")
            t.path = str(run / f"{name}.json")

        def read(path: Path | str) -> list[Any]:
            return [timelines[Path(path).stem].trace()]

        monkeypatch.setattr(ranks, "read_traces", read)
        return run

    return make


def gathering(rank: int | None, world_size: int | None = None, length: float = 50) -> Timeline:
    t = Timeline(rank=rank, world_size=world_size)
    t.gather("a", 100, 100 + length)
    return t


def test_a_folder_gives_its_ranks_in_order_and_joined(folder):
    run = analyze_run(folder(a=gathering(1, 2), b=gathering(0, 2, length=80)))
    assert [a.rank for a in run.ranks] == [0, 1]
    assert run.problems == ()
    assert [gathers(a)["a"].wait_ns for a in run.ranks] == [30_000, 0]


def test_a_folder_that_lacks_ranks_of_its_world_is_a_problem_that_names_them(folder):
    run = analyze_run(folder(a=gathering(0, 4), b=gathering(2, 4)))
    (problem,) = run.problems
    assert "1, 3" in problem
    assert "4" in problem


def test_files_named_one_by_one_are_judged_as_they_are(folder):
    where = folder(a=gathering(0, 4), b=gathering(2, 4))
    run = analyze_run([where / "a.json", where / "b.json"])
    assert run.problems == ()
    assert len(run.ranks) == 2


def test_a_gap_between_the_ranks_of_a_folder_is_a_problem_even_if_the_world_is_not_known(folder):
    assert analyze_run(folder(a=gathering(0), b=gathering(2))).problems


def test_two_files_of_one_rank_are_both_degraded_and_both_named(folder):
    run = analyze_run(folder(new=gathering(0, 1), old=gathering(0, 1)))
    assert [a.quality for a in run.ranks] == ["degraded", "degraded"]
    for a in run.ranks:
        assert "new.json" in a.notes[-1]
        assert "old.json" in a.notes[-1]


def test_a_second_file_of_a_rank_in_a_folder_may_be_an_old_one_so_no_check_passes(folder):
    where = folder(new=gathering(0, 1), old=gathering(0, 1))
    run = analyze_run(where)
    (problem,) = run.problems
    assert "rank 0 is in 2 traces: new.json, old.json; remove" in problem
    assert evaluate(run, ["exposed >= 0"]).status == "inconclusive"
    one_by_one = analyze_run([where / "new.json", where / "old.json"])
    assert one_by_one.problems == ()
    assert evaluate(one_by_one, ["exposed >= 0"]).status == "pass"


def test_two_ranks_in_one_file_are_no_second_file(folder, monkeypatch):
    where = folder(a=gathering(0, 1))
    twice = [replace(trace, path=str(where / "a.json")) for trace in [gathering(0, 1).trace()] * 2]
    monkeypatch.setattr(ranks, "read_traces", lambda path: twice)
    assert analyze_run(where).problems == ()


def test_two_files_that_do_not_say_their_rank_are_not_one_rank(folder):
    run = analyze_run(folder(a=gathering(None), b=gathering(None)))
    assert [a.quality for a in run.ranks] == ["ok", "ok"]


def test_our_own_results_beside_the_traces_are_not_read(folder):
    where = folder(a=gathering(0, 1))
    for name in ("result.json", "baseline.json", "notes.txt", ".hidden.json"):
        (where / name).write_text("{}")
    assert len(analyze_run(where).ranks) == 1


@pytest.mark.parametrize(
    "text",
    [
        render(RunAnalysis(()), None, "json"),
        '{\n "kind": "overlap_probe baseline",\n "schema": 1',
        '{\n "kind": "overlap_probe diff",\n "schema": 1',
    ],
    ids=["result", "baseline", "diff"],
)
def test_our_own_results_are_known_by_what_they_hold_under_any_name(folder, text):
    where = folder(a=gathering(0, 1))
    (where / "numbers.json").write_text(text)
    assert trace_files(where) == [where / "a.json"]


def test_a_link_to_itself_is_a_clear_error(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(TraceError, match=r"loop\.json: cannot be read"):
        analyze_run(tmp_path / "loop.json")


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(TraceError, match="is no path"):
        analyze_run("")


def test_a_folder_without_traces_is_an_error_that_says_what_was_expected(tmp_path):
    with pytest.raises(TraceError, match=r"no trace.*\.json"):
        analyze_run(tmp_path)


def test_a_trace_that_is_named_twice_is_refused() -> None:
    trace = Path(__file__).parent / "data/linear8_ring_prefetch_rank0.json.gz"
    with pytest.raises(TraceError, match="named twice"):
        analyze_run([trace, trace.parent / ".." / "data" / trace.name])
