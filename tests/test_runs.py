"""What becomes of a finished launch: the parts of a run that need no ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call

from overlap_probe import launch, runs


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
