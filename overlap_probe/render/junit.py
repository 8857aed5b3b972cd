"""Shows a verdict as JUnit XML: a test case a finding.

The idea: a reader that knows only passed, failed, error and skipped must never take for passed what is not. So
inconclusive is an error, never a skip; and where nothing was checked, or the verdict is worse than its findings, a case
of its own says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from overlap_probe.render import summary
from overlap_probe.render.words import clean, file_name, without_folders
from overlap_probe.results import Finding, RunAnalysis, Verdict

_ELEMENT = {"fail": "failure", "inconclusive": "error"}


@dataclass(frozen=True, slots=True)
class Case:
    """One test case: what was checked where, how it went, and the lines that show it."""

    where: str
    check: str
    status: str
    message: str
    lines: tuple[str, ...] = ()


def cases(run: RunAnalysis, verdict: Verdict | None) -> Iterator[Case]:
    """A case a finding, and one for a verdict that no finding explains; never none."""
    findings = verdict.findings if verdict else ()
    for finding in findings:
        yield _case(run, finding)
    status = verdict.status if verdict else "inconclusive"
    if not any(f.status == status for f in findings):
        message = "no check was evaluated" if not findings else f"the run as a whole is judged {status}"
        yield Case("run", "verdict", status if findings else "inconclusive", message, tuple(summary.doubts(run)))


def _case(run: RunAnalysis, finding: Finding) -> Case:
    where = summary.place(finding) or "run"
    evidence = tuple(without_folders(line, [a.path for a in run.ranks]) for line in finding.evidence)
    return Case(where, clean(finding.check) or "run", finding.status, summary.message(run, finding), evidence)


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """The XML text: one suite, properties for versions and traces, evidence in the text of a failure or error."""
    made = list(cases(run, verdict))
    counts = {
        "name": "overlap_probe",
        "tests": str(len(made)),
        "failures": str(sum(case.status == "fail" for case in made)),
        "errors": str(sum(case.status == "inconclusive" for case in made)),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", counts, skipped="0")
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in _properties(run):
        ElementTree.SubElement(properties, "property", name=clean(name), value=without_folders(value))
    seen: Counter[tuple[str, str]] = Counter()
    for case in made:
        seen[case.where, case.check] += 1
        again = seen[case.where, case.check]  # two files of one rank, say: readers go by names, and would lose one
        name = f"{case.check} [{case.where}]" + (f" ({again})" if again > 1 else "")
        element = ElementTree.SubElement(
            suite, "testcase", classname=f"overlap_probe.{case.where}", name=name, time="0"
        )
        if case.status in _ELEMENT:
            kind = _ELEMENT[case.status]
            problem = ElementTree.SubElement(element, kind, message=case.message, type=f"overlap_probe.{case.status}")
            problem.text = "\n".join((case.message, *case.lines))
        else:
            ElementTree.SubElement(element, "system-out").text = case.message
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _properties(run: RunAnalysis) -> Iterator[tuple[str, str]]:
    for key, value in run.record.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", str(inner)) for name, inner in value.items())
        elif value is not None:
            yield str(key), str(value)
    for label, analysis in zip(summary.rank_labels(run), run.ranks, strict=True):
        yield f"trace.{label}", f"{file_name(analysis.path)} ({analysis.format}, quality {analysis.quality})"
    yield from ((f"doubt.{at}", line) for at, line in enumerate(summary.doubts(run)))
