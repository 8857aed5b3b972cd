"""Comparing two runs: what a change is, what is noise, what fails; and the baseline that is kept for it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import call
from render_runs import US, analysis, collective, starved, step

import overlap_probe as op
from overlap_probe.baseline import Samples, load_samples, read_baseline, samples_of, write_baseline
from overlap_probe.checks import METRICS
from overlap_probe.diff import Change, Diff, diff
from overlap_probe.errors import CheckSyntaxError, TraceError
from overlap_probe.fail_on import judge, parse_change
from overlap_probe.render.changes import render, render_json, unit_lines, worst_ranks
from overlap_probe.results import RunAnalysis, Verdict

DATA = Path(__file__).parent / "data"
LATE = [DATA / f"fsdp2_llama8_b4s1024_rank{rank}.json.gz" for rank in (0, 1)]
RING = [DATA / f"linear8_ring_prefetch_rank{rank}.json.gz" for rank in (0, 1)]

GOOD = (0, 200, 200, 200)
"""Four gathers of 200 us, the first exposed: 600 of 800 us are hidden, 75 %; 200 us are exposed; 3 of 3 overlap."""
BAD = (0, 200, 0, 0)
"""The same with two more exposed: 200 of 800 us hidden, 25 %; 600 us exposed; 1 of 3 overlaps."""


def run(*ranks: list[tuple[int, ...]], **changes: Any) -> RunAnalysis:
    """A run whose ranks have these hidden times, in us, in each of their steps."""
    made = [
        analysis(rank, {f"step{at}": step(9000 * at, *hidden) for at, hidden in enumerate(steps)})
        for rank, steps in enumerate(ranks)
    ]
    return replace(RunAnalysis(tuple(made)), **changes)


def compared(base: RunAnalysis, new: RunAnalysis) -> Diff:
    return diff(samples_of(base), samples_of(new))


def verdict(base: RunAnalysis, new: RunAnalysis, *fail_on: str) -> Verdict:
    return judge(compared(base, new), [parse_change(text) for text in fail_on])


def change(found: Diff, scope: str, metric: str, rank: str = "0") -> Change:
    (only,) = [c for c in found.changes if (c.scope, c.metric, c.rank) == (scope, metric, rank)]
    return only


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A good run and a bad one, as `overlap_probe run` leaves them, without their traces."""
    for name, made in {"good": run([GOOD] * 3, [GOOD] * 3), "bad": run([GOOD] * 3, [BAD] * 3)}.items():
        (tmp_path / name).mkdir()
        op.write_report(made, tmp_path / name / "result.json")
    return tmp_path / "good", tmp_path / "bad"


# -- what a change is


def test_a_change_is_the_difference_of_medians_in_the_unit_of_the_metric() -> None:
    found = compared(run([GOOD, GOOD, GOOD]), run([BAD, BAD, BAD]))
    values = {
        c.metric: (c.base.median, c.new.median, c.value) for c in found.changes if c.scope == "forward.all_gather"
    }
    assert values == {
        "overlaps": (3, 1, -2),
        "time": (800 * US, 800 * US, 0),
        "hidden": (75, 25, -50),
        "exposed": (200 * US, 600 * US, 400 * US),
        "stalled": (200 * US, 600 * US, 400 * US),
    }
    assert [c.gain for c in found.changes if c.metric in ("hidden", "exposed")][:2] == [-50, -400 * US]


def test_the_median_is_over_windows_and_an_outlier_does_not_move_it() -> None:
    found = change(compared(run([GOOD, BAD, GOOD]), run([GOOD, GOOD, GOOD])), "forward.all_gather", "hidden")
    assert found.base.windows == {"step0": 75, "step1": 25, "step2": 75}
    assert (found.base.median, found.value) == (75, 0)


@pytest.mark.parametrize(
    ("base", "new", "noise", "beyond"),
    [
        # Hidden shares 75, 75 and 25, 25: nothing varies, everything changed.
        ([GOOD, GOOD], [BAD, BAD], 0, True),
        # 75, 25 and 25, 25: the base varies by 50 points, and one of its windows is like the new ones.
        ([GOOD, BAD], [BAD, BAD], 50, False),
        # 75, 75 and 25, 50 (400 of 800 us): the new run varies by 25 points, all of it below the base.
        ([GOOD, GOOD], [BAD, (0, 200, 200, 0)], 25, True),
        ([GOOD], [BAD], 0, None),
    ],
)
def test_beyond_the_noise_means_that_the_windows_are_apart(
    base: list[tuple[int, ...]], new: list[tuple[int, ...]], noise: float, beyond: bool | None
) -> None:
    found = change(compared(run(base), run(new)), "forward.all_gather", "hidden")
    assert (found.noise, found.beyond_noise) == (noise, beyond)


