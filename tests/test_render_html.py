"""The page: complete without its script, self-contained, well-formed, and safe whatever a trace is called."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import render_runs as runs

from overlap_probe.render import advice
from overlap_probe.render import page as page_module
from overlap_probe.render import render as render_as
from overlap_probe.render.advice import CAUSE_ADVICE
from overlap_probe.render.figures import LOOKS, MAX_RECTANGLES, picture_rows, timeline_svg
from overlap_probe.render.html import COLUMNS, FILTERS, render
from overlap_probe.render.page import page
from overlap_probe.render.predictions import predictions
from overlap_probe.results import Lane, RunAnalysis, Verdict, WhatIf

US, MS = 1_000, 1_000_000
"""Nanoseconds."""

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Elements, texts and tables of a page; fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.cells: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if dict(attrs).get("id"):
            self.ids.append(dict(attrs)["id"] or "")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.cells.append([])
        elif tag == "tr":
            self.cells[-1].append([])
        elif tag in ("td", "th"):
            self.cells[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1][-1] += data

    def table_with(self, head: str) -> list[list[str]]:
        """The table that has such a column, head first, cells without white space around."""
        tables = [[[" ".join(c.split()) for c in row] for row in table] for table in self.cells]
        return next(table for table in tables if head in table[0])


@pytest.fixture(scope="module")
def shown() -> Page:
    return Page(render(runs.run_of_two(backward=True), runs.failing_verdict()))


def test_the_banner_names_the_verdict_and_the_worst_rank(shown: Page) -> None:
    assert shown.texts["h1"][-1].strip() == "FAIL"
    assert shown.texts["title"] == ["FAIL: rank 1, step1: 1 of 3 expected all-gathers overlap a GEMM (1 of 4 findings)"]


def test_the_table_of_windows_has_the_numbers_of_each_scope(shown: Page) -> None:
    table = shown.table_with("share of the time")
    failed = next(row for row in table if row[-1] == "✗ fail")
    # 4 gathers of 200 us of which 200 us are hidden: 25 %, 600 us exposed, no GEMM ran alone to compare with.
    assert failed == [
        *("1", "step1", "forward.all_gather", "4", "1", "3", "800.0 µs", "25.0 %", ""),
        *("600.0 µs", "600.0 µs", "-", "-", "✗ fail"),
    ]
    assert len(table) == 1 + 14  # 2 ranks x (3 scopes of step0, 1 of step1, 3 of whole)


def test_the_rows_of_the_whole_are_explained_where_there_are_others(shown: Page) -> None:
    explained = "is the whole trace: all windows together"
    assert explained in " ".join(shown.texts["p"])
    only_whole = runs.run_of_two().ranks[0]
    only_whole = replace(only_whole, windows={"whole": only_whole.whole}, pictured="whole")
    assert explained not in render(RunAnalysis((only_whole,)))


def test_a_bar_says_in_words_what_it_shows(shown: Page) -> None:
    bars = [a["aria-label"] for tag, a in shown.elements if tag == "span" and a.get("class") == "bar"]
    assert "25.0\u00a0% hidden by GEMMs, 75.0\u00a0% stalled" in bars


def test_the_parts_of_a_bar_make_the_whole(shown: Page) -> None:
    for group in page(runs.run_of_two(backward=True))["groups"]:
        for row in group["rows"]:
            assert sum(share for _, _, share in row["bar"]) == pytest.approx(100)


def test_every_collective_is_in_the_page_without_the_script(shown: Page) -> None:
    table = shown.table_with("why")
    assert len(table) == 1 + 32  # 2 ranks x (12 of step0, 4 of step1)
    assert ["1", "step1", "layers.2", "all_gather", "forward", "sm", "0.800"] in [row[:7] for row in table]


def test_the_payload_matches_the_table_row_by_row_and_column_by_column(shown: Page) -> None:
    data = json.loads(next(t for t in shown.texts["script"] if t.lstrip().startswith("{")))
    table = shown.table_with("why")
    assert data["columns"] == list(COLUMNS)
    assert set(data["filters"]) == set(FILTERS) <= set(COLUMNS)
    assert len(data["rows"]) == len(table) - 1
    assert all(len(row) == len(COLUMNS) == len(table[0]) for row in data["rows"])
    assert [row[:5] for row in data["rows"]] == [row[:5] for row in table[1:]]
    assert [f"{row[6] / 1e6:.3f}" for row in data["rows"]] == [row[6] for row in table[1:]]


def test_causes_come_with_what_to_do(shown: Page) -> None:
    table = shown.table_with("cause")
    assert [row[:2] for row in table[1:]] == [["first", "4"], ["late_launch", "3"]]
    assert table[2][3] == CAUSE_ADVICE["late_launch"]


def test_the_page_loads_nothing(shown: Page) -> None:
    assert not [tag for tag, _ in shown.elements if tag in ("link", "img", "iframe", "object", "image")]
    for tag, attributes in shown.elements:
        assert "src" not in attributes, tag
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(" not in "".join(shown.texts["style"])
    assert "@import" not in "".join(shown.texts["style"])


def test_ids_are_unique_and_links_lead_somewhere(shown: Page) -> None:
    assert len(set(shown.ids)) == len(shown.ids)
    links = {a[name] for _, a in shown.elements for name in ("href", "xlink:href") if a.get(name)}
    assert {link[1:] for link in links if link} <= set(shown.ids)
    clips = {a["clip-path"] for _, a in shown.elements if a.get("clip-path")}
    assert clips
    assert {clip[5:-1] for clip in clips if clip} <= set(shown.ids)


def test_headers_have_a_scope_and_pictures_a_name(shown: Page) -> None:
    assert all(a.get("scope") for tag, a in shown.elements if tag == "th")
    pictures = [a for tag, a in shown.elements if tag == "svg"]
    # step0 of both ranks: 4 + 4 gathers of 200 us, the first of each 4 exposed.
    assert [a["aria-label"] for a in pictures] == [
        f"Timeline of rank {r}, step0: 8 all-gathers, 400.0\u00a0µs of 1.60\u00a0ms exposed" for r in (0, 1)
    ]
    assert all(a["role"] == "img" for a in pictures)


def test_no_name_in_a_trace_becomes_markup_or_shows_a_folder() -> None:
    text = render(runs.nasty_run(), runs.nasty_verdict())
    shown = Page(text)
    assert [tag for tag, _ in shown.elements].count("script") == 2
    assert not [a for _, a in shown.elements if any(name.startswith("on") for name in a)]
    text.encode("utf-8")
    assert "secret" not in text
    data = json.loads(next(t for t in shown.texts["script"] if t.lstrip().startswith("{")))
    assert data["rows"][0][2] == runs.NASTY
    assert any(re.sub(r"\s+", " ", clean_cell).startswith("<script>alert") for clean_cell in shown.table_with("why")[1])


def test_folders_of_paths_are_shown_nowhere() -> None:
    text = render(runs.run_of_two(problems=("two files of rank 0: /home/someone/out/a.json, ../b/a.json",)), None)
    assert "someone" not in text
    assert "two files of rank 0: a.json, a.json" in text


def test_doubts_and_left_outs_are_on_the_page() -> None:
    run = runs.run_of_two()
    run = replace(run, ranks=(replace(run.ranks[0], notes=("12 kernels without a launch",)), run.ranks[1]))
    data = page(run, runs.passing_verdict())
    assert data["doubts"] == ["rank 0: 12 kernels without a launch"]
    assert data["denominators"] == ["Counted: 16 collectives in 4 windows on 2 ranks; nothing left out."]
    assert [trace["quality"] for trace in data["traces"]] == ["degraded", "ok"]


def test_findings_that_do_not_hold_are_listed_worst_first() -> None:
    unsure = runs.overlaps(0, "step0", 3, status="inconclusive", message="records are missing")
    data = page(runs.run_of_two(), Verdict("fail", (unsure, *runs.failing_verdict().findings)))
    places = [(f["status"], f["place"]) for f in data["findings"]]
    assert places == [("fail", "rank 1, step1"), ("inconclusive", "rank 0, step0")]
    assert data["held"] == 3


def test_the_record_is_shown_flat() -> None:
    record = {"arguments": {"nproc": 2, "args": ["--lr", "0.1"]}, "backend": None, "out": "/home/me/x"}
    flat = page(runs.run_of_two(record=record))["record"]
    assert flat == [("arguments.nproc", "2"), ("arguments.args", "--lr 0.1"), ("out", "x")]


def test_no_all_gather_is_not_shown_as_none_exposed() -> None:
    nothing = RunAnalysis((runs.analysis(0, {"step0": []}, lanes=()),))
    hidden = RunAnalysis((runs.analysis(0, {"step0": runs.step(0, 200, 200)}),))
    assert "There is no all-gather in these windows." in Page(render(nothing)).texts["p"]
    assert any(text.startswith("No all-gather was exposed") for text in Page(render(hidden)).texts["p"])


def test_a_run_without_anything_is_still_a_page() -> None:
    shown = Page(render(RunAnalysis(()), None))
    assert shown.texts["h1"][-1].strip() == "NOT CHECKED"
    Page(render(RunAnalysis((runs.analysis(None, {"step0": []}, lanes=()),)), Verdict("inconclusive", ())))


def test_a_large_run_is_cut_to_the_worst_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_COLLECTIVES", 3)
    monkeypatch.setattr(page_module, "MAX_ROWS", 2)
    monkeypatch.setattr(page_module, "MAX_PICTURES", 1)
    data = page(runs.run_of_two(), runs.failing_verdict())
    assert (len(data["collectives"]), data["collective_count"]) == (3, 16)
    assert (data["shown_count"], data["row_count"]) == (2, 6)
    assert len(data["pictures"]) == 1
    text = render(runs.run_of_two(), runs.failing_verdict())
    assert "The 3 most exposed of 16" in text
    assert "The 2 worst of 6 rows" in text


def rectangles(svg: str) -> int:
    """Closed paths in the axes: all but the two backgrounds and the legend's."""
    return len(re.findall(r"\nz", svg))


