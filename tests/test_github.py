"""What a CI reads of a verdict: the job summary of GitHub, and JUnit XML by the rules of its usual readers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import render_runs as runs
from command_line import call

from overlap_probe.render import junit, markdown
from overlap_probe.results import RunAnalysis, Verdict

DATA = Path(__file__).parent / "data"
LATE = [DATA / f"fsdp2_llama8_b4s1024_rank{rank}.json.gz" for rank in (0, 1)]
RING = [DATA / f"linear8_ring_prefetch_rank{rank}.json.gz" for rank in (0, 1)]

LIMIT = 1 << 20
"""Bytes that GitHub shows of a step's summary; of a larger one it shows nothing."""


# -- the job summary


def test_the_summary_has_the_verdict_what_failed_the_table_and_the_causes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert call(capsys, "assert", *LATE, "--overlaps", "auto", "--github-summary").code == 1
    text = summary.read_text("utf-8")
    assert text.startswith("### overlap_probe: ❌ FAIL\n")
    assert "- **overlaps &gt;= auto** on rank 1, ProfilerStep\\#0: 0 of 7 expected" in text
    rows = [line for line in text.splitlines() if line.startswith(("| ❌ |", "|  |"))]
    assert len([row for row in rows if "forward.all\\_gather" in row]) == 4
    assert re.search(r"^\| late\\_launch \| \d+ \|", text, re.MULTILINE)


def test_the_summary_is_appended_to_what_other_steps_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    summary = tmp_path / "summary.md"
    summary.write_text("# Tests\n", encoding="utf-8")
    for expected in ("6", "7"):
        call(capsys, "assert", *RING, "--overlaps", expected, f"--github-summary={summary}")
    parts = summary.read_text("utf-8").split("### overlap_probe: ")
    assert parts[0] == "# Tests\n"
    assert [part.split("\n")[0] for part in parts[1:]] == ["✅ PASS", "❌ FAIL"]


def test_an_inconclusive_verdict_is_marked_as_such(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = call(capsys, "assert", *RING, "--overlaps", "auto", "--github-summary", tmp_path / "summary.md")
    assert done.code == 3
    assert (tmp_path / "summary.md").read_text("utf-8").startswith("### overlap_probe: ❔ INCONCLUSIVE\n")


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_job_the_summary_wants_a_file_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    else:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", value)
    done = call(capsys, "assert", "nowhere", "--overlaps", "auto", "--github-summary")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "$GITHUB_STEP_SUMMARY is not set" in done.err
    assert "give a FILE" in done.err


def test_a_summary_that_cannot_be_written_is_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = call(capsys, "assert", *RING, "--overlaps", "6", "--github-summary", tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{tmp_path}: cannot be written" in done.err


def test_a_summary_of_a_large_run_is_short_enough_to_be_shown() -> None:
    steps = {f"step{at}": runs.step(9000 * at, *(0 for _ in range(64)), backward=True) for at in range(5)}
    large = RunAnalysis(tuple(runs.analysis(rank, steps) for rank in range(16)))
    line = "x" * 400
    failing = [runs.overlaps(r, f"step{s}", 0, evidence=(line,) * 8) for r in range(16) for s in range(5)]
    assert len(markdown.render(large, Verdict("fail", tuple(failing))).encode()) < LIMIT / 8


# -- JUnit XML

ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "time", "tests", "failures", "errors", "skipped", "timestamp", "hostname", "id", "package"},
    "properties": set(),
    "property": {"name", "value"},
    "testcase": {"name", "classname", "time"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "system-out": set(),
}
"""What the schema of Jenkins' xUnit plugin (junit-10.xsd) allows, of the elements that we write."""

CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"properties", "testcase"},
    "properties": {"property"},
    "testcase": {"failure", "error", "system-out"},
}


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (runs.run_of_two(backward=True), runs.failing_verdict()),
        (runs.run_of_two(), runs.passing_verdict()),
        (runs.nasty_run(), runs.nasty_verdict()),
        (RunAnalysis(()), None),
    ],
    ids=["fail", "pass", "nasty", "nothing"],
)
def test_junit_keeps_the_rules_of_its_strictest_reader(run: RunAnalysis, verdict: Verdict | None) -> None:
    root = ElementTree.fromstring(junit.render(run, verdict))
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(element.attrib) <= ATTRIBUTES[element.tag]
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
        for number in ("tests", "failures", "errors", "skipped"):
            assert element.get(number, "0").isdigit()
    (suite,) = root
    cases = suite.findall("testcase")
    assert len(cases) >= 1
    for tag, elements in (("tests", cases), ("failures", suite.iter("failure")), ("errors", suite.iter("error"))):
        assert int(suite.get(tag, "")) == int(root.get(tag, "")) == len(list(elements))
    names = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(names)) == len(names)  # a reader that goes by names would lose the second


def test_two_files_of_one_rank_are_two_cases_with_names_of_their_own() -> None:
    rank = runs.run_of_two().ranks[0]
    doubled = RunAnalysis(tuple(replace(rank, path=f"/home/someone/{name}.json") for name in "ab"))
    findings = tuple(runs.overlaps(0, "step0", 3, trace=f"/home/someone/{name}.json") for name in "ab")
    root = ElementTree.fromstring(junit.render(doubled, Verdict("pass", findings)))
    names = [(case.get("classname"), case.get("name")) for case in root.findall("testsuite/testcase")]
    assert len(set(names)) == 2


def test_the_evidence_is_in_the_text_of_the_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(capsys, "assert", *LATE, "--overlaps", "auto", "--junit", tmp_path / "junit.xml").code == 1
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("4", "4")  # two ranks of two windows
    case = next(case for case in suite.findall("testcase") if "rank 1, ProfilerStep#0" in case.get("name", ""))
    assert "late_launch: " in (case.findtext("failure") or "")
