"""The pytest plugin: fixtures that read or make a run for a test to hold against checks (design, section 7).

The idea: whatever goes wrong raises, so that a trace that cannot be read or a rank that died fails the test, and
nothing is ever skipped. Every pytest in a user's environment loads this module, so it imports what a test needs when a
test needs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from overlap_probe.checked import CheckedRun
    from overlap_probe.options import Options

OverlapTrace: TypeAlias = "Callable[..., CheckedRun]"
"""Type of the fixture `overlap_trace`."""

OverlapRun: TypeAlias = "Callable[..., CheckedRun]"
"""Type of the fixture `overlap_run`."""


@pytest.fixture
def overlap_trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OverlapTrace:
    """Read traces: overlap_trace(path, **options).check('overlaps >= auto', ...).

    The path is a trace, a folder with one trace a rank, or a list of either. Options are those of `overlap_probe
    analyze`: rules, window, min_overlap, unit_labels, what_if, rank.
    """
    folders = _Folders(request, tmp_path_factory)

    def read(path: str | Path | Sequence[str | Path], **options: Any) -> CheckedRun:
        __tracebackhide__ = True
        from overlap_probe import analyze_run
        from overlap_probe.checked import CheckedRun

        with _OwnErrors():
            _refuse_unknown("overlap_trace", options, (*_READING, "rank"))
            rank: int | None = options.pop("rank", None)
            run = analyze_run(path, _options(**options))
        if rank is not None:
            if len(run.ranks) != 1:
                raise ValueError(f"rank: names the rank of one trace, and there are {len(run.ranks)}")
            run = replace(run, ranks=(replace(run.ranks[0], rank=rank),))
        return CheckedRun(run, folders.next(), folders.kept)

    return read


@pytest.fixture
def overlap_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OverlapRun:
    """Run under the profiler: overlap_run(target, nproc=2, **options).check('overlaps >= auto', ...).

    The target is a function at the top of a module, or 'module:function'; every rank calls it. Options are those of
    `overlap_probe run`: warmup, steps, timeout, retries, script, schedule, window, ...; with neither a target nor a
    script the built-in workload runs.
    """
    folders = _Folders(request, tmp_path_factory)

    def launch(target: Callable[[], Any] | str | None = None, nproc: int = 2, **options: Any) -> CheckedRun:
        __tracebackhide__ = True
        from overlap_probe import LaunchError
        from overlap_probe import launch as launcher
        from overlap_probe.checked import CheckedRun
        from overlap_probe.runs import Attempts
        from overlap_probe.worker import target_name

        if launcher.is_rank():
            raise LaunchError("overlap_run: starts ranks of its own, but RANK is set; run pytest without a launcher")
        with _OwnErrors():
            known = {field.name for field in fields(launcher.LaunchOptions)} - {"target", "nproc", "out"}
            _refuse_unknown("overlap_run", options, (*_READING, *sorted(known)))
            reading = _options(**{name: options.pop(name) for name in _READING if name in options})
            name = target_name(target) if callable(target) else target
            asked = launcher.LaunchOptions(nproc=nproc, target=name, out=str(folders.next()), **options)
            attempts = Attempts(asked, reading, print, partial(_alone, tmp_path_factory))
            attempts.record()
        return CheckedRun(attempts.run, attempts.folder, folders.kept, attempts)

    return launch


_READING = ("rules", "window", "min_overlap", "unit_labels", "what_if")


def _refuse_unknown(fixture: str, options: dict[str, Any], known: Sequence[str]) -> None:
    """Raise OverlapProbeError, which lists the known options, where a test gives another one."""
    __tracebackhide__ = True
    from overlap_probe import OverlapProbeError

    if unknown := [name for name in options if name not in known]:
        raise OverlapProbeError(f"{fixture}: no option {unknown[0]!r}; expected one of {', '.join(known)}")


def _options(
    rules: Sequence[str] = (),
    window: str | None = None,
    min_overlap: str = "0",
    unit_labels: Sequence[str] = (),
    what_if: bool = False,
) -> Options:
    from overlap_probe import Options
    from overlap_probe.checks import parse_duration_ns

    return Options.parse(rules, window, parse_duration_ns("min_overlap", min_overlap), unit_labels, what_if)


class _OwnErrors:
    """A context in which an error of ours, which says all there is to say, loses its way through this package.

    So pytest shows the test's own line with it. (`contextlib.contextmanager` would give the traceback back.)
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        __tracebackhide__ = True
        from overlap_probe import OverlapProbeError

        if isinstance(error, OverlapProbeError):
            raise error.with_traceback(None) from None


@contextlib.contextmanager
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of pytest-xdist take turns: ranks that run beside other ranks would measure each other.

    An interrupt of the launch is one of pytest: Ctrl-C stops all tests, not one.
    """
    __tracebackhide__ = True
    from overlap_probe.launch import LaunchInterrupted

    with contextlib.ExitStack() as held:
        if "PYTEST_XDIST_WORKER" in os.environ:
            import fcntl

            lock = held.enter_context((tmp_path_factory.getbasetemp().parent / "overlap_run.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        except LaunchInterrupted as stopped:
            signal.raise_signal(stopped.signal_number)
            raise


class _Folders:
    """Folders for one test's runs and reports: below the folder that the user keeps, else pytest's temporary ones."""

    def __init__(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        keep: str | None = request.config.getoption("--overlap-report-dir")
        self.kept = keep is not None
        self._base = None if keep is None else request.config.invocation_params.dir / keep
        self._test, self._fixture, self._count = request.node.nodeid, str(request.fixturename), 0
        self._temporary = tmp_path_factory

    def next(self) -> Path:
        if self._base is None:
            return self._temporary.mktemp(self._fixture)
        self._count += 1
        readable = re.sub(r"[^\w.-]+", "-", self._test).strip("-.")[:100]
        unique = (
            f"{zlib.crc32(self._test.encode()):08x}"  # two tests may read the same, and a name has a longest length
        )
        return self._base / f"{readable}-{unique}" / f"{self._fixture}{self._count}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("overlap_probe", "overlap_probe").addoption(
        "--overlap-report-dir",
        metavar="DIR",
        help="Keep the runs and reports of tests that use overlap_run or overlap_trace below DIR, also of those that "
        "pass. [default: pytest's temporary folder, and reports only of checks that do not hold]",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "overlap_run: launches ranks under the profiler; set on every test that uses the fixture overlap_run, "
        "so -m 'not overlap_run' leaves them out",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    if "overlap_run" in getattr(item, "fixturenames", ()):
        item.add_marker("overlap_run")