def test_a_picture_stays_small_whatever_the_trace() -> None:
    many = 200_000
    starts = tuple(range(0, 10 * many, 10))
    svg = timeline_svg([Lane(7, "gemm", starts, tuple(s + 5 for s in starts))], "t", "x")
    assert rectangles(svg) <= MAX_RECTANGLES + 10
    assert len(svg) < 500_000


def test_a_picture_has_a_row_a_stream_and_one_of_exposure() -> None:
    lanes = [
        Lane(20, "all_gather", (0, 1000), (500, 1500)),
        Lane(30, "all_to_all", (0,), (2000,)),
        Lane(7, "gemm", (250,), (1200,)),
        Lane(7, "compute", (1200,), (1300,)),
        Lane(9, "memory", (0,), (10,)),
    ]
    rows = [
        (label, kind, list(zip(times.start_ns.tolist(), times.end_ns.tolist(), strict=True)))
        for label, kinds in picture_rows(lanes)
        for kind, times in kinds.items()
    ]
    # The gathers cover 0..500 and 1000..1500, compute of any kind 250..1300: exposed are 0..250 and 1300..1500.
    assert rows == [
        ("stream 7", "gemm", [(250, 1200)]),
        ("stream 7", "compute", [(1200, 1300)]),
        ("stream 9", "memory", [(0, 10)]),
        ("stream 20", "all_gather", [(0, 500), (1000, 1500)]),
        ("stream 30", "other", [(0, 2000)]),
        ("exposed", "exposed", [(0, 250), (1300, 1500)]),
    ]
    svg = timeline_svg(lanes, "t", 'a "name"', track="thread")
    labels = [text for text in re.findall(r">([^<>]+)</text>", svg) if not text.endswith(" ms")]
    assert labels[:5] == ["thread 7", "thread 9", "thread 20", "thread 30", "exposed"]
    assert set(labels[5:]) == {look.title for look in LOOKS.values()} - {"reduce-scatter"}
    assert 'aria-label="a &quot;name&quot;"' in svg


