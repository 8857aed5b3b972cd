"""`capture` on one process: which steps it profiles, what it writes, and what it leaves behind when it cannot."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_probe import capture as public_capture
from overlap_probe.capture import CaptureError, capture, capture_optimizer_steps
from overlap_probe.whole_file import remove_unfinished

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERLAP_PROBE_OUT", raising=False)
    torch.set_num_threads(1)


def make_step(optimizers: int = 1) -> Callable[[], None]:
    model = torch.nn.Linear(8, 8)
    all_optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]

    def train() -> None:
        model(torch.ones(4, 8)).sum().backward()
        for optimizer in all_optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return train


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return list(json.load(file)["traceEvents"])


def step_names(path: Path) -> list[str]:
    return sorted(e["name"] for e in events(path) if e["name"].startswith("ProfilerStep#"))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_profiles_the_steps_after_the_warm_up_with_shapes(tmp_path: Path) -> None:
    train = make_step()
    with public_capture(tmp_path / "out", warmup=2, steps=3) as step:
        for _ in range(5):
            train()
            step()

    trace = tmp_path / "out" / "rank0.json.gz"
    assert files(tmp_path / "out") == ["rank0.json.gz"]
    assert step_names(trace) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    linears = [e for e in events(trace) if e["name"] == "aten::addmm"]
    assert len(linears) == 4  # one a step, and one of the lead-in, the last step of the warm-up
    assert all("Input Dims" in e["args"] for e in linears)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count")
def test_waits_for_a_core_are_recorded_in_the_steps_that_are_and_nothing_goes_on_after_them(tmp_path: Path) -> None:
    def samplers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "run_queue"]

    with capture(tmp_path, warmup=2, steps=1) as step:
        assert samplers() == []
        step()
        assert len(samplers()) == 1  # the lead-in is recorded
        step()
        step()
        assert samplers() == []
    with gzip.open(tmp_path / "rank0.json.gz", "rt") as file:
        said = json.load(file)["overlap_probe"]
    assert (said["process"], isinstance(said["waits"], dict)) == (os.getpid(), True)
    for mistake in (None, KeyError):
        with contextlib.suppress(KeyError), warnings.catch_warnings(), capture(tmp_path, warmup=1, steps=9) as step:
            warnings.simplefilter("ignore")
            step()
            assert len(samplers()) == 1
            if mistake:
                raise mistake
        assert samplers() == []


def test_trace_is_written_at_the_last_step_and_later_steps_do_nothing(tmp_path: Path) -> None:
    train = make_step()
    trace = tmp_path / "rank0.json.gz"
    with capture(tmp_path, warmup=1, steps=1) as step:
        train()
        step()
        assert not trace.exists()
        train()
        step()
        assert trace.exists()
        written = trace.read_bytes()
        for _ in range(3):
            train()
            step()
        assert not torch.autograd._profiler_enabled()
    assert trace.read_bytes() == written


def test_rank_comes_from_the_environment_without_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with capture(tmp_path, warmup=1, steps=1) as step:
        step()
        step()
    assert files(tmp_path) == ["rank3.json.gz"]


def test_run_folder_of_the_launcher_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_PROBE_OUT", str(tmp_path / "run"))
    with capture(tmp_path / "mine", warmup=1, steps=1) as step:
        step()
        step()
    assert files(tmp_path) == ["run"]


def test_loop_that_raises_writes_nothing_and_stops_the_profiler(tmp_path: Path) -> None:
    train = make_step()

    def loop() -> None:
        with capture(tmp_path / "out", warmup=1, steps=3) as step:
            for _ in range(3):
                train()
                step()
            raise KeyError("a user's own mistake")

    with pytest.raises(KeyError, match="a user's own mistake"):
        loop()
    assert files(tmp_path / "out") == []
    assert not torch.autograd._profiler_enabled()


def test_loop_that_ends_too_soon_writes_its_whole_steps_and_warns(tmp_path: Path) -> None:
    train = make_step()

    def loop() -> None:
        with capture(tmp_path, warmup=1, steps=3) as step:
            for _ in range(3):
                train()
                step()

    with pytest.warns(UserWarning, match="2 of 3 steps captured: 3 steps seen, of which the first 1"):
        loop()
    # The range that the profiler opened for a fourth step is there, but not as a step.
    assert step_names(tmp_path / "rank0.json.gz") == ["ProfilerStep#1", "ProfilerStep#2"]
    assert [e["name"] for e in events(tmp_path / "rank0.json.gz") if "unfinished" in e["name"]] == ["unfinished step"]


def test_loop_that_ends_in_the_warm_up_writes_nothing_and_warns(tmp_path: Path) -> None:
    def loop() -> None:
        with capture(tmp_path / "out", warmup=2, steps=3) as step:
            step()

    with pytest.warns(UserWarning, match="0 of 3 steps captured"):
        loop()
    assert files(tmp_path / "out") == []


@pytest.mark.parametrize(("warmup", "steps", "named"), [(-1, 3, "warmup"), (2, 0, "steps")])
def test_impossible_numbers_are_named(tmp_path: Path, warmup: int, steps: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"), capture(tmp_path, warmup=warmup, steps=steps):
        pass


def test_a_second_capture_inside_the_first_is_an_error_and_the_next_one_works(tmp_path: Path) -> None:
    def nested() -> None:
        with capture(tmp_path), capture(tmp_path):
            pass

    with pytest.raises(CaptureError, match="another capture"):
        nested()
    with capture(tmp_path, warmup=1, steps=1) as step:
        step()
        step()
    assert files(tmp_path) == ["rank0.json.gz"]


def test_another_profiler_in_the_way_is_an_error(tmp_path: Path) -> None:
    def inside() -> None:
        with capture(tmp_path, warmup=1, steps=1) as step:
            step()

    with torch.profiler.profile() as other, pytest.raises(CaptureError, match="another profiler"):
        inside()
    assert files(tmp_path) == []
    assert other.events() is not None


def test_profiler_that_starts_during_a_capture_is_an_error(tmp_path: Path) -> None:
    def inside() -> None:
        with capture(tmp_path, warmup=1, steps=3) as step:
            step()
            with torch.profiler.profile():
                step()
            step()

    with pytest.raises(CaptureError, match="another profiler"):
        inside()
    assert files(tmp_path) == []


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def run() -> None:
        with capture(tmp_path / "file", warmup=1, steps=1) as step:
            step()
            step()

    with pytest.raises(CaptureError, match=r"file/rank0\.json\.gz: cannot be written: .*; free some space or choose"):
        run()


def test_trace_that_the_profiler_could_not_write_whole_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where the profiler's writer stops without a word."""
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path).write_text('{"traceEvents": [')
    )

    def run() -> None:
        with capture(tmp_path, warmup=1, steps=1) as step:
            step()
            step()

    with pytest.raises(CaptureError, match="wrote only 17 bytes"):
        run()
    assert files(tmp_path) == []


