"""Check expressions: their grammar, what each holds against, and when the answer is that there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from timelines import Timeline, forward

from overlap_probe.checks import AtLeast, evaluate, parse_check, parse_duration_ns
from overlap_probe.errors import CheckSyntaxError
from overlap_probe.options import Options
from overlap_probe.overlap import analyze
from overlap_probe.results import Analysis, RunAnalysis, Verdict

# ---- grammar


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("overlaps >= auto", ("forward", "all_gather", "overlaps", ">=", None, "")),
        ("overlaps>=3", ("forward", "all_gather", "overlaps", ">=", 3, "")),
        ("hidden >= 80%", ("forward", "all_gather", "hidden", ">=", 80, "%")),
        ("hidden > 62.5%", ("forward", "all_gather", "hidden", ">", 62.5, "%")),
        ("exposed <= 120us", ("forward", "all_gather", "exposed", "<=", 120_000, "ns")),
        ("stalled < 2ms", ("forward", "all_gather", "stalled", "<", 2_000_000, "ns")),
        ("slowdown <= 1.5ms", ("forward", "all_gather", "slowdown", "<=", 1_500_000, "ns")),
        ("net_hidden >= 1s", ("forward", "all_gather", "net_hidden", ">=", 1_000_000_000, "ns")),
        ("exposed == 0", ("forward", "all_gather", "exposed", "==", 0, "ns")),
        ("backward.overlaps >= auto", ("backward", "all_gather", "overlaps", ">=", None, "")),
        ("backward.all_gather.hidden >= 50%", ("backward", "all_gather", "hidden", ">=", 50, "%")),
        ("backward.reduce_scatter.overlaps >= auto", ("backward", "reduce_scatter", "overlaps", ">=", None, "")),
        ("all_gather.hidden != 5ns", (None, "all_gather", "hidden", "!=", 5, "ns")),
        ("communication.exposed <= 10%", (None, "communication", "exposed", "<=", 10, "%")),
        ("all_reduce.overlaps >= 1", (None, "all_reduce", "overlaps", ">=", 1, "")),
    ],
)
def test_a_check_is_metric_operator_value_with_a_scope_in_front(text, parsed):
    c = parse_check(text)
    assert (c.phase, c.op, c.metric, c.compare, c.limit, c.unit) == parsed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "METRIC OP VALUE"),
        ("overlaps", "METRIC OP VALUE"),
        ("overlaps >=", "expected"),
        ("overlaps => 3", "METRIC OP VALUE"),
        ("overlaps = 3", "METRIC OP VALUE"),
        ("overlap >= 3", "no metric 'overlap'"),
        ("overlaps >= many", "no value 'many'"),
        ("overlaps >= 80%", "count"),
        ("overlaps >= 3us", "count"),
        ("hidden >= auto", "only overlaps"),
        ("hidden >= 80", "80%.*80us"),
        ("hidden >= 80min", "no value"),
        ("hidden >= -5us", "no value"),
        ("exposed <= " + "9" * 400 + "s", "up to 15 digits"),
        ("overlaps >= " + "9" * 400, "up to 15 digits"),
        ("hidden >= nan", "no value"),
        ("hidden >= 500%", "at most 100%"),
        ("exposed <= 100.1%", "at most 100%"),
        ("net_hidden >= 101%", "at most 100%"),
        ("sideways.hidden >= 1us", "no scope 'sideways'"),
        ("all_gather.forward.hidden >= 1us", "no scope 'forward'"),
        ("all_gather.overlaps >= auto", "needs a phase"),
        ("all_reduce.overlaps >= auto", "all_gather and reduce_scatter"),
        ("hidden >= 80% and exposed <= 1us", "METRIC OP VALUE"),
    ],
)
def test_what_is_no_check_is_refused_with_what_was_expected(text, named):
    with pytest.raises(CheckSyntaxError, match=named):
        parse_check(text)


@pytest.mark.parametrize("thousandths", [1001, 1003, 2047, 4350])
@pytest.mark.parametrize(("unit", "size"), [("us", 1_000), ("ms", 1_000_000)])
def test_a_duration_with_decimals_is_exact(thousandths, unit, size):
    text = f"{thousandths / 1000:.3f}{unit}"
    assert parse_check(f"exposed <= {text}").limit == thousandths * size // 1000


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("5us", 5_000), ("2ms", 2_000_000), ("1.5us", 1_500), ("7ns", 7)]
)
def test_an_options_duration_is_in_ns(text, expected):
    assert parse_duration_ns("--min-overlap", text) == expected


@pytest.mark.parametrize("text", ["5", "5%", "us", "", "5 min", "-1us"])
def test_an_option_that_is_no_duration_is_named(text):
    with pytest.raises(CheckSyntaxError, match="--min-overlap"):
        parse_duration_ns("--min-overlap", text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rules": ["all_gather"]}, "--rule"),
        ({"rules": ["gather=x"]}, "--rule"),
        ({"rules": ["all_gather=("]}, "--rule"),
        ({"rules": ["all_gather="]}, "--rule"),
        ({"window": "("}, "--window"),
        ({"unit_labels": ["("]}, "--unit-label"),
    ],
)
def test_an_option_of_the_analysis_that_does_not_parse_is_named(options, named):
    with pytest.raises(CheckSyntaxError, match=named):
        Options.parse(**options)


@pytest.mark.parametrize("text", ["4", "0/5", "6/5", "a/b", "4/0", "", "\u0664/\u0665", "9" * 5000 + "/" + "9" * 5000])
def test_at_least_must_be_k_of_n(text):
    with pytest.raises(CheckSyntaxError, match="K/N"):
        AtLeast.parse(text)


def test_a_syntax_error_is_raised_before_anything_is_judged():
    with pytest.raises(CheckSyntaxError):
        evaluate(RunAnalysis(()), ["overlaps >= auto", "nonsense"])


def test_no_check_at_all_is_refused():
    with pytest.raises(CheckSyntaxError):
        evaluate(analyze(Timeline().trace()), [])


# ---- one window


def judged(t: Timeline | Analysis | RunAnalysis, *checks: str, **options: Any) -> Verdict:
    return evaluate(analyze(t.trace()) if isinstance(t, Timeline) else t, checks, **options)


def status(t: Timeline | Analysis | RunAnalysis, *checks: str, **options: Any) -> str:
    return judged(t, *checks, **options).status


def three_children(**options: Any) -> Timeline:
    """A forward of root and a, b, c: 4 x 20 us; unless exposed, b and c are hidden: 40 of 80."""
    t = Timeline()
    forward(t, 100, ["a", "b", "c"], **options)
    return t


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("overlaps >= auto", "pass"),
        ("overlaps == auto", "pass"),
        ("overlaps > auto", "fail"),
        ("overlaps >= 2", "pass"),
        ("overlaps < 2", "fail"),
        ("overlaps != 2", "fail"),
        ("hidden >= 50%", "pass"),
        ("hidden > 50%", "fail"),
        ("hidden >= 50.1%", "fail"),
        ("hidden == 40us", "pass"),
        ("hidden >= 0.04ms", "pass"),
        ("hidden >= 40001ns", "fail"),
        ("exposed <= 40us", "pass"),
        ("exposed < 40us", "fail"),
        ("exposed <= 50%", "pass"),
        ("stalled <= 40us", "pass"),
        ("stalled <= 39us", "fail"),
        ("all_gather.hidden >= 40us", "pass"),
        ("forward.all_gather.hidden >= 40us", "pass"),
        ("communication.hidden >= 40us", "pass"),
    ],
)
def test_each_metric_and_operator_is_held_against_the_number(check, expected):
    assert status(three_children(), check) == expected


def test_a_missed_overlap_fails_auto_and_says_found_and_wanted():
    verdict = judged(three_children(exposed=["c"]), "overlaps >= auto")
    (finding,) = verdict.findings
    assert (verdict.status, finding.status, finding.value, finding.limit) == ("fail", "fail", 1, 2)
    assert any("of c:" in line for line in finding.evidence)
    assert not any("of b:" in line for line in finding.evidence)


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        # One GEMM alone took 100 and 100, the one beside the gather of 50 us took 130: slowdown 30, net 20.
        ("slowdown <= 30us", "pass"),
        ("slowdown < 30us", "fail"),
        ("net_hidden >= 20us", "pass"),
        ("net_hidden >= 40%", "pass"),
        ("net_hidden >= 21us", "fail"),
    ],
)
def test_slowdown_and_net_hidden_are_held_against_the_number(check, expected):
    t = Timeline()
    t.gemm(0, 100)
    t.gemm(100, 200)
    t.gather("a", 250, 300)
    t.gemm(200, 330)
    assert status(t, check) == expected


@pytest.mark.parametrize("check", ["slowdown <= 30us", "net_hidden >= 0", "slowdown >= 0"])
def test_a_slowdown_that_is_not_known_is_inconclusive(check):
    t = Timeline()
    t.gather("a", 250, 300)
    t.gemm(200, 330)
    assert status(t, check) == "inconclusive"


# ---- scopes


def both_phases() -> Timeline:
    """Forward: 40 of 80 us hidden. Backward: gathers c, b, a of 20 us, b and a hidden; reduce-scatters exposed."""
    t = Timeline()
    end = forward(t, 100, ["a", "b", "c"])
    end = forward(t, end + 100, ["c", "b", "a"], phase="backward")
    for place, unit in enumerate("cba"):
        t.reduce_scatter(unit, end + 100 + 50 * place, end + 130 + 50 * place)
    return t


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("overlaps >= auto", "pass"),
        ("backward.overlaps >= auto", "pass"),
        ("backward.reduce_scatter.overlaps >= auto", "fail"),
        ("backward.reduce_scatter.overlaps >= 0", "pass"),
        ("backward.reduce_scatter.exposed == 90us", "pass"),
        ("backward.hidden == 40us", "pass"),
        ("hidden == 40us", "pass"),
        ("all_gather.hidden == 80us", "pass"),
        ("reduce_scatter.hidden == 0", "pass"),
        # 80 of gathers in each phase, 90 of reduce-scatters.
        ("communication.exposed == 170us", "pass"),
    ],
)
def test_a_scope_selects_phase_and_kind(check, expected):
    assert status(both_phases(), check) == expected


def test_the_backwards_overlaps_do_not_make_up_for_the_forwards():
    t = Timeline()
    end = forward(t, 100, ["a", "b", "c"], exposed=["b", "c"])
    forward(t, end + 100, ["c", "b", "a"], phase="backward")
    assert status(t, "overlaps >= 1") == "fail"


@pytest.mark.parametrize("check", ["reduce_scatter.hidden >= 0", "backward.hidden >= 0", "all_reduce.exposed <= 1s"])
def test_a_scope_without_collectives_is_inconclusive_even_if_the_number_would_hold(check):
    assert status(three_children(), check) == "inconclusive"


def without_labels() -> Timeline:
    t = Timeline()
    for at in (100, 200, 300):
        t.kernel("ncclDevKernel_AllGather_RING_LL", at, at + 20, stream=20)
    t.gemm(205, 320)
    return t


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ("overlaps >= 2", "pass"),
        ("overlaps >= 3", "fail"),
        ("hidden >= 35us", "pass"),
        ("overlaps >= auto", "inconclusive"),
        ("forward.overlaps >= 1", "inconclusive"),
    ],
)
def test_where_no_phase_is_known_all_gathers_of_the_window_are_meant(check, expected):
    # 205-220 and 300-320 of three gathers of 20 us: 2 overlap, 35 hidden.
    assert status(without_labels(), check) == expected


# ---- windows


def steps(*exposed: str) -> Timeline:
    """A step a text; the units in it are exposed, of root, a, b, c. A forward outside of all steps is bad."""
    t = Timeline()
    for number, units in enumerate(exposed):
        t.label(f"ProfilerStep#{number}", 1000 * number, 1000 * number + 900)
        forward(t, 1000 * number + 100, ["a", "b", "c"], exposed=list(units))
    forward(t, 1000 * len(exposed) + 100, ["a", "b", "c"], exposed=["b", "c"])
    return t


def test_every_step_must_hold_and_the_whole_is_not_asked_beside_steps():
    verdict = judged(steps("", "", ""), "overlaps >= auto")
    assert verdict.status == "pass"
    assert [f.window for f in verdict.findings] == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]


def test_one_step_that_fails_fails_the_check_and_is_named():
    verdict = judged(steps("", "b", ""), "overlaps >= auto")
    assert verdict.status == "fail"
    assert [f.window for f in verdict.findings if f.status == "fail"] == ["ProfilerStep#1"]


@pytest.mark.parametrize(
    ("exposed", "at_least", "expected"),
    [
        (("", "b", ""), "2/3", "pass"),
        (("", "b", ""), "3/3", "fail"),
        (("b", "b", ""), "2/3", "fail"),
        (("b", "b", ""), "1/3", "pass"),
        (("", "b"), "2/3", "inconclusive"),  # one more step might have held
        (("", ""), "2/3", "inconclusive"),  # three were asked for
        (("", "b", "", ""), "2/3", "pass"),
    ],
)
def test_at_least_k_of_n_steps_must_hold(exposed, at_least, expected):
    assert status(steps(*exposed), "overlaps >= auto", at_least=at_least) == expected


def test_fewer_steps_than_asked_for_fail_where_no_further_step_could_help():
    # 4 of 5 are wanted; two of the two that there are fail already.
    assert status(steps("b", "b"), "overlaps >= auto", at_least="4/5") == "fail"


def test_a_step_that_cannot_answer_is_not_counted_as_holding():
    t = steps("", "")
    t.label("ProfilerStep#9", 5000, 5900)
    assert status(t, "overlaps >= auto", at_least="2/3") == "pass"
    assert status(t, "overlaps >= auto", at_least="3/3") == "inconclusive"
    assert status(t, "overlaps >= auto") == "inconclusive"


# ---- ranks


def ranks(*exposed: str, **options: Any) -> RunAnalysis:
    analyses = []
    for rank, units in enumerate(exposed):
        t = Timeline(rank=rank, world_size=len(exposed), path=f"rank{rank}.json")
        forward(t, 100, ["a", "b", "c"], exposed=list(units))
        analyses.append(analyze(t.trace()))
    return RunAnalysis(tuple(analyses), **options)


def test_every_rank_must_hold_and_the_worst_one_is_named():
    verdict = judged(ranks("", "bc", ""), "overlaps >= auto")
    assert verdict.status == "fail"
    assert [(f.rank, f.trace) for f in verdict.findings if f.status == "fail"] == [(1, "rank1.json")]
    assert status(ranks("", "", ""), "overlaps >= auto") == "pass"


def test_every_check_must_hold():
    assert status(three_children(), "overlaps >= auto", "hidden >= 90%") == "fail"
    assert status(three_children(), "overlaps >= auto", "hidden >= 50%") == "pass"


# ---- inconclusive


def only_gathers(units: list[str | None]) -> Timeline:
    t = Timeline()
    for place, unit in enumerate(units):
        t.gather(unit, 100 + 30 * place, 120 + 30 * place)
    t.gemm(100, 1000)
    return t


def one_gemm() -> Timeline:
    t = Timeline()
    t.gemm(0, 100)
    return t


def of_no_duration() -> Timeline:
    t = Timeline()
    for place in range(3):
        t.gather(f"u{place}", 100 + place * 10, 100 + place * 10)
    return t


@pytest.mark.parametrize(
    "check", ["overlaps >= auto", "overlaps >= 0", "hidden >= 0", "exposed <= 1s", "exposed <= 100%"]
)
@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(),
        one_gemm(),
        of_no_duration(),
    ],
    ids=["nothing", "no gather", "gathers that take no time"],
)
def test_a_check_never_passes_on_nothing(timeline, check):
    assert status(timeline, check) == "inconclusive"


@pytest.mark.parametrize("units", [[None], [None, "a"], ["a"]])
def test_auto_is_inconclusive_with_fewer_than_two_children(units):
    assert status(only_gathers(units), "overlaps >= auto") == "inconclusive"
    assert status(only_gathers([None, "a", "b"]), "overlaps >= auto") == "pass"


@pytest.mark.parametrize("exposed", [[], ["b"]])
def test_a_trace_that_lost_records_answers_nothing(exposed):
    trace = replace(three_children(exposed=exposed).trace(), incomplete=("3 kernels fewer than launches",))
    verdict = judged(analyze(trace), "overlaps >= auto", "hidden >= 1%")
    assert verdict.status == "inconclusive"
    assert all("3 kernels fewer than launches" in f.message for f in verdict.findings)


def test_a_note_that_loses_no_records_does_not_keep_a_check_from_passing():
    trace = replace(three_children().trace(), notes=("a name was repaired",))
    assert status(analyze(trace), "overlaps >= auto") == "pass"


def test_a_run_that_lacks_ranks_is_inconclusive():
    verdict = judged(ranks("", "", problems=("no trace of rank 2 of 3",)), "overlaps >= auto")
    assert verdict.status == "inconclusive"
    assert "no trace of rank 2 of 3" in [f.message for f in verdict.findings]


def test_a_run_without_ranks_is_inconclusive():
    assert status(RunAnalysis(()), "overlaps >= auto") == "inconclusive"


def test_a_failed_check_outranks_an_inconclusive_one():
    run = ranks("", "b", problems=("no trace of rank 2 of 3",))
    assert status(run, "overlaps >= auto") == "fail"
    assert status(three_children(), "overlaps >= 3", "backward.hidden >= 1us") == "fail"


def test_an_inconclusive_check_outranks_one_that_holds():
    assert status(three_children(), "overlaps >= auto", "backward.hidden >= 1us") == "inconclusive"


def test_a_windows_option_that_finds_no_window_does_not_pass_on_the_whole():
    analysis = analyze(three_children().trace(), Options.parse(window="no such range"))
    assert status(analysis, "overlaps >= auto") == "inconclusive"


def test_a_serial_run_is_the_negative_control():
    t = Timeline()
    for place, unit in enumerate([None, "a", "b", "c"]):
        t.gather(unit, 100 + 200 * place, 150 + 200 * place, stream=7)
        t.gemm(150 + 200 * place, 300 + 200 * place)
    verdict = judged(t, "overlaps >= auto")
    assert verdict.status == "fail"
    assert "serial" in " ".join(verdict.findings[0].evidence)


def test_a_slowdown_may_be_longer_than_the_collectives():
    assert parse_check("slowdown <= 150%").limit == 150