def test_nothing_to_draw_is_no_picture() -> None:
    assert timeline_svg([], "t", "x") == ""
    assert timeline_svg([Lane(7, "gemm", (5,), (5,))], "t", "x") == ""


def predicted() -> RunAnalysis:
    """Two windows a rank: a forward of 3 and 5 ms that would take 2 ms each if the host were always in time."""
    made = runs.run_of_two()
    answers = [WhatIf(3 * MS, all_hidden_ns=3 * MS, host_in_time_ns=2 * MS), WhatIf(5 * MS, 5 * MS, None, None, 2 * MS)]
    ranks = []
    for rank in made.ranks:
        names = [name for name in rank.windows if name != "whole"][:2]
        windows = {
            name: replace(rank.windows[name], what_if={"forward": a}) for name, a in zip(names, answers, strict=True)
        }
        ranks.append(replace(rank, windows={"whole": rank.whole} | windows))
    return RunAnalysis(tuple(ranks))


def test_a_replay_is_shown_with_what_is_worth_most_in_every_format() -> None:
    # (3 + 5) / 2 = 4 ms a window now, 2 ms with the host in time: half of it is saved. What is not known is no number.
    head = ["rank", "phase", "now", *advice.WHAT_IF.values(), "worth most"]
    row = ["forward", "4.00 ms", "4.00 ms", "-", "-", "2.00 ms", "host always in time: saves 2.00 ms (50.0 %)"]
    page = Page(render(predicted()))
    table = page.table_with("worth most")
    assert table == [head, *([str(rank), *row] for rank in (0, 1))]
    assert advice.WHAT_IF_ASSUMES in page.texts["p"]
    text = " ".join(render_as(predicted(), format="txt").split())
    assert "rank 0, forward: 4.00 ms a window; it would take 4.00 ms with all gathers hidden, 2.00 ms with host" in text
    assert advice.WHAT_IF_ASSUMES in text
    markdown = render_as(predicted(), format="md")
    assert (
        "| forward | 0 | 4.00 ms | 4.00 ms | - | - | 2.00 ms | host always in time: saves 2.00 ms (50.0 %) |"
        in markdown
    )
    for form in ("html", "txt", "md"):
        assert "worth most" not in render_as(runs.run_of_two(), format=form).lower()


def test_a_gain_of_nothing_and_an_unknown_one_are_said() -> None:
    [known] = predictions(_replayed(WhatIf(1000 * US, all_hidden_ns=995 * US)))  # 0.5 % is saved
    assert (known.best, known.in_words()) == (None, "none of these saves 1 %")
    [unknown] = predictions(_replayed(WhatIf(1000 * US)))
    assert (unknown.best, unknown.in_words()) == (None, "nothing can be predicted")


def _replayed(answer: WhatIf) -> RunAnalysis:
    rank = runs.run_of_two().ranks[0]
    return RunAnalysis((replace(rank, windows={"whole": replace(rank.whole, what_if={"forward": answer})}),))
