"""What becomes of a finished launch: the parts of a run that need no ranks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call

from overlap_probe import launch, runs
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
