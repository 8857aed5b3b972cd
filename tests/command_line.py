"""Calls the command line in this process, as a shell would: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from overlap_probe.cli import main

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="starts ranks, which need torch")


@dataclass(frozen=True)
class Called:
    """How a command ended."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Called:
    """The command with these arguments (paths may be paths)."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments], prog_name="overlap_probe")
    assert isinstance(leaving.value.code, int)
    return Called(leaving.value.code, *capsys.readouterr())