def test_optimizer_steps_end_the_steps_of_a_loop_left_as_it_is(tmp_path: Path) -> None:
    train = make_step()
    with capture_optimizer_steps(tmp_path, warmup=2, steps=2):
        for _ in range(9):
            train()
    assert step_names(tmp_path / "rank0.json.gz") == ["ProfilerStep#2", "ProfilerStep#3"]


def test_only_the_first_optimizer_counts(tmp_path: Path) -> None:
    train = make_step(optimizers=2)

    def loop() -> None:
        with capture_optimizer_steps(tmp_path, warmup=2, steps=3):
            for _ in range(3):
                train()

    with pytest.warns(UserWarning, match="1 of 3 steps captured: 3 optimizer steps"):
        loop()


@pytest.mark.parametrize("before", [0, 3, 6], ids=["before the warm-up", "while recording", "after the trace"])
def test_explicit_capture_takes_over_from_optimizer_steps(tmp_path: Path, before: int) -> None:
    train = make_step()
    with warnings.catch_warnings(), capture_optimizer_steps(tmp_path, warmup=2, steps=3):
        warnings.simplefilter("error")
        for _ in range(before):
            train()
        with capture(tmp_path, warmup=1, steps=1) as step:
            for _ in range(3):
                train()
                step()
    assert step_names(tmp_path / "rank0.json.gz") == ["ProfilerStep#1"]


def test_what_a_rank_leaves_that_is_killed_while_it_exports_is_removed_by_its_launcher(tmp_path: Path) -> None:
    program = (
        "import os, sys, types; from pathlib import Path; from overlap_probe.torch_recording import _write_trace\n"
        "def export(path): Path(path).write_text('half'); os.kill(os.getpid(), 9)\n"
        "_write_trace(types.SimpleNamespace(export_chrome_trace=export), Path(sys.argv[1]), {})"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=120, env={**os.environ, "RANK": "1"}).returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    remove_unfinished(tmp_path / "rank1.json.gz")
    assert list(tmp_path.iterdir()) == []