def test_each_rank_is_compared_with_itself_and_the_table_shows_the_worst() -> None:
    found = compared(run([GOOD] * 2, [GOOD] * 2), run([GOOD] * 2, [BAD] * 2))
    assert [change(found, "forward.all_gather", "hidden", rank).value for rank in ("0", "1")] == [0, -50]
    assert [c.rank for c in worst_ranks(found.changes) if c.metric == "hidden"] == ["1"]


def test_one_rank_on_each_side_is_compared_whatever_it_is_called() -> None:
    only = RunAnalysis((analysis(5, {"step0": step(0, *BAD)}),))
    found = compared(run([GOOD]), only)
    assert change(found, "forward.all_gather", "hidden", "5").value == -50
    assert not found.problems


def test_units_that_cost_more_are_named_with_the_new_cause() -> None:
    found = compared(run([GOOD] * 2), run([BAD] * 2))
    assert unit_lines(found.units) == [
        "forward.all_gather of layers.2: exposed 0 ns -> 200.0 us, now late_launch (rank 0)",
        "forward.all_gather of layers.3: exposed 0 ns -> 200.0 us, now late_launch (rank 0)",
    ]


def test_collectives_without_a_unit_are_told_apart_by_their_place() -> None:
    def unnamed(*hidden: int) -> RunAnalysis:
        gathers = [collective(i, 400 * i, 200, h, unit=None, phase="unknown") for i, h in enumerate(hidden)]
        return RunAnalysis((analysis(0, {"step0": gathers}),))

    found = compared(unnamed(200, 200), unnamed(200, 50))
    assert unit_lines(found.units) == ["all_gather of number 2: exposed 0 ns -> 150.0 us (rank 0)"]


@pytest.mark.parametrize("traces", [LATE, RING], ids=["with phases", "without phases"])
def test_a_sample_is_what_a_check_sees(traces: list[Path]) -> None:
    measured = op.analyze_run(traces)
    for samples, rank in zip(samples_of(measured).ranks, measured.ranks, strict=True):
        assert len(samples.scopes) >= 2
        for scope, some in samples.scopes.items():
            for metric in METRICS:
                zero = "0" if metric == "overlaps" else "0ns"
                findings = op.evaluate(rank, [f"{scope}.{metric} >= {zero}"]).findings
                seen = {f.window: f.value for f in findings if f.value is not None}
                own = "overlaps" if metric == "overlaps" else f"{metric}_ns"
                assert seen == {s.window: getattr(s, own) for s in some if getattr(s, own) is not None}


# -- what fails


@pytest.mark.parametrize(
    ("expression", "status"),
    [
        ("hidden < -5%", "fail"),  # -50 points
        ("hidden < -50%", "pass"),
        ("hidden <= -50%", "fail"),
        ("exposed < +500us", "fail"),  # 400 us more
        ("hidden < -300us", "fail"),  # 600 -> 200 us
        ("hidden < - 500us", "pass"),
        ("forward.all_gather.exposed > 300us", "fail"),  # 200 -> 600 us
        ("exposed > 0.5ms", "pass"),
        ("overlaps < 0", "fail"),
        ("communication.stalled > 0", "fail"),
        ("slowdown > 1%", "inconclusive"),  # not known in runs made by hand
        ("all_to_all.hidden < 0%", "inconclusive"),
        ("backward.all_gather.hidden < -5%", "inconclusive"),
    ],
)
def test_an_expression_is_held_against_the_change(expression: str, status: str) -> None:
    assert verdict(run([GOOD] * 3), run([BAD] * 3), expression).status == status


def test_the_worst_rank_decides_and_its_costliest_units_are_the_evidence() -> None:
    made = verdict(run([GOOD] * 2, [GOOD] * 2), run([GOOD] * 2, [BAD] * 2), "hidden < -5%")
    assert made.status == "fail"
    assert [(f.rank, f.status, f.value, f.limit) for f in made.findings] == [(0, "pass", 0, -5), (1, "fail", -50, -5)]
    assert made.findings[1].message == (
        "hidden of forward.all_gather: 75.0 % -> 25.0 %, a change of -50.0 % (noise 0.0 %)"
    )
    assert made.findings[1].evidence == (
        "forward.all_gather of layers.2: exposed 0 ns -> 200.0 us, now late_launch",
        "forward.all_gather of layers.3: exposed 0 ns -> 200.0 us, now late_launch",
    )


