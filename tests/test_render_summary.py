"""What the formats for people have in common: words, rows, causes, denominators, the headline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import render_runs as runs

from overlap_probe.causes import needs_cause
from overlap_probe.render import summary
from overlap_probe.render.advice import CAUSE_ADVICE, CAUSE_MEANING
from overlap_probe.render.words import clean, duration, file_name, percent, typeset, without_folders
from overlap_probe.results import RunAnalysis, Totals, Verdict


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (99_994, "99.99 us"),
        (99_995, "100.0 us"),
        (218_449, "218.4 us"),
        (999_949, "999.9 us"),
        (999_950, "1.00 ms"),
        (19_237_973, "19.24 ms"),
        (61_000_000_000, "61.00 s"),
        (-1_500, "-1.50 us"),
    ],
)
def test_a_duration_has_four_digits_and_the_unit_that_fits(ns: int | None, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (None, 5, "-"), (0, 5, "0.0 %"), (1, 4, "25.0 %"), (9_999, 10_000, ">99.9 %"), (1, 10_000, "<0.1 %")],
)
def test_a_share_of_nothing_is_absent_and_no_share_is_rounded_to_all_or_nothing(
    part: int | None, whole: int, text: str
) -> None:
    assert percent(part, whole) == text


def test_unprintable_characters_are_shown_as_escapes() -> None:
    assert clean("a\x1b[31m\n\ud800\u202eé") == "a\\x1b[31m\\n\\ud800\\u202eé"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/out/rank0.json.gz: 3 records dropped", "rank0.json.gz: 3 records dropped"),
        ("rank 0 is in ../../a/x.json and ./b/y.json", "rank 0 is in x.json and y.json"),
        ("--data=/srv/big/x.bin ~/z.py", "--data=x.bin z.py"),
        (r"C:\Users\me\out\rank0.json", "rank0.json"),
        ("3 of 4 us/step, and/or 1/2", "3 of 4 us/step, and/or 1/2"),
    ],
)
def test_paths_in_a_text_are_cut_to_their_file_names(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_a_page_keeps_a_number_and_its_unit_on_one_line() -> None:
    assert typeset("218.4 us of 2 s, 25 % of 3 units") == "218.4\u00a0µs of 2\u00a0s, 25\u00a0% of 3 units"


def test_a_known_path_with_spaces_is_cut_as_a_whole() -> None:
    assert without_folders("my runs/of may/rank0.json: cut off", ["my runs/of may/rank0.json"]) == "rank0.json: cut off"
    assert file_name("a\\b/") == "b"


def test_a_row_is_a_scope_that_a_check_can_name() -> None:
    rows = summary.rows(runs.run_of_two(backward=True), runs.failing_verdict())
    of_step0 = [
        (r.scope, r.totals.count, r.expected, r.overlapped) for r in rows if (r.rank, r.window) == ("0", "step0")
    ]
    # 4 units: 3 are expected in each direction; the reduces all overlap, 4 of the 3 expected.
    assert of_step0 == [
        ("forward.all_gather", 4, 3, 3),
        ("backward.all_gather", 4, 3, 3),
        ("backward.reduce_scatter", 4, 3, 4),
    ]


def test_a_finding_marks_its_own_row_only() -> None:
    verdict = Verdict(
        "fail",
        (
            *runs.failing_verdict().findings,
            runs.overlaps(0, "step0", 1, check="backward.reduce_scatter.overlaps >= auto"),
            runs.overlaps(1, "step0", 1, check="backward.hidden>=80.5%"),
        ),
    )
    rows = summary.rows(runs.run_of_two(backward=True), verdict)
    status = {(r.rank, r.window, r.scope): r.status for r in rows}
    assert status[("1", "step1", "forward.all_gather")] == "fail"
    assert status[("0", "step0", "forward.all_gather")] == "pass"
    assert status[("0", "step0", "backward.reduce_scatter")] == "fail"
    assert status[("1", "step0", "backward.all_gather")] == "fail"
    assert status[("0", "step0", "backward.all_gather")] is None


def test_without_phases_the_row_counts_all_gathers_and_expects_nothing() -> None:
    gathers = [replace(c, phase="unknown", unit=None) for c in runs.step(0, 0, 200)]
    window = runs.window("step0", *gathers)
    window = replace(window, by_op=window.by_op | {"all_gather": runs.totals(*gathers), "send_recv": Totals(count=2)})
    analysis = replace(runs.analysis(None, {}), windows={"whole": window})
    rows = summary.rows(RunAnalysis((analysis,)))
    assert [(r.rank, r.scope, r.totals.count, r.expected, r.overlapped) for r in rows] == [
        ("rankNone.json.gz", "all_gather", 2, None, 1),
        ("rankNone.json.gz", "send_recv", 2, None, 0),
    ]


def test_an_entry_is_called_by_its_rank_else_process_and_device_else_file() -> None:
    zero = runs.analysis(0, {"step0": runs.step(0, 0, 200)})
    other = replace(zero, path="b.json")
    process, nothing = replace(zero, rank=None, process=7, device=1), replace(zero, rank=None, path="a/7.json")
    labels = summary.rank_labels(RunAnalysis((zero, other, process, nothing)))
    assert labels == ("0 (rank0.json.gz)", "0 (b.json)", "process 7 device 1", "7.json")
    sentences = [summary.named(label) for label in labels]
    assert sentences == ["rank 0 (rank0.json.gz)", "rank 0 (b.json)", "process 7 device 1", "7.json"]


def test_whole_is_added_only_on_request_and_comes_last() -> None:
    rows = summary.rows(runs.run_of_two(), whole=True)
    assert [r.window for r in rows if r.rank == "0"] == ["step0", "step1", "whole"]
    assert "whole" not in {r.window for r in summary.rows(runs.run_of_two())}


def test_rows_are_cut_to_the_failed_and_the_most_exposed_in_their_order() -> None:
    rows = summary.rows(runs.run_of_two(), runs.failing_verdict())
    kept = summary.worst_rows(rows, 2)
    # Exposed: 200, 250 (rank 0), 200, 600 (rank 1, failed).
    assert [(r.rank, r.window) for r in kept] == [("0", "step1"), ("1", "step1")]


def test_causes_are_counted_with_their_longest_case() -> None:
    found = [
        (c.cause, c.count, c.longest.rank, c.longest.window, c.longest.collective.unit)
        for c in summary.causes(runs.run_of_two())
    ]
    # The first gather of each of 4 windows; rank 0 step1 has one gather late by 50 us, rank 1 step1 two by 200 us.
    assert found == [("first", 4, "0", "step0", "layers.0"), ("late_launch", 3, "1", "step1", "layers.2")]


def test_a_collective_is_named_with_its_phase_as_far_as_the_trace_says() -> None:
    entry = summary.causes(runs.run_of_two())[0].longest
    assert summary.where(entry) == "layers.0, forward, rank 0, step0"
    unnamed = replace(entry, collective=replace(entry.collective, unit=None, phase="unknown"))
    assert summary.where(unnamed) == "rank 0, step0"


def test_every_cause_of_the_design_has_a_meaning_and_an_advice_on_one_line() -> None:
    causes = [
        "first",
        "peer_wait",
        "late_launch",
        "sm_contention",
        "dependency",
        "longer_than_compute",
        "serial",
        "unknown",
    ]
    assert sorted(CAUSE_ADVICE) == sorted(CAUSE_MEANING) == sorted(causes)
    assert all("\n" not in text for text in (*CAUSE_ADVICE.values(), *CAUSE_MEANING.values()))
    assert needs_cause(runs.collective(0, 0, 200, 0))


def test_the_denominator_names_what_was_left_out() -> None:
    gathers = runs.step(0, 0, 200, 200)
    analysis = runs.analysis(0, {"step0": gathers})
    outside = runs.window("whole", *gathers, runs.collective(3, 9000, 200, 0))
    odd = replace(
        analysis.windows["step0"], by_op={"all_gather": runs.totals(*gathers, *gathers[:1]), "reduce_scatter": Totals()}
    )
    left_out = RunAnalysis((replace(analysis, windows={"whole": outside, "step0": odd}),))
    assert summary.denominators(RunAnalysis((analysis,))) == [
        "Counted: 3 collectives in 1 window on 1 rank; nothing left out."
    ]
    assert summary.denominators(left_out) == [
        "Counted: 3 collectives in 1 window on 1 rank.",
        "Left out on rank 0: 1 of 4 collectives outside of every window, "
        "1 of 4 all-gathers in neither forward nor backward.",
    ]


def test_the_headline_names_the_worst_rank_and_window() -> None:
    run = runs.run_of_two()
    assert summary.headline(run, runs.failing_verdict()) == (
        "rank 1, step1: 1 of 3 expected all-gathers overlap a GEMM (1 of 4 findings)"
    )
    assert summary.headline(run, None) == "no check was asked for"
    assert summary.headline(run, Verdict("inconclusive", ())) == "nothing was checked"


def test_of_several_failures_the_furthest_from_its_limit_is_the_worst() -> None:
    near = runs.overlaps(0, "step0", 2)
    far = runs.overlaps(1, "step1", 0)
    # 30 us of 20 us is 50 % over; 0 of 3 overlaps are 100 % short.
    over = runs.overlaps(0, "step1", 0, check="exposed <= 20us", value=30_000, limit=20_000)
    assert summary.worst(Verdict("fail", (near, over, far))) is far
    assert summary.worst(Verdict("fail", (near, over))) is over


def test_the_headline_of_a_pass_is_the_tightest_finding() -> None:
    verdict = Verdict("pass", (runs.overlaps(0, "step0", 4, message="four"), runs.overlaps(1, "step0", 3)))
    assert summary.headline(runs.run_of_two(), verdict) == (
        "3 of 3 expected all-gathers overlap a GEMM (all 2 checks hold; tightest: rank 1, step0)"
    )
