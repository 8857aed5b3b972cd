"""The pytest plugin, as a user's pytest loads it: what passes, what fails and with which words, and what it costs.

The idea: each test writes a small test file of a user and looks at how that ends. Traces are real ones of two GPUs; one
test launches ranks, the others put recorded traces in the place of a launch.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from command_line import needs_torch
from documents import ROOT, blocks

pytest_plugins = ["pytester"]
"""It forgets the modules that a test imported: nothing here may import torch, which cannot be imported twice."""

DATA = Path(__file__).parent / "data"
RING = [str(DATA / f"linear8_ring_prefetch_rank{rank}.json.gz") for rank in (0, 1)]
"""Two ranks, three steps, 8 all-gathers in each, of which 6 or more overlap a GEMM; no labels of units."""
LATE = [str(DATA / f"fsdp2_llama8_b4s1024_rank{rank}.json.gz") for rank in (0, 1)]
"""Two ranks, two steps, 7 overlaps expected in each; rank 1 has none in either, as its host is late."""

INSTALLED = bool(entry_points(group="pytest11", name="overlap_probe"))
LOADED = () if INSTALLED else ("-p", "overlap_probe.pytest_plugin")
"""How the plugin gets loaded: by its entry point, or from this checkout."""

FAKE_LAUNCH = f"""
    import shutil, signal, time, pytest
    from pathlib import Path
    import overlap_probe.launch
    from overlap_probe.launch import RunRecord

    @pytest.fixture(autouse=True)
    def launched(monkeypatch):
        def run(options, on_progress):
            began = time.monotonic()
            if options.target == "mine:interrupted":
                raise overlap_probe.launch.LaunchInterrupted(signal.SIGINT, "stopped by SIGINT")
            folder = Path(options.out)
            folder.mkdir(parents=True, exist_ok=True)
            for trace in {RING!r}:
                shutil.copy(trace, folder)
            time.sleep(0.3)
            with open(Path(__file__).parent / "launches.txt", "a") as log:
                log.write(f"{{began}} {{time.monotonic()}} {{options.target}}\\n")
            return RunRecord("now", 1.0, "mine", {{}}, 2, 1, {{}}, [], "nccl", folder=folder, ranks=(0, 1))
        monkeypatch.setattr(overlap_probe.launch, "run", run)
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(variable, raising=False)


def outcome(pytester: pytest.Pytester, *arguments: str) -> tuple[dict[str, int], str]:
    """How the tests of the folder end, and what pytest prints."""
    done = pytester.runpytest_subprocess(*LOADED, *arguments, timeout=240)
    return done.parseoutcomes(), done.stdout.str()


def answer(pytester: pytest.Pytester, question: str) -> str:
    """What pytest prints that runs no test."""
    return pytester.runpytest_subprocess(*LOADED, question, timeout=60).stdout.str()


def test_loading_the_plugin_costs_no_more_than_the_analysis_core() -> None:
    heavy = ("torch", "matplotlib", "pandas", "click", "jinja2", "rich", "sqlalchemy")
    code = f"import sys, overlap_probe.pytest_plugin; print(*sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    declared = re.search(r"\[project\.entry-points\.pytest11\]\n(.*)\n", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert declared
    assert declared[1] == 'overlap_probe = "overlap_probe.pytest_plugin"'


def test_options_markers_and_fixtures_are_explained(pytester: pytest.Pytester) -> None:
    for question, answers in {
        "--help": ("overlap_probe:", "--overlap-report-dir=DIR"),
        "--markers": ("@pytest.mark.overlap_run: launches ranks",),
        "--fixtures": (
            "overlap_trace",
            "overlap_trace(path, **options).check",
            "overlap_run(target, nproc=2, **options)",
        ),
    }.items():
        text = answer(pytester, question)
        assert all(words in text for words in answers), text


def test_the_example_of_the_document_is_collected(pytester: pytest.Pytester) -> None:
    (example,) = blocks((ROOT / "overlap_probe" / "docs" / "pytest.md").read_text("utf-8"), "python")
    pytester.makepyfile(example)
    text = answer(pytester, "--collect-only")
    assert re.findall(r"<Function (\w+)>", text) == re.findall(r"def (test_\w+)", example)
    assert len(re.findall("overlap_run|overlap_trace", example)) >= 5


