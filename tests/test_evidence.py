"""`scripts/gpu_evidence`: cases, tables, verdicts and comparisons; what it measures needs GPUs."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

from scripts.evidence import analysis, profilers, results, tables, verdicts
from scripts.evidence.cases import BATCH, PARTS, Case, cases_of

SCRIPT = ROOT / "scripts" / "gpu_evidence"
COPY = Case("linear", "fsdp_runtime", "copy_engine", "prefetch", BATCH)


def write_times(folder: Path, times: dict[Case, float], **more: Any) -> None:
    for case, device_us in times.items():
        results.write(folder, case, {"device_us": device_us, "host_us": 800.0, "units": 9, **more})


# Cases


def test_every_case_has_a_name_of_its_own_and_is_measured_once() -> None:
    cases = cases_of(list(PARTS), 8)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert COPY in PARTS["sweep"]
    assert COPY in PARTS["forward"]
    assert cases.count(COPY) == 1
    assert Case("linear", "fsdp_runtime", "copy_engine", "prefetch", BATCH, 2, 0, 2).name == (
        "linear_fsdp_runtime_copy_engine_prefetch_depth2_target0_hsdp2_4096"
    )


@pytest.mark.parametrize(("world", "there"), [(2, False), (3, False), (4, True), (5, False), (8, True)])
def test_hsdp_needs_two_replicas_of_two_ranks(world: int, there: bool) -> None:
    assert any(case.replicas == 2 for case in cases_of(["hsdp"], world)) == there


def test_the_sweep_has_what_the_question_asks_for() -> None:
    swept = [case for case in PARTS["sweep"] if case.gather == "copy_engine"]
    assert {case.target_length for case in swept if case.schedule == "implicit"} == {0, 1, 2, 3}
    assert {case.depth for case in swept if case.schedule == "prefetch"} == {1, 2, 3}


# Results


def test_of_all_ranks_the_slowest_counts_and_the_one_that_needs_most() -> None:
    ranks = [{"device_us": 10.0, "peak_bytes": 7, "host_us": 3.0}, {"device_us": 12.0, "peak_bytes": 5, "host_us": 2.0}]
    together = results.of_all_ranks(ranks)
    assert together == {"device_us": 12.0, "peak_bytes": 7, "host_us": 3.0, "device_us_by_rank": [10.0, 12.0]}
    assert results.of_all_ranks([{"device_us": 1.0}, {"error": "wrong"}]) == {"error": "wrong"}


def test_a_case_that_was_stopped_is_measured_again_and_one_that_took_its_processes_down_is_an_error(
    tmp_path: Path,
) -> None:
    results.write(tmp_path, COPY, results.BEGUN)
    assert results.settle(tmp_path, [COPY], stopped=True) == [COPY]
    assert not results.known(tmp_path, COPY)
    results.write(tmp_path, COPY, results.BEGUN)
    assert results.settle(tmp_path, [COPY], stopped=False) == [COPY]
    assert "error" in results.read(tmp_path, [COPY])[COPY]
    assert results.settle(tmp_path, [COPY], stopped=True) == []


# The table


def test_the_floor_is_the_first_gather_and_the_longer_of_the_rest() -> None:
    assert tables.floor(800, 2000) == 100 + 2000
    assert tables.floor(800, 500) == 100 + 700
    assert tables.floor(None, 500) is None


def test_ratios_are_to_the_same_gathers_floor_and_serial_run_and_to_the_best_fsdp2(tmp_path: Path) -> None:
    times = {
        Case("gather", "fsdp_runtime", "copy_engine"): 800,  # floor: 100 + max(1400, 700) = 1500
        Case("gemm", "torch", batch=BATCH): 1400,
        COPY: 1650,
        Case("linear", "fsdp_runtime", "copy_engine", "serial", BATCH): 2200,
        Case("linear", "fsdp2", "process_group", "implicit", BATCH): 3300,
        Case("linear", "fsdp2", "process_group", "prefetch", BATCH): 4000,
        Case("linear", "fsdp_runtime", "copy_engine", "prefetch", BATCH, 2): 1,  # of the sweep: in no row of this
    }
    write_times(tmp_path, times)
    lines = [line.split() for line in tables.table(tmp_path, 2, ["forward"]).splitlines()]
    assert ["fsdp_runtime", "copy_engine", "prefetch", "1650", "800", "1.100", "0.750", "0.500"] in lines
    assert lines[-1][:2] == ["not", "reached:"]


def test_the_step_says_how_much_faster_and_how_much_memory(tmp_path: Path) -> None:
    ours = Case("linear_step", "fsdp_runtime", "copy_engine", "prefetch", BATCH)
    write_times(tmp_path, {ours: 5000}, peak_bytes=96 << 20, reserved_bytes=512 << 20, device_bytes=600 << 20)
    write_times(tmp_path, {Case("linear_step", "fsdp2", "process_group", "implicit", BATCH): 6000})
    lines = [line.split() for line in tables.table(tmp_path, 2, ["step"]).splitlines()]
    # time, unaided, 800 us of host for 8 units, peak, reserved, device, 6000 / 5000
    assert ["fsdp_runtime", "copy_engine", "prefetch", "5000", "-", "100", "96", "512", "600", "1.200"] in lines


def test_the_sweep_gives_memory_in_units_beyond_the_unsharded_forward(tmp_path: Path) -> None:
    deep = Case("linear", "fsdp_runtime", "copy_engine", "prefetch", BATCH, 3)
    write_times(tmp_path, {deep: 1500}, peak_bytes=(2 + 4.5) * 32 * 2**20)
    write_times(tmp_path, {Case("gemm", "torch", batch=BATCH): 1400}, peak_bytes=2 * 32 * 2**20, unit_bytes=32 * 2**20)
    results.write_json(
        tmp_path / "analysis" / f"{deep.name}.json", {"forward": said(exposed_us=50.4, hidden=0.875, causes={})}
    )
    lines = [line.split() for line in tables.table(tmp_path, 2, ["sweep"]).splitlines()]
    assert ["copy_engine", "prefetch", "1", "3", "1500", "50", "88", "%", "4.50"] in lines


def said(**more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("gathers", "expected", "found", "reduces", "reduces_expected", "reduces_found"), 6)
    times = dict.fromkeys(("hidden", "exposed_us", "wait_us", "transfer_us", "reduces_hidden"), 1.0)
    return {**counts, **times, "causes": {}, **more}


def test_unknown_causes_are_counted_over_all_cases(tmp_path: Path) -> None:
    for name, causes in (("a", {"sm_contention": 37, "unknown": 1}), ("b", {"first": 1, "unknown": 1})):
        results.write_json(tmp_path / "analysis" / f"{name}.json", {"forward": said(causes=causes)})
    text = tables.table(tmp_path, 2, ["analysis"])
    assert "exposed gathers with a cause: 40; unknown: 2, 1 in 20" in text
    assert "causes of all: 37 sm_contention, 2 unknown, 1 first" in text


def test_what_is_not_there_is_said_once_with_the_cases_that_wanted_it(tmp_path: Path) -> None:
    cases = [Case("linear_step", "megatron_fsdp2", "process_group", "prefetch", b) for b in (BATCH,)]
    cases.append(Case("linear", "megatron_fsdp2", "process_group", "prefetch", BATCH))
    for case in cases:
        results.write(tmp_path, case, {"unavailable": "no megatron"})
    results.write(tmp_path, COPY, {"error": "wrong result"})
    lines = tables.table(tmp_path, 2, ["analysis"]).splitlines()
    assert lines[-2] == f"{COPY.name}: wrong result"
    assert lines[-1] == f"no megatron: {cases[0].name}, {cases[1].name}"


# What the traces say


def test_the_analysis_of_both_ranks_counts_overlaps_and_causes_and_goes_on(tmp_path: Path) -> None:
    traces = tmp_path / "traces" / "ring"
    traces.mkdir(parents=True)
    for rank in (0, 1):
        source = ROOT / "tests" / "data" / f"fsdp2_llama8_b4s1024_rank{rank}.json.gz"
        (traces / f"rank{rank}.json.gz").write_bytes(source.read_bytes())
    (tmp_path / "traces" / "broken").mkdir()
    with gzip.open(tmp_path / "traces" / "broken" / "rank0.json.gz", "wt") as file:
        file.write("{")
    assert analysis.main([str(tmp_path)]) == 0
    found = analysis.read(tmp_path)
    assert "error" in found["broken"]
    forward = found["ring"]["forward"]
    assert forward["ranks"] == 2
    assert forward["gathers"] == sum(forward["mechanisms"].values()) > 0
    assert 0 < forward["found"] <= forward["expected"]
    assert forward["causes"]["late_launch"] > 0
    assert forward["wait_us"] > forward["transfer_us"] > 0  # rank 0 waits for rank 1, which is late
    assert found["ring"]["backward"]["reduces"] > 0
    assert (tmp_path / "reports" / "ring.html").exists()
    results.write_json(tmp_path / "analysis" / "ring.json", {"forward": said()})
    assert analysis.main([str(tmp_path)]) == 0
    assert analysis.read(tmp_path)["ring"] == {"forward": said()}, "made again though it was there"


# Verdicts


def ended(code: int | None, *windows: tuple[float | None, float]) -> dict[str, Any]:
    return {"exit": code, "seconds": 1.0, "windows": {f"rank 0 {n}": list(w) for n, w in enumerate(windows)}}


def test_verdicts_are_counted_on_from_an_earlier_file(tmp_path: Path) -> None:
    file, asked = tmp_path / "verdicts.json", []

    def run(kind: str, folder: Path, on_steps: Callable[[], None]) -> dict[str, Any]:
        folder.mkdir()
        asked.append(kind)
        return ended(0, (3, 3)) if len(asked) != 2 else ended(1, (2, 3))

    far = time.monotonic() + 1000
    verdicts.collect(verdicts.Ledger.of(file), "default", 2, 1, far, run)
    verdicts.collect(verdicts.Ledger.of(file), "default", 4, 1, far, run)
    summary = json.loads(file.read_text())["summary"]
    assert asked == ["default"] * 4
    assert summary["default"] == {
        "runs": 4,
        "as_wanted": 3,
        "windows": 4,
        "windows_held": 3,
        "at_once": 1,
        "seconds": 4.0,
    }
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["default1", "default2"], "the first, and the one that was not as wanted"
    assert ["default", "4", "3", "3/4", "1", "1.0"] in [line.split() for line in tables.verdicts_section(file)]


def test_controls_run_several_at_a_time_and_say_so(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=10)

    def run(kind: str, folder: Path, on_steps: Callable[[], None]) -> dict[str, Any]:
        together.wait()  # hangs, and breaks, unless three run at a time
        return ended(1, (0, 3))

    ledger = verdicts.Ledger.of(tmp_path / "verdicts.json")
    verdicts.collect(ledger, "serial", 6, 3, time.monotonic() + 1000, run)
    assert [run["at_once"] for run in ledger.runs] == [3] * 6
    assert sorted(run["number"] for run in ledger.runs) == [1, 2, 3, 4, 5, 6]


def test_default_runs_start_when_the_one_before_steps_and_end_beside_it(tmp_path: Path) -> None:
    said: list[str] = []
    second_began = threading.Event()

    def run(kind: str, folder: Path, on_steps: Callable[[], None]) -> dict[str, Any]:
        number = folder.name.removeprefix("default")
        said.append(f"{number} imports")
        if number == "2":
            second_began.set()
        time.sleep(0.05)
        said.append(f"{number} steps")
        on_steps()
        on_steps()
        assert second_began.wait(10), "the second run did not start beside the first"
        return ended(0, (3, 3))

    ledger = verdicts.Ledger.of(tmp_path / "verdicts.json")
    verdicts.collect(ledger, "default", 4, 2, time.monotonic() + 1000, run)
    assert said == [f"{number} {what}" for number in (1, 2, 3, 4) for what in ("imports", "steps")]
    assert ledger.count("default") == 4


def test_no_verdict_is_begun_without_time_for_it_and_none_counts_that_was_stopped(tmp_path: Path) -> None:
    ledger = verdicts.Ledger.of(tmp_path / "verdicts.json")
    verdicts.collect(ledger, "default", 5, 1, time.monotonic() + 1, lambda *_: ended(0, (3, 3)))
    assert ledger.runs == [], "one was begun"
    end = time.monotonic() + 0.2
    ledger.runs.append({"kind": "default", "seconds": 0.1})  # so it is begun

    def stopped(kind: str, folder: Path, on_steps: Callable[[], None]) -> dict[str, Any]:
        time.sleep(0.25)
        return ended(None)

    verdicts.collect(ledger, "default", 5, 1, end, stopped)
    assert len(ledger.runs) == 1


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    assert verdicts.run_once(tmp_path / "run", 2, (), seconds=0.2)["exit"] is None


# Two recorders


def recorded(hidden_us: float, found: int = 3) -> dict[str, Any]:
    gathers = {"count": 5, "hidden_ns": round(hidden_us * 1e3), "exposed_ns": 10_000}
    phase = {"all_gather": gathers, "expected": 3, "found": found}
    window = {"forward": phase, "backward": phase}
    windows = {"whole": {}, **{f"ProfilerStep#{step}": window for step in (2, 3, 4)}}
    result = {"traces": [{"rank": rank, "windows": windows} for rank in (0, 1)]}
    return json.loads(json.dumps(result))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("nsys", "agree"), [(recorded(105), True), (recorded(115), False), (recorded(100, 2), False)])
def test_recorders_agree_if_counts_are_equal_and_hidden_times_close(nsys: dict[str, Any], agree: bool) -> None:
    compared = profilers.compare(recorded(100), nsys)
    assert compared["agrees"] == agree
    assert len(compared["rows"]) == 4
    assert profilers.compare(nsys, nsys)["agrees"]


def test_a_window_in_which_a_recorder_found_fewer_is_said_and_does_not_decide(tmp_path: Path) -> None:
    nsys, torch = recorded(100), recorded(100)
    torch["traces"][0]["windows"]["ProfilerStep#3"]["backward"]["found"] = 1
    compared = profilers.compare(torch, nsys)
    assert compared["agrees"]
    assert [row["others"] for row in compared["rows"]] == [0, 1, 0, 0]
    results.write_json(tmp_path / "comparison.json", compared)
    assert "     1 of the windows found other than the median" in tables.profilers_section(tmp_path)
    torch["traces"][0]["windows"]["ProfilerStep#3"]["backward"]["all_gather"]["count"] = 4
    assert not profilers.compare(torch, nsys)["agrees"]


def test_a_rank_that_one_recorder_lacks_is_no_agreement(tmp_path: Path) -> None:
    nsys = recorded(100)
    del nsys["traces"][1]
    compared = profilers.compare(recorded(100), nsys)
    assert not compared["agrees"]
    results.write_json(tmp_path / "comparison.json", compared)
    text = "\n".join(tables.profilers_section(tmp_path))
    assert "   1 forward    differ            100        -      -" in text
    assert text.endswith("they do not agree")


def test_the_recorders_runs_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def run(folder: Path, nproc: int, arguments: tuple[str, ...], seconds: float) -> dict[str, Any]:
        asked.append((folder.name, arguments))
        if len(asked) == 2:
            return ended(None)
        results.write_json(folder / "result.json", recorded(100))
        return ended(0, (3, 3))

    monkeypatch.setattr(profilers, "why_not", lambda: None)
    monkeypatch.setattr(profilers, "run_once", run)
    profilers.collect(tmp_path / "profilers", 2, ("--device", "cpu"), time.monotonic() + 100)
    assert not (tmp_path / "profilers" / "comparison.json").exists(), "a run that was stopped says nothing"
    profilers.collect(tmp_path / "profilers", 2, ("--device", "cpu"), time.monotonic() + 100)
    assert [name for name, _ in asked] == ["torch", "nsys", "nsys", "nsys_small"]
    assert asked[0][1] == ("--profiler", "torch", "--steps", "20", "--device", "cpu")
    assert asked[2][1] == ("--profiler", "nsys", "--steps", "20", "--device", "cpu")
    assert tables.profilers_section(tmp_path / "profilers")[-1] == "they agree"


def test_without_nsys_the_comparison_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    profilers.why_not.cache_clear()
    profilers.collect(tmp_path / "profilers", 2, (), time.monotonic() + 1000)
    profilers.why_not.cache_clear()
    assert tables.profilers_section(tmp_path / "profilers")[-1] == "nsys is not on the PATH"


# The command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--parts", "step,nothing"], "got nothing"), (["--nproc", "2"], "expected 2 GPUs or more")],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    if "--nproc" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.device_count() >= 2:
            arguments = ["--nproc", "1"]
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_a_part_without_time_is_named_as_not_reached(tmp_path: Path) -> None:
    command = [
        sys.executable,
        SCRIPT,
        tmp_path,
        "--device",
        "cpu",
        "--nproc",
        "2",
        "--minutes",
        "0",
        "--parts",
        "llama",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "not reached: llama_fsdp_runtime_copy_engine_prefetch" in done.stdout
    assert (tmp_path / "table.txt").read_text() == done.stdout


# What is measured, with one rank on the CPU


def test_the_device_sleeps_longer_than_the_slowest_rank_s_host_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from scripts.evidence import device

    slept: list[float] = []

    def once(work: object, sleep_us: float) -> tuple[float, float]:
        slept.append(sleep_us)
        return 5.0, 900_000.0 if len(slept) == 1 else 20_000.0 + len(slept)  # the first makes communicators

    for name, value in {"TYPE": "cpu", "once": once, "synchronize": lambda: None}.items():
        monkeypatch.setattr(device, name, value)
    monkeypatch.setattr(device.dist, "barrier", lambda: None)
    monkeypatch.setattr(device, "largest", lambda value: value)
    alone = device.times(lambda: None)
    assert alone["slept_us"] == 1.5 * 20_004  # what the last of 4 warm-ups took
    assert slept == [15_000.0] * 4 + [1.5 * 20_004] * 20
    monkeypatch.setattr(device, "largest", lambda value: max(value, 60_000.0))  # another rank's
    assert device.times(lambda: None)["slept_us"] == 60_000.0
    assert device.times(lambda: None, ahead=False)["slept_us"] == 0


MEASURE = """
import sys, torch, torch.distributed as dist
from collections.abc import Callable
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from scripts.evidence import measure
from scripts.evidence.cases import BATCH, Case

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "lazy" in sys.argv:  # an optimizer that leaves one of the sharded weights as it was
    class Lazy(torch.optim.SGD):
        def __init__(self, parameters, **options):
            super().__init__(list(parameters)[1 if options.pop("foreach", False) else 0 :], **options)
    torch.optim.SGD = Lazy
mesh = init_device_mesh("cpu", (1,))
case = Case("linear_step", "fsdp_runtime", "process_group", "prefetch", BATCH)
print(measure.measure(case, mesh, Path(sys.argv[1]))["error_of_step"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["right", "lazy"])
def test_a_step_that_leaves_a_weight_as_it_was_is_found_out(tmp_path: Path, optimizer: str) -> None:
    pytest.importorskip("torch")
    environment = verdicts.environment() | {"EVIDENCE_DEVICE": "cpu"}
    command = [sys.executable, "-c", MEASURE, tmp_path, optimizer]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if optimizer == "right":
        assert float(done.stdout.splitlines()[-1]) < 1e-5, done.stderr
        assert (tmp_path / "rank0.json.gz").exists()
    else:
        assert "AssertionError: the output after a step is off by" in done.stderr