def test_a_change_within_the_noise_is_no_failure_and_no_pass() -> None:
    made = verdict(run([GOOD, GOOD, BAD]), run([BAD, BAD, GOOD]), "hidden < -5%")
    assert made.status == "inconclusive"
    assert "may be noise" in made.findings[0].message


@pytest.mark.parametrize(
    ("base", "new", "expression", "status"),
    [
        # Both misses starved: at best 600 of 800 us are hidden, and 3 of 3 overlap, as in the base.
        (run([GOOD] * 2), starved(BAD, 2, 3), "hidden < -5%", "inconclusive"),
        (run([GOOD] * 2), starved(BAD, 2, 3), "overlaps < 0", "inconclusive"),
        (run([GOOD] * 2), starved(BAD, 2, 3), "exposed > 100us", "inconclusive"),
        (run([GOOD] * 2), starved(BAD, 2, 3), "communication.stalled > 100us", "inconclusive"),
        # One of them: at best 400 of 800 us, 25 points below the base; 2 overlaps, one less; 200 us more are exposed.
        (run([GOOD] * 2), starved(BAD, 2), "hidden < -5%", "fail"),
        (run([GOOD] * 2), starved(BAD, 2), "hidden < -25%", "inconclusive"),
        (run([GOOD] * 2), starved(BAD, 2), "overlaps < -1", "inconclusive"),
        (run([GOOD] * 2), starved(BAD, 2), "exposed > 100us", "fail"),
        # A good run is as good for what it cannot be blamed for; a base may have been better than it seems.
        (run([BAD] * 2), starved(BAD, 2), "hidden < -5%", "pass"),
        (starved(BAD, 2, 3), run([BAD] * 2), "hidden < -5%", "inconclusive"),
        (starved(BAD, 2, 3), run([GOOD] * 2), "hidden < -5%", "pass"),
    ],
)
def test_a_change_that_a_busy_machine_may_have_made_cannot_be_told(
    base: RunAnalysis, new: RunAnalysis, expression: str, status: str, tmp_path: Path
) -> None:
    made = verdict(base, new, expression)
    assert made.status == status
    assert ("too busy to say" in made.findings[0].message) == (status == "inconclusive")
    write_baseline(samples_of(base), tmp_path / "b.json")
    kept = diff(read_baseline(tmp_path / "b.json"), samples_of(new))
    assert judge(kept, [parse_change(expression)]).status == status


def test_a_run_on_a_busy_machine_is_no_baseline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    op.write_report(starved(BAD, 2, 3), tmp_path / "busy.json")
    assert call(capsys, "baseline", "save", tmp_path / "busy.json", "-o", tmp_path / "b.json").code == 3
    assert not (tmp_path / "b.json").exists()


def test_what_a_run_lacks_is_inconclusive() -> None:
    good = run([GOOD], [GOOD])
    lacking = {
        "rank 1 is in the base run only": run([GOOD]),
        "new: r: no trace of rank 2 of 3": run([GOOD], [GOOD], problems=("r: no trace of rank 2 of 3",)),
        "records are missing from the new trace: 3 dropped": RunAnalysis(
            (good.ranks[0], replace(good.ranks[1], incomplete=("3 dropped",)))
        ),
    }
    for problem, new in lacking.items():
        made = verdict(good, new, "hidden < -5%")
        assert made.status == "inconclusive"
        assert problem in [f.message for f in made.findings]
    others = RunAnalysis((replace(good.ranks[0], rank=7), replace(good.ranks[1], rank=8)))
    assert verdict(good, others, "hidden < -5%").status == "inconclusive"


def test_without_phases_all_gathers_are_meant_as_in_a_check() -> None:
    ring = op.analyze_run(RING)
    made = verdict(ring, ring, "hidden < -5%", "overlaps < 0")
    assert made.status == "pass"
    assert made.findings[0].message.startswith("hidden of all_gather: ")
    assert worst_ranks(compared(ring, ring).changes)[0].scope == "all_gather"


def test_labels_that_got_lost_are_not_compared_with_something_else() -> None:
    unlabelled = [replace(c, phase="unknown", unit=None) for c in step(0, *GOOD)]
    made = verdict(run([GOOD]), RunAnalysis((analysis(0, {"step0": unlabelled}),)), "hidden < -5%")
    assert made.status == "inconclusive"
    assert made.findings[0].message == "hidden of forward.all_gather is not known in the new run"


@pytest.mark.parametrize(
    "expression",
    ["hidden", "hidden < x", "hidden < -x", "nothing < -5%", "overlaps < auto", "overlaps < -1us", "hidden < -5", ""],
)
def test_an_expression_that_does_not_parse_names_the_option(expression: str) -> None:
    with pytest.raises(CheckSyntaxError, match=r"^--fail-on '.*': .*e\.g\. "):
        parse_change(expression)