def test_checks_that_hold_pass_and_leave_no_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"""
        def test_holds(overlap_trace):
            run = overlap_trace({RING})
            run.check("overlaps >= 6", "hidden >= 50%")
            run.check("hidden >= 80%", at_least="1/3")
            assert not list(run.folder.iterdir())
            assert [rank.rank for rank in run.run.ranks] == [0, 1]
        def test_options_are_those_of_the_command_line(overlap_trace):
            copies = overlap_trace({str(DATA / "linear8_p2p_inplace_implicit_rank0.json.gz")!r}, rank=5,
                                   min_overlap="1us", window="step[01]", rules=["all_gather=Memcpy PtoP"])
            copies.check("overlaps >= 6")
            assert copies.run.ranks[0].rank == 5
            assert list(copies.run.ranks[0].windows) == ["whole", "step0", "step1"]
        def test_negative_control(overlap_trace):
            overlap_trace({LATE}).check_fails("overlaps >= auto", "backward.reduce_scatter.overlaps >= auto")
        """)
    assert outcome(pytester)[0] == {"passed": 3}


def test_a_check_that_does_not_hold_shows_rank_collectives_causes_and_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"""
        def test_overlap(overlap_trace):
            overlap_trace({LATE}).check("overlaps >= auto", "hidden <= 100%")
        """)
    counts, text = outcome(pytester)
    assert counts == {"failed": 1}
    shown = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    assert re.match(r"overlap_probe\S+: FAIL: overlaps >= auto: rank 1, ProfilerStep#0: 0 of 7 expected", shown[0])
    assert any(
        re.match(r"all_gather of model\.layers\.5: exposed 22\d\.\d us of .*; late_launch: ", line) for line in shown
    )
    assert any(line.startswith("also overlaps >= auto: rank 0, ProfilerStep#1: 3 of 7 expected") for line in shown)
    assert any(re.match(r"\d+ x late_launch: Cut host time before the gather", line) for line in shown)
    report = Path(shown[-1].removeprefix("report: "))
    assert "<html" in report.read_text("utf-8")
    assert json.loads((report.parent / "result.json").read_text())["verdict"]["status"] == "fail"
    assert "def check(" not in text  # the traceback ends at the user's own line


