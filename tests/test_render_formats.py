"""Each format says what the run says, whatever the names in it; files are written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import render_runs as runs

from overlap_probe.errors import OverlapProbeError, TraceError
from overlap_probe.render import FORMATS, from_dict, is_result, read_result, render, to_dict, write_report, write_text
from overlap_probe.render.text import render as render_text
from overlap_probe.render.text import render_collectives
from overlap_probe.results import Collective, Finding, RunAnalysis, Verdict


def without_lanes(run: RunAnalysis) -> RunAnalysis:
    return replace(run, ranks=tuple(replace(a, lanes=(), pictured="whole") for a in run.ranks))


def squeezed(lines: list[str]) -> list[str]:
    """The lines with single spaces."""
    return [" ".join(line.split()) for line in lines]


class TestJson:
    @pytest.mark.parametrize(
        ("run", "verdict"),
        [
            (runs.run_of_two(backward=True, problems=("rank 2 is missing",)), runs.failing_verdict()),
            (runs.nasty_run(), runs.nasty_verdict()),
            (RunAnalysis(()), None),
        ],
    )
    def test_a_result_reads_back_as_the_same_run_and_verdict(
        self, tmp_path: Path, run: RunAnalysis, verdict: Verdict | None
    ) -> None:
        write_report(run, tmp_path / "result.json", verdict)
        assert read_result(tmp_path / "result.json") == (without_lanes(run), verdict)

    def test_every_format_but_the_picture_can_be_made_again_from_a_result(self) -> None:
        run, verdict = without_lanes(runs.run_of_two(backward=True)), runs.failing_verdict()
        again = from_dict(json.loads(render(run, verdict, "json")))
        formats = [name for name in FORMATS if name != "svg"]
        assert {name: render(run, verdict, name) for name in formats} == {
            name: render(*again, name) for name in formats
        }
        with pytest.raises(OverlapProbeError, match=r"no timeline.*give the traces"):
            render(*again, "svg")

    def test_the_picture_has_a_timeline_a_rank_and_stands_alone(self) -> None:
        root = ElementTree.fromstring(render(runs.run_of_two(), None, "svg"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        titles = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
        assert titles == ["rank 0, step0", "rank 1, step0"]
        assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == 2

    def test_the_keys_are_those_of_the_design(self) -> None:
        data = to_dict(runs.run_of_two(backward=True), None)
        assert (data["schema"], data["verdict"]) == (1, None)
        trace = data["traces"][0]
        assert {"path", "format", "rank", "world_size", "quality", "windows"} <= set(trace)
        assert trace["quality"] == {"status": "ok", "notes": [], "incomplete": []}
        assert list(trace["windows"]) == ["whole", "step0", "step1"]
        step = trace["windows"]["step0"]
        assert {"communication", "all_gather", "reduce_scatter", "compute_ns", "gemm_ns", "collectives"} <= set(step)
        phase = {"all_gather", "reduce_scatter", "children", "expected", "found"}
        assert set(step["forward"]) == phase
        assert set(step["backward"]) == phase | {"reduce_expected", "reduce_found"}
        # 4 gathers of 200 us, one of them exposed.
        assert step["forward"]["all_gather"] | {"net_hidden_ns": None} == {
            "count": 4, "overlapped_by_gemm": 3, "time_ns": 800_000, "hidden_ns": 600_000, "hidden_by_gemm_ns": 600_000,
            "exposed_ns": 200_000, "stalled_ns": 200_000, "slowdown_ns": None, "net_hidden_ns": None,
        }  # fmt: skip
        assert step["collectives"][0]["streams"] == [20]

    def test_process_and_device_are_there_where_a_file_holds_several(self) -> None:
        one = runs.analysis(None, {"step0": runs.step(0, 0, 200)}, process=12, device=1, format="nsys")
        trace = to_dict(RunAnalysis((one,)))["traces"][0]
        assert (trace["process"], trace["device"]) == (12, 1)
        assert "process" not in to_dict(runs.run_of_two())["traces"][0]

    def test_no_number_is_written_that_json_has_no_word_for(self) -> None:
        record = {"rate": float("nan"), "limits": [float("inf"), 2], "out": Path("a/b"), "seen": {1: (2, 3)}}
        verdict = Verdict("fail", (Finding("hidden >= 1%", "fail", "x", value=float("nan"), limit=1.0),))

        def refuse(word: str) -> Any:
            raise AssertionError(word)

        data = json.loads(render(RunAnalysis((), (), record), verdict, "json"), parse_constant=refuse)
        assert data["run"] == {"rate": None, "limits": [None, 2], "out": "a/b", "seen": {"1": [2, 3]}}
        assert data["verdict"]["findings"][0]["value"] is None

    def test_nanoseconds_stay_integers_of_any_size(self) -> None:
        big = 2**53 + 1
        run = RunAnalysis((runs.analysis(0, {"step0": [runs.collective(0, 0, 200, 0, start_ns=big, end_ns=big + 1)]}),))
        data = json.loads(render(run, None, "json"))
        assert data["traces"][0]["windows"]["step0"]["collectives"][0]["start_ns"] == big

    def test_a_design_only_result_reads_with_defaults(self) -> None:
        data = to_dict(runs.run_of_two(), None)
        for key in ("run", "problems"):
            del data[key]
        window = data["traces"][0]["windows"]["step0"]
        window["forward"]["all_gather"] |= {"slowdown_ns": 100_000}
        del window["forward"]["all_gather"]["net_hidden_ns"]
        for extra in ("pass_index", "name", "streams", "overlapped", "wait_ns", "transfer_ns", "index"):
            del window["collectives"][0][extra]
        totals = from_dict(data)[0].ranks[0].windows["step0"].forward.all_gather
        assert totals.net_hidden_ns == 600_000 - 100_000

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema": 2}, "schema 2"),
            ({"traces": [{"path": "x"}]}, "quality"),
            ({"traces": "x"}, "schema 1"),
            ({"verdict": {"status": "pass"}}, "findings"),
            ({"problems": [3]}, "str"),
        ],
    )
    def test_another_layout_is_refused_with_the_place(self, change: dict[str, Any], says: str) -> None:
        with pytest.raises(TraceError, match=f"old.json: .*{says}"):
            from_dict(to_dict(runs.run_of_two()) | change, "old.json")

    def test_a_window_with_a_wrong_type_or_without_whole_is_refused(self) -> None:
        data = to_dict(runs.run_of_two())
        data["traces"][0]["windows"]["step0"]["gemm_ns"] = 1.5
        with pytest.raises(TraceError, match="Expected `int`"):
            from_dict(data)
        del data["traces"][0]["windows"]["step0"], data["traces"][0]["windows"]["whole"]
        with pytest.raises(TraceError, match="whole"):
            from_dict(data)

    def test_a_result_is_told_from_a_trace_by_its_beginning(self, tmp_path: Path) -> None:
        write_report(runs.run_of_two(), tmp_path / "result.json")
        (tmp_path / "trace.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
        assert is_result(tmp_path / "result.json")
        assert not is_result(tmp_path / "trace.json")
        assert not is_result(tmp_path / "none.json")

    @pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"traceEvents": []}'])
    def test_a_file_that_is_no_result_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "x.json"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(TraceError, match=r"x\.json: "):
            read_result(path)
        with pytest.raises(TraceError, match="No such file"):
            read_result(tmp_path / "none.json")


class TestText:
    def test_the_last_line_is_the_only_verdict_and_names_the_worst(self) -> None:
        lines = render_text(runs.run_of_two(), runs.failing_verdict()).splitlines()
        assert lines[-1] == "FAIL  rank 1, step1: 1 of 3 expected all-gathers overlap a GEMM (1 of 4 findings)"
        assert sum(line.startswith(("PASS", "FAIL", "INCONCLUSIVE")) for line in lines) == 1

    @pytest.mark.parametrize(("status", "word"), [("pass", "PASS"), ("inconclusive", "INCONCLUSIVE")])
    def test_each_status_has_its_word(self, status: str, word: str) -> None:
        verdict = Verdict(status, (runs.overlaps(0, "step0", 3, status=status),))
        assert render_text(runs.run_of_two(), verdict).splitlines()[-1].startswith(f"{word}  ")

    def test_the_table_has_a_line_a_row_with_its_numbers(self) -> None:
        lines = render_text(runs.run_of_two(), runs.failing_verdict()).splitlines()
        assert "step1 1 forward.all_gather 4 3 1 25.0 % 600.0 us 600.0 us FAIL" in squeezed(lines)

    @pytest.mark.parametrize("width", [20, 100])
    def test_neither_a_long_name_nor_a_narrow_width_wraps_or_cuts_a_row(self, width: int) -> None:
        name = "a_window_" + "x" * 300
        run = RunAnalysis((runs.analysis(0, {name: runs.step(0, 0, 200)}),))
        lines = render_text(run, None, width=width).splitlines()
        assert f"{name} 0 forward.all_gather 2 1 1 50.0 % 200.0 us 200.0 us" in squeezed(lines)
        [line] = [line for line in render_collectives(run).splitlines() if "launched 15.00 us before it starts" in line]
        assert name in line

    def test_prose_is_wrapped_to_the_width(self) -> None:
        lines = render_text(runs.run_of_two(), None, width=60).splitlines()
        prose = lines[lines.index("Why all-gathers were exposed:") + 1 : -2]
        assert len(prose) > 4
        assert all(len(line) <= 60 for line in prose)

    def test_colour_only_adds_escapes(self) -> None:
        run, verdict = runs.run_of_two(), runs.failing_verdict()
        coloured = render_text(run, verdict, colour=True)
        assert "\x1b[" in coloured
        plain = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()]
        assert plain == render_text(run, verdict).splitlines()

    def test_doubts_and_denominator_are_printed(self) -> None:
        text = render_text(runs.run_of_two(problems=("rank 2 is missing from /data/out",)), None)
        assert "rank 2 is missing from out" in text
        assert "Counted: 16 collectives in 4 windows on 2 ranks" in text

    def test_too_many_rows_are_cut_and_said_to_be(self) -> None:
        steps = {f"step{i}": runs.step(9000 * i, 0, 200) for i in range(200)}
        text = render_text(RunAnalysis((runs.analysis(0, steps),)), None)
        assert "the 96 worst of 200 rows" in text
        assert len(text.splitlines()) < 120

    def test_a_run_without_ranks_or_collectives_still_renders(self) -> None:
        assert render_text(RunAnalysis(()), None).splitlines()[-1] == "NO VERDICT  no check was asked for"
        empty = RunAnalysis((runs.analysis(0, {"step0": []}, lanes=()),))
        assert "step0 0 all_gather 0 - 0 - 0 ns 0 ns" in squeezed(render_text(empty).splitlines())

    def test_the_collectives_table_has_a_line_a_collective(self) -> None:
        lines = render_collectives(runs.run_of_two()).splitlines()
        assert len(lines) == 1 + 16
        wanted = "0 step0 1.200 all_gather forward layers.3 sm 15.00 us 200.0 us 100.0 % 0 ns 0 ns"
        assert squeezed(lines)[4] == wanted


class TestJunit:
    def test_a_case_a_finding_with_counts_and_evidence(self) -> None:
        root = ElementTree.fromstring(render(runs.run_of_two(), runs.failing_verdict(), "xml"))
        assert root.tag == "testsuites"
        [suite] = root
        assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
            "tests": "4", "failures": "1", "errors": "0", "skipped": "0",
        }  # fmt: skip
        failed = [case for case in suite.iter("testcase") if case.find("failure") is not None]
        [case] = failed
        assert case.get("name") == "overlaps >= auto [rank 1, step1]"
        [failure] = case
        assert failure.get("message") == "1 of 3 expected all-gathers overlap a GEMM"
        assert "layers.3: exposed 200.0 us, late_launch" in (failure.text or "")
        names = [case.get("name") for case in suite.iter("testcase")]
        assert len(set(names)) == len(names)

    def test_inconclusive_is_an_error_and_never_a_skip(self) -> None:
        verdict = Verdict("inconclusive", (runs.overlaps(0, "step0", 3, status="inconclusive", message="none"),))
        root = ElementTree.fromstring(render(runs.run_of_two(), verdict, "xml"))
        assert [e.get("message") for e in root.iter("error")] == ["none"]
        assert not list(root.iter("skipped"))
        assert root.get("errors") == "1"

    @pytest.mark.parametrize("verdict", [None, Verdict("inconclusive", ()), Verdict("pass", ())])
    def test_nothing_checked_is_an_error(self, verdict: Verdict | None) -> None:
        root = ElementTree.fromstring(render(runs.run_of_two(), verdict, "xml"))
        assert (root.get("tests"), root.get("errors")) == ("1", "1")

    def test_a_verdict_worse_than_its_findings_is_not_lost(self) -> None:
        verdict = Verdict("inconclusive", runs.passing_verdict().findings)
        root = ElementTree.fromstring(render(runs.run_of_two(problems=("rank 2 is missing",)), verdict, "xml"))
        [error] = root.iter("error")
        assert "rank 2 is missing" in (error.text or "")

    def test_properties_name_versions_and_traces(self) -> None:
        root = ElementTree.fromstring(render(runs.run_of_two(), runs.failing_verdict(), "xml"))
        properties = {p.get("name"): p.get("value") for p in root.iter("property")}
        assert properties["versions.torch"] == "2.11.0+cu130"
        assert properties["trace.1"] == "rank1.json.gz (kineto, quality ok)"


class TestMarkdown:
    def test_the_table_has_a_line_a_row_and_as_many_cells_in_each(self) -> None:
        text = render(runs.run_of_two(), runs.failing_verdict(), "md")
        assert text.startswith("### overlap_probe: ❌ FAIL\n")
        assert "| ❌ | step1 | 1 | forward.all\\_gather | 4 | 1 | 3 | 25.0 % | 600.0 us | 600.0 us |" in text
        assert "| late\\_launch | 3 |" in text

    def test_a_name_cannot_leave_its_cell_or_become_markup(self) -> None:
        text = render(runs.nasty_run(), runs.nasty_verdict(), "md")
        rows = [line for line in text.splitlines() if line.startswith("|")]
        bars = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert bars == [11, 11, 11, 5, 5, 5]
        assert "<" not in text
        assert not re.search(r"(?<!\\)[`\[]", text)


class TestTables:
    def test_the_frame_has_a_row_a_collective_and_exact_integers(self) -> None:
        analysis = runs.run_of_two().ranks[1]
        frame = analysis.to_frame()
        assert list(frame.columns) == ["rank", "window", *(f.name for f in fields(Collective))]
        assert list(frame["window"]) == ["step0"] * 4 + ["step1"] * 4
        assert frame["rank"].tolist() == [1] * 8
        assert frame[frame.window == "step1"].exposed_ns.tolist() == [200_000, 0, 200_000, 200_000]
        assert frame["wait_ns"].dtype == "Int64"
        assert frame["wait_ns"].isna().all()
        assert frame["cause"].tolist() == ["first", None, None, None, "first", None, "late_launch", "late_launch"]
        assert frame["streams"][0] == (20,)
        assert frame["start_ns"].dtype == "int64"

    def test_one_missing_launch_does_not_turn_the_others_into_floats(self) -> None:
        big = 2**53 + 1
        gathers = [runs.collective(0, 0, 200, 0, launch_ns=big), runs.collective(1, 400, 200, 0, launch_ns=None)]
        frame = runs.analysis(0, {"step0": gathers}).to_frame()
        assert frame["launch_ns"][0] == big

    def test_a_rank_without_collectives_is_an_empty_frame_with_the_columns(self) -> None:
        frame = runs.analysis(0, {"step0": []}).to_frame()
        assert (len(frame), "exposed_ns" in frame.columns) == (0, True)

    def test_csv_has_the_same_rows_for_every_rank(self) -> None:
        rows = list(csv.DictReader(io.StringIO(render(runs.run_of_two(), None, "csv"))))
        assert len(rows) == 16
        assert rows[-1] | {} == rows[-1]
        assert (rows[-1]["rank"], rows[-1]["window"], rows[-1]["exposed_ns"], rows[-1]["streams"]) == (
            "1",
            "step1",
            "200000",
            "20",
        )
        assert rows[-1]["wait_ns"] == ""


class TestFiles:
    @pytest.mark.parametrize("extension", FORMATS)
    def test_the_extension_chooses_the_format(self, tmp_path: Path, extension: str) -> None:
        path = tmp_path / f"report.{extension.upper()}"
        write_report(runs.run_of_two(), path, runs.failing_verdict())
        assert path.read_text(encoding="utf-8") == render(runs.run_of_two(), runs.failing_verdict(), extension)
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize("extension", FORMATS)
    def test_no_name_in_a_trace_can_make_a_format_fail(self, tmp_path: Path, extension: str) -> None:
        path = tmp_path / f"report.{extension}"
        write_report(runs.nasty_run(), path, runs.nasty_verdict())
        text = path.read_text(encoding="utf-8")
        assert not set(text) & {"\x1b", "\x00", "\ud800"} or extension == "csv"
        if extension not in ("json", "csv"):
            assert "/secret/folder" not in text

    def test_an_unknown_extension_or_format_lists_the_known_ones(self, tmp_path: Path) -> None:
        for name in ("report.pdf", "report"):
            with pytest.raises(OverlapProbeError, match=rf"{name}: .*\.html.*\.csv"):
                write_report(runs.run_of_two(), tmp_path / name)
        with pytest.raises(OverlapProbeError, match=r"'pdf'.*html"):
            render(runs.run_of_two(), None, "pdf")

    def test_a_failure_leaves_the_old_file_and_no_temporary(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.txt"
        path.write_text("old")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OverlapProbeError, match=r"a\.txt: cannot be written: No space left on device; "):
            write_text(path, "new")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]

    def test_a_folder_or_a_file_in_the_way_is_a_clear_error(self, tmp_path: Path) -> None:
        with pytest.raises(OverlapProbeError, match="it is a folder"):
            write_text(tmp_path, "x")
        (tmp_path / "file").write_text("x")
        with pytest.raises(OverlapProbeError, match="cannot be written"):
            write_text(tmp_path / "file" / "a.txt", "x")
        with pytest.raises(
            OverlapProbeError, match=r"mistyped.a\.txt: cannot be written: there is no folder .*mistyped; "
        ):
            write_text(tmp_path / "mistyped" / "a.txt", "x")
        assert not (tmp_path / "mistyped").exists()
        with pytest.raises(OverlapProbeError, match="cannot be written"):
            write_text(tmp_path / ("x" * 400), "x")

    def test_a_link_keeps_pointing_to_the_new_content(self, tmp_path: Path) -> None:
        (tmp_path / "latest.txt").symlink_to(tmp_path / "real.txt")
        write_text(tmp_path / "latest.txt", "new")
        assert (tmp_path / "latest.txt").is_symlink()
        assert (tmp_path / "real.txt").read_text() == "new"

    def test_a_pipe_is_written_to_and_not_replaced(self) -> None:
        code = "from overlap_probe.render import write_text; write_text('/dev/stdout', 'through')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout == "through"
        assert Path("/dev/stdout").is_symlink()


def test_importing_the_package_loads_no_library_that_only_one_format_needs() -> None:
    heavy = ("matplotlib", "pandas", "jinja2", "rich")
    code = f"import sys, overlap_probe.render; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