def test_nothing_to_fail_on_is_no_verdict() -> None:
    with pytest.raises(CheckSyntaxError):
        verdict(run([GOOD]), run([GOOD]))


# -- how it is shown


def test_runs_made_differently_say_so() -> None:
    def record(**changes: Any) -> dict[str, Any]:
        return {"versions": {"torch": "2.12", "python": "3.11"}, "seconds": 3, "world_size": 2} | changes

    base = run([GOOD], record=record())
    new = run([GOOD], record=record(versions={"torch": "2.13", "python": "3.11"}, seconds=4, world_size=4))
    assert compared(base, new).notes == ("world_size was 2, is 4", "versions.torch was 2.12, is 2.13")


def test_the_text_shows_change_noise_and_verdict_and_the_json_every_rank() -> None:
    base, new = run([GOOD] * 2, [GOOD] * 2), run([GOOD] * 2, [BAD] * 2)
    found, made = compared(base, new), verdict(base, new, "hidden < -5%")
    lines = render(found, made, windows=True).splitlines()
    row = next(line for line in lines if line.split()[:2] == ["forward.all_gather", "hidden"])
    assert row.split(maxsplit=12) == [
        *("forward.all_gather", "hidden", "1", "75.0", "%", "25.0", "%", "-50.0", "%", "0.0", "%", "worse"),
        "75.0 %, 75.0 % -> 25.0 %, 25.0 %",
    ]
    assert lines[-1] == (
        "FAIL  hidden < -5%: rank 1: hidden of forward.all_gather: 75.0 % -> 25.0 %, a change of -50.0 % (noise 0.0 %) "
        "(1 of 2 findings)"
    )
    written = json.loads(render_json(found, made))
    assert written["verdict"]["status"] == "fail"
    (row,) = [
        c for c in written["changes"] if (c["rank"], c["scope"], c["metric"]) == ("1", "forward.all_gather", "hidden")
    ]
    assert row == {
        **{"rank": "1", "scope": "forward.all_gather", "metric": "hidden", "unit": "%"},
        "base": {"median": 75.0, "windows": {"step0": 75.0, "step1": 75.0}},
        "new": {"median": 25.0, "windows": {"step0": 25.0, "step1": 25.0}},
        **{"change": -50.0, "noise": 0.0, "beyond_noise": True},
    }


# -- baselines and what else can be compared


def test_a_baseline_is_small_and_reads_back_as_the_same_samples(tmp_path: Path) -> None:
    samples = replace(samples_of(op.analyze_run(LATE)), fail_on=("hidden < -5%",), made={"world_size": 2})
    write_baseline(samples, tmp_path / "baseline.json")
    assert (tmp_path / "baseline.json").stat().st_size < 12_000
    without_units = replace(samples, ranks=tuple(replace(rank, units={}) for rank in samples.ranks))
    assert read_baseline(tmp_path / "baseline.json") == without_units
    assert load_samples(tmp_path / "baseline.json") == without_units


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema": 1}', '{"kind": "overlap_probe baseline", "schema": 2, "ranks": []}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(TraceError, match=r"b\.json: .*baseline"):
        read_baseline(tmp_path / "b.json")


def test_results_traces_folders_and_baselines_give_the_same_samples(tmp_path: Path) -> None:
    for trace in RING:
        (tmp_path / trace.name).write_bytes(trace.read_bytes())
    from_traces = load_samples(tmp_path)
    op.write_report(op.analyze_run(tmp_path), tmp_path / "result.json")
    assert load_samples(tmp_path / "result.json") == load_samples(tmp_path) == from_traces
    assert isinstance(from_traces, Samples)
    one = load_samples(RING[0])
    assert one.ranks[0].scopes == from_traces.ranks[0].scopes


def test_a_folders_result_is_used_unless_a_trace_is_newer_or_another_reading_is_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "rank0.json.gz"
    trace.write_bytes(RING[0].read_bytes())
    other = run([GOOD])
    op.write_report(other, tmp_path / "result.json")
    os.utime(tmp_path / "result.json", ns=(2 * 10**18, 2 * 10**18))
    assert load_samples(tmp_path) == samples_of(other)
    assert load_samples(tmp_path, op.Options(min_overlap_ns=5)) == samples_of(op.analyze_run(tmp_path))
    os.utime(trace, ns=(3 * 10**18, 3 * 10**18))
    assert load_samples(tmp_path) == samples_of(op.analyze_run(tmp_path))
    trace.unlink()
    assert load_samples(tmp_path) == samples_of(other)