def test_an_error_shows_the_users_own_line_and_none_of_this_package(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        def test_reads(overlap_trace):
            overlap_trace("nowhere.json")
        def test_runs(overlap_run):
            overlap_run(script=("nowhere.py",))
        """)
    counts, text = outcome(pytester)
    assert counts == {"failed": 2}
    assert [line for line in text.splitlines() if line.startswith(">")] == [
        '>       overlap_trace("nowhere.json")',
        '>       overlap_run(script=("nowhere.py",))',
    ]


def test_what_cannot_be_read_or_answered_fails_and_is_never_skipped(pytester: pytest.Pytester, tmp_path: Path) -> None:
    cut_off = tmp_path / "cut_off.json.gz"
    cut_off.write_bytes(Path(RING[0]).read_bytes()[:9000])
    lacks_a_rank = tmp_path / "lacks_a_rank"
    lacks_a_rank.mkdir()
    (lacks_a_rank / "rank1.json.gz").write_bytes(Path(RING[1]).read_bytes())
    pytester.makepyfile(f"""
        import pytest
        def test_no_units(overlap_trace):
            overlap_trace({RING}).check("overlaps >= auto")
        def test_no_such_collective(overlap_trace):
            overlap_trace({RING}).check("reduce_scatter.hidden >= 0%")
        def test_a_rank_is_missing(overlap_trace):
            overlap_trace({str(lacks_a_rank)!r}).check("overlaps >= 1")
        def test_cut_off(overlap_trace):
            overlap_trace({str(cut_off)!r}).check("overlaps >= 1")
        def test_not_there(overlap_trace):
            overlap_trace("nowhere").check("overlaps >= 1")
        def test_no_check(overlap_trace):
            overlap_trace({RING}).check()
        def test_not_a_check(overlap_trace):
            overlap_trace({RING}).check("overlap > 1")
        def test_inconclusive_is_no_negative_control(overlap_trace):
            overlap_trace({RING}).check_fails("overlaps >= auto")
        def test_a_check_that_holds_is_no_negative_control(overlap_trace):
            overlap_trace({RING}).check_fails("hidden >= 99%", "overlaps >= 6")
        def test_another_check_that_fails_answers_for_none(overlap_trace):
            overlap_trace({RING}).check_fails("hidden >= 99%", "reduce_scatter.hidden >= 0%")
        def test_no_check_is_no_negative_control(overlap_trace):
            overlap_trace({RING}).check_fails()
        """)
    counts, text = outcome(pytester, "--tb=line")
    assert counts == {"failed": 11}
    for says in (
        "INCONCLUSIVE: overlaps >= auto: rank 0, step0: no label names a phase and units",
        "INCONCLUSIVE: reduce_scatter.hidden >= 0%: rank 0, step0: no reduce-scatters in this window",
        "INCONCLUSIVE: lacks_a_rank: no trace of rank 0 of 2",
        "cut_off.json.gz: ",
        "nowhere: ",
        "no check was given",
        "no metric 'overlap'",
        "was to fail here, and does not: overlaps >= 6",
        "Inconclusive: was to fail here, which cannot be told: reduce_scatter.hidden >= 0%",
    ):
        assert says in text, says
    assert "does not: overlaps >= auto" not in text  # nor does it say that the check holds


def test_reports_are_kept_apart_where_the_user_wants_them(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        import overlap_probe.checked

        def write(run, path, verdict):  # what is in a report is tested above
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(verdict.status)
        overlap_probe.checked.write_report = write
        """)
    pytester.makepyfile(f"""
        import pytest
        @pytest.mark.parametrize("name", ["a/b", "a:b", "x" * 300])
        def test_ring(overlap_trace, name):
            overlap_trace({RING}).check("overlaps >= 6")
        def test_twice(overlap_trace):
            overlap_trace({RING}).check("overlaps >= 6")
            overlap_trace({RING}).check("overlaps >= 6")
        """)
    assert outcome(pytester, "--overlap-report-dir=kept", "-n", "2")[0] == {"passed": 4}
    assert outcome(pytester, "--overlap-report-dir=kept", "-k", "a/b")[0] == {"passed": 1, "deselected": 3}
    kept = pytester.path / "kept"
    assert len(list(kept.iterdir())) == 4  # a test takes the same folder again
    reports = sorted(path.parent.name for path in kept.rglob("report.html"))
    assert reports == ["overlap_trace1"] * 4 + ["overlap_trace2"]


def test_workers_of_xdist_launch_one_after_another(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FAKE_LAUNCH)
    pytester.makepyfile("""
        import pytest
        def train():
            pass
        @pytest.mark.parametrize("at", range(4))
        def test_ring(overlap_run, at):
            run = overlap_run(train)
            run.check("overlaps >= 6")
            assert run.run.record["workload"] == "mine"
        """)
    assert outcome(pytester, "-n", "2")[0] == {"passed": 4}
    lines = [line.split() for line in (pytester.path / "launches.txt").read_text().splitlines()]
    times = sorted((float(began), float(ended)) for began, ended, _ in lines)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))
    assert all(target.endswith(":train") for _, _, target in lines)


def test_tests_that_launch_can_be_left_out(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FAKE_LAUNCH)
    pytester.makepyfile(f"""
        def test_launches(overlap_run):
            overlap_run("mine:train").check("overlaps >= 6")
        def test_reads(overlap_trace):
            overlap_trace({RING}).check("overlaps >= 6")
        """)
    assert outcome(pytester, "-m", "not overlap_run", "--strict-markers")[0] == {"passed": 1, "deselected": 1}
    assert outcome(pytester, "-m", "overlap_run")[0] == {"passed": 1, "deselected": 1}


