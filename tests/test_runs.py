"""What becomes of a finished launch: the parts of a run that need no ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call
from render_runs import analysis, starved, step

from overlap_probe import launch, runs
from overlap_probe.checked import CheckedRun, ChecksFailed
from overlap_probe.job import LaunchOptions
from overlap_probe.record import RunRecord
from overlap_probe.results import RunAnalysis
from overlap_probe.whole_file import remove_unfinished


def test_an_interrupt_while_analysing_says_where_the_traces_are_and_what_analyses_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", lambda *_: SimpleNamespace(leads=True, folder=tmp_path))
    monkeypatch.setattr(runs, "analyze_run", interrupted)
    done = call(capsys, "run", "-o", tmp_path / "out")
    assert done.code == 128 + signal.SIGINT
    assert done.err.splitlines()[-1] == (
        f"overlap_probe: interrupted while analysing: the traces in {tmp_path} are complete; "
        f"try overlap_probe analyze {tmp_path}"
    )


GOOD = RunAnalysis((analysis(0, {"step0": step(0, 0, 200, 200, 200)}),))
"""Three of three overlap."""
BUSY = starved((0, 200, 0, 200), 2)
"""Two of three: the third missed its overlap because a thread had no core."""
BAD = RunAnalysis((analysis(0, {"step0": step(0, 0, 200, 0, 200)}),))
"""Two of three, and no machine to blame."""


@dataclass
class Launches:
    """Stands in for the launcher: what comes of the next launches, and how many there were."""

    coming: list[RunAnalysis] = field(default_factory=list)
    count: int = 0

    def launch(self, options: LaunchOptions, _: object) -> RunRecord:
        folder = Path(options.out or "folder")
        folder.mkdir(exist_ok=True)
        self.count += 1
        return RunRecord("", 1.0, "built-in", {}, 2, 1, {}, [], "gloo", folder=folder, ranks=(0, 1))

    def analyse(self, *_: object) -> RunAnalysis:
        return self.coming[self.count - 1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(launch, "run", made.launch)
    monkeypatch.setattr(runs, "analyze_run", made.analyse)
    return made


@pytest.mark.parametrize(
    ("coming", "options", "count", "code"),
    [
        ([BUSY, GOOD], [], 2, 0),
        ([BUSY, BUSY, BAD], [], 3, 1),
        ([BUSY] * 3, [], 3, 3),  # two times again is the most, unless told otherwise
        ([BUSY] * 4, ["--retries", "3"], 4, 3),
        ([BUSY, GOOD], ["--retries", "0"], 1, 3),
        ([BAD, GOOD], [], 1, 1),  # what failed is never tried again
        ([BUSY, GOOD], ["--overlaps", "2"], 1, 0),  # holds without the one that starved
        ([BUSY, GOOD], ["--overlaps", "4"], 1, 1),  # and this would fail with it
        ([RunAnalysis(()), GOOD], [], 1, 3),  # no answer, but not for want of a core
        ([BUSY, GOOD], ["--check", "all_reduce.hidden >= 1%"], 1, 3),  # nor here: there is none, on no machine
    ],
)
def test_a_run_is_recorded_again_only_where_the_machine_was_too_busy_to_judge(
    coming: list[RunAnalysis],
    options: list[str],
    count: int,
    code: int,
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    launches.coming = coming
    monkeypatch.chdir(tmp_path)
    done = call(capsys, "run", *options)
    assert (done.code, launches.count) == (code, count), done.out + done.err
    assert done.err.count("too busy to judge: recording again") == count - 1
    (folder,) = tmp_path.iterdir()  # one, though no name was given
    notes = json.loads((folder / "result.json").read_text())["run"]["notes"]
    assert notes == ([f"recorded again, the machine was too busy to judge: {count - 1} x"] if count > 1 else [])


def test_a_script_that_cannot_run_twice_is_told_how_to_run_once(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def only_once(options: LaunchOptions, _: object) -> RunRecord:
        if launches.count:
            raise launch.LaunchError("rank 0 died: FileExistsError")
        return launches.launch(options, _)

    launches.coming = [BUSY]
    monkeypatch.setattr(launch, "run", only_once)
    done = call(capsys, "run", "-o", tmp_path / "out")
    said = done.err.splitlines()[-1]
    assert done.code == 2
    assert said.startswith("overlap_probe: rank 0 died: FileExistsError")
    assert "--retries 0" in said


def test_a_check_that_can_never_be_answered_is_no_reason_to_record_again(
    launches: Launches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches.coming = [BUSY, GOOD]
    monkeypatch.chdir(tmp_path)
    done = call(capsys, "run", "--check", "overlaps >= auto", "--check", "all_reduce.hidden >= 1%")
    assert (done.code, launches.count) == (3, 1)


def test_another_recording_has_the_surroundings_of_the_first(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches.coming = [BUSY, GOOD]
    seen = []

    def look(options: LaunchOptions, on_progress: object) -> RunRecord:
        seen.append((os.environ.get("SCHEDULE"), os.getcwd(), "modules" in sys.path))
        return launches.launch(options, on_progress)

    monkeypatch.setattr(launch, "run", look)
    with monkeypatch.context() as changed:
        changed.setenv("SCHEDULE", "serial")
        changed.chdir(tmp_path)
        changed.syspath_prepend("modules")
        attempts = runs.Attempts(LaunchOptions(out="out"))
        attempts.record()
    here = os.getcwd()
    assert attempts.judge(["overlaps >= auto"]).status == "pass"
    assert seen == [("serial", str(tmp_path), True)] * 2
    assert (os.environ.get("SCHEDULE"), os.getcwd(), "modules" in sys.path) == (None, here, False)


def test_a_negative_control_reports_one_recording_only(launches: Launches, tmp_path: Path) -> None:
    launches.coming = [BUSY, GOOD]  # of two steps, and of one
    attempts = runs.Attempts(LaunchOptions(out=str(tmp_path)))
    attempts.record()
    checked = CheckedRun(attempts.run, attempts.folder, attempts=attempts)
    with pytest.raises(ChecksFailed, match=r"does not: overlaps >= auto"):
        checked.check_fails("overlaps >= 4", "overlaps >= auto")
    findings = json.loads((tmp_path / "result.json").read_text())["verdict"]["findings"]
    assert [f["window"] for f in findings] == ["step0"] * 2


def test_where_others_start_ranks_too_a_run_is_not_recorded_again(
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    launches.coming = [BUSY, BUSY]
    several = call(capsys, "run", "--nnodes", "2", "--rdzv-endpoint", "localhost:1", "-o", tmp_path / "several")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    launched = call(capsys, "run", "-o", tmp_path / "launched")
    assert (several.code, launched.code, launches.count) == (3, 3, 2)


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "rank1.json.gz"
    trace.write_text("before")
    program = (
        "import os, sys; from overlap_probe.whole_file import whole_file\n"
        "with whole_file(sys.argv[1]) as unfinished: unfinished.write_text('half'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(trace)], check=False, timeout=60).returncode == -9
    (tmp_path / ".rank11.json.gz.x").mkdir()  # another rank's
    assert len(list(tmp_path.iterdir())) == 3
    remove_unfinished(trace)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".rank11.json.gz.x", "rank1.json.gz"]
    assert trace.read_text() == "before"