# -- the commands


def test_exit_codes_of_diff(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, bad = folders
    empty = tmp_path / "empty.json"
    op.write_report(RunAnalysis((analysis(0, {"step0": []}),)), empty)
    for arguments, code in {
        (good, bad): 0,
        (good, bad, "--fail-on", "hidden < -5%"): 1,
        (good, good, "--fail-on", "hidden < -5%"): 0,
        (bad, good, "--fail-on", "hidden < -5%"): 0,
        (good, bad, "--fail-on", "slowdown > 0"): 3,
        (good, bad, "--fail-on", "slowdown > 0", "--fail-on", "overlaps < 0"): 1,
        (empty, empty): 3,
        (good, tmp_path / "nowhere"): 2,
        (good,): 2,
    }.items():
        assert call(capsys, "diff", *arguments).code == code, arguments


def test_the_last_line_says_what_agrees_only_where_there_are_several(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = folders
    both = ("--fail-on", "hidden < -5%", "--fail-on", "overlaps < 0")
    # Two checks on two ranks are four findings; of the bad run rank 1 fails both, rank 0 is as it was.
    for arguments, end in {
        (good, bad): "nothing was asked to fail on; try --fail-on 'hidden < -5%'",
        (good, good, *both): "(all 4 checks hold; this is the tightest)",
        (good, bad, *both): "(2 of 4 findings)",
    }.items():
        assert call(capsys, "diff", *arguments).out.splitlines()[-1].endswith(end), arguments


def test_a_mistake_in_an_expression_is_found_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "diff", "nowhere", "nowhere", "--fail-on", "hiden < -5%")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("overlap_probe: --fail-on 'hiden < -5%': no metric 'hiden'")


def test_diff_writes_what_it_is_asked_for(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# before\n")
    outputs = ("--json", tmp_path / "d.json", "--junit", tmp_path / "d.xml", "--github-summary", summary)
    done = call(capsys, "diff", *folders, "--windows", "--fail-on", "hidden < -5%", *outputs)
    assert done.out.splitlines()[-1].startswith("FAIL  hidden < -5%: rank 1: ")
    assert json.loads((tmp_path / "d.json").read_text())["verdict"]["status"] == "fail"
    suite = ElementTree.parse(tmp_path / "d.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert summary.read_text().startswith("# before\n### overlap_probe: what changed\n\n```text\nscope ")
    assert "FAIL  hidden < -5%" in summary.read_text()


def test_a_baseline_is_saved_and_holds_later_runs_to_what_it_says(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad = folders
    file = tmp_path / "baseline.json"
    saved = call(capsys, "baseline", "save", good, "-o", file)
    assert saved.code == 0
    assert saved.out == f"wrote {file}: fails on overlaps < 0, hidden < -5%\n"
    assert call(capsys, "baseline", "check", good, file).code == 0
    assert call(capsys, "baseline", "check", bad, file).code == 1
    assert call(capsys, "baseline", "check", bad, file, "--fail-on", "hidden < -60%").code == 0
    assert call(capsys, "baseline", "save", good, "-o", file, "--fail-on", "hidden < -60%").code == 0
    assert call(capsys, "baseline", "check", bad, file).code == 0
    assert call(capsys, "diff", file, bad, "--fail-on", "overlaps < 0").code == 1


def test_no_baseline_is_a_mistake_and_not_a_pass(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, _ = folders
    done = call(capsys, "baseline", "check", good, tmp_path / "baseline.json")
    assert done.code == 2
    assert (
        "there is no such baseline; save one of a good run with `overlap_probe baseline save RUN -o FILE`" in done.err
    )
    done = call(capsys, "baseline", "check", good, good / "result.json")
    assert (done.code, "no baseline; " in done.err) == (2, True)
    assert call(capsys, "baseline", "check", good).code == 2


def test_a_run_that_cannot_answer_is_no_baseline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    op.write_report(run([GOOD], [GOOD], problems=("r: no trace of rank 2 of 3",)), tmp_path / "lacking.json")
    op.write_report(run([GOOD], [GOOD]), tmp_path / "good.json")
    for arguments, code in {
        ("lacking.json",): 3,
        ("good.json", "--fail-on", "all_reduce.hidden < -5%"): 3,
        ("good.json", "--fail-on", "hidden >= 0%"): 1,
        ("good.json", "--fail-on", "hidden"): 2,
    }.items():
        done = call(capsys, "baseline", "save", tmp_path / arguments[0], *arguments[1:], "-o", tmp_path / "b.json")
        assert (done.code, done.err.count("\n")) == (code, 1), done.err
        assert not (tmp_path / "b.json").exists()