def test_a_run_on_a_machine_that_was_too_busy_is_recorded_again(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(FAKE_LAUNCH)
    pytester.makepyfile("""
        from dataclasses import replace
        from overlap_probe import runs

        def test_starves(overlap_run, monkeypatch):
            analyze_run = runs.analyze_run
            def starved(*path_and_options):  # the first time no gather overlaps, for want of a core
                monkeypatch.setattr(runs, "analyze_run", analyze_run)
                run = analyze_run(*path_and_options)
                window = run.ranks[0].whole
                missed = tuple(replace(c, starved_ns=1) for c in window.collectives)
                none = {op: replace(totals, overlapped_by_gemm=0) for op, totals in window.by_op.items()}
                rank = replace(run.ranks[0], windows={"whole": replace(window, collectives=missed, by_op=none)})
                return replace(run, ranks=(rank, *run.ranks[1:]))
            monkeypatch.setattr(runs, "analyze_run", starved)
            run = overlap_run("mine:train")
            assert run.run.record["notes"] == []
            run.check("overlaps >= 6")
            assert run.run.record["notes"] == ["recorded again, the machine was too busy to judge: 1 x"]
        """)
    assert outcome(pytester)[0] == {"passed": 1}
    assert len((pytester.path / "launches.txt").read_text().splitlines()) == 2


IN_A_LAUNCH = """
        def test_interrupted(overlap_run):
            overlap_run("mine:interrupted")
"""
IN_AN_ANALYSIS = """
        def test_interrupted(overlap_run, monkeypatch):
            def interrupted(*_):
                raise KeyboardInterrupt
            monkeypatch.setattr("overlap_probe.runs.analyze_run", interrupted)
            overlap_run("mine:train")
"""
NEXT = """
        def test_next():
            raise AssertionError("it goes on")
"""


@pytest.mark.parametrize("interrupted", [IN_A_LAUNCH, IN_AN_ANALYSIS], ids=["launch", "analysis"])
def test_ctrl_c_stops_pytest(pytester: pytest.Pytester, interrupted: str) -> None:
    pytester.makeconftest(FAKE_LAUNCH)
    pytester.makepyfile(interrupted + NEXT)
    done = pytester.runpytest_subprocess(*LOADED, timeout=60)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    assert "it goes on" not in done.stdout.str()


def test_mistakes_of_a_launch_fail_before_anything_starts(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("""
        def test_lambda(overlap_run):
            overlap_run(lambda: None)
        def test_option(overlap_run):
            overlap_run("m:f", nproc=0)
        def test_unknown_option(overlap_run):
            overlap_run("m:f", workers=2)
        def test_unknown_option_of_a_trace(overlap_trace):
            overlap_trace("nowhere", windw="x")
        def test_launched_already(overlap_run, monkeypatch):
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", "2")
            overlap_run("m:f")
        """)
    counts, text = outcome(pytester, "--tb=line")
    assert counts == {"failed": 5}
    for says in (
        "lambda",
        "--nproc: expected a whole number, 1 or more, got 0",
        "overlap_run: no option 'workers'; expected one of rules, window, min_overlap, unit_labels, what_if, batch, ",
        "overlap_trace: no option 'windw'; expected one of rules, window, min_overlap, unit_labels, what_if, rank",
        "RANK is set",
    ):
        assert says in text, says


@pytest.mark.slow
@needs_torch
def test_a_function_of_the_test_file_runs_on_every_rank_and_its_death_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import os

        def train(steps=3):
            import torch, torch.distributed as dist
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.ones(4, 8)).sum().backward()
                dist.all_reduce(model.weight.grad)
                optimizer.step()
            dist.destroy_process_group()

        def die():
            if os.environ["RANK"] == "1":
                raise RuntimeError("out of luck")

        def test_trains(overlap_run):
            run = overlap_run(train, nproc=2, warmup=1, steps=2)
            assert [rank.rank for rank in run.run.ranks] == [0, 1]
            assert run.run.record["arguments"]["nproc"] == 2
            run.check_fails("all_reduce.hidden >= 99%")  # it waits for each all-reduce

        def test_dies(overlap_run):
            overlap_run(die).check("overlaps >= auto")
        """)
    counts, text = outcome(pytester)
    assert counts == {"passed": 1, "failed": 1}, text
    assert "rank 1 failed (RuntimeError: out of luck)" in text
