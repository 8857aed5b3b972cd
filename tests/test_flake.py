"""`scripts/flake` counts rightly and goes on where it was; what it runs is tested elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

SCRIPT = ROOT / "scripts" / "flake"
loader = SourceFileLoader("flake", str(SCRIPT))
flake: Any = module_from_spec(spec_from_loader("flake", loader))  # type: ignore[arg-type]
loader.exec_module(flake)

SETTING = {"command": ["overlap_probe", "run"], "load": 1}


def run_of(test: str, verdict: str, **windows: int) -> dict[str, Any]:
    return {"test": test, "verdict": verdict, "seconds": 2.0, "windows": windows}


@pytest.mark.parametrize(
    ("test", "verdict", "wrong"),
    [
        *(("overlap", "pass", 0), ("overlap", "fail", 1), ("overlap", "inconclusive", 0), ("overlap", "error", 1)),
        *(("control", "pass", 1), ("control", "fail", 0), ("control", "inconclusive", 0), ("control", "error", 1)),
    ],
)
def test_a_verdict_is_wrong_unless_it_is_the_wanted_one_or_inconclusive(test: str, verdict: str, wrong: int) -> None:
    runs = [run_of(test, verdict)]
    assert flake.wrong(runs) == wrong
    assert flake.summary(runs)[test]["wrong"] == wrong
    assert flake.summary(runs)[test][verdict] == 1


def test_the_table_counts_verdicts_and_windows() -> None:
    runs = [run_of("overlap", "pass", **{"pass": 6}), run_of("overlap", "fail", **{"pass": 5, "fail": 1})]
    _, overlap, control = flake.table(runs).splitlines()
    assert overlap.split() == ["overlap", "2", "1", "1", "0", "0", "1", "11/12", "2.0", "s"]
    assert control.split() == ["control", "0", "0", "0", "0", "0", "0", "0/0", "-"]


def test_the_table_says_why_windows_were_inconclusive() -> None:
    busy = "{} of 3 gathers overlap a GEMM; but a thread waited {} for a core: this machine is too busy to say"
    runs = [
        run_of("overlap", "inconclusive", inconclusive=2) | {"reasons": {flake.reason(busy.format(2, "61.25 ms")): 2}},
        run_of("overlap", "inconclusive", inconclusive=1) | {"reasons": {flake.reason(busy.format(1, "1.2 s")): 1}},
    ]
    *_, why = flake.table(runs).splitlines()
    assert why == f"overlap: 3 windows inconclusive: {busy.format('#', '#').replace('3', '#')}"


def test_a_run_keeps_the_reasons_of_its_inconclusive_windows(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    findings = [
        *({"status": "inconclusive", "message": f"waited {ms} ms for a core"} for ms in (61, 7.5)),
        *({"status": status, "message": "3 of 3"} for status in ("pass", "fail")),
    ]
    result = json.dumps({"verdict": {"findings": findings}})
    fake.write_text(f"#!/bin/sh\ncd {tmp_path} && mkdir overlap && echo '{result}' > overlap/result.json\nexit 3\n")
    fake.chmod(0o755)
    made = flake.launcher(str(fake), [], tmp_path)("overlap")
    assert made["windows"] == {"inconclusive": 2, "pass": 1, "fail": 1}
    assert made["reasons"] == {"waited # for a core": 2}


def test_the_tests_run_in_turn_and_a_stopped_hunt_goes_on(tmp_path: Path) -> None:
    file, asked = tmp_path / "new" / "flake.json", []

    def run(test: str) -> dict[str, Any]:
        asked.append(test)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return {"verdict": flake.WANTED[test], "seconds": 1.0}

    with pytest.raises(KeyboardInterrupt):
        flake.hunt(run, 3, SETTING, file)
    assert asked == ["overlap", "control", "overlap", "control"]
    assert len(json.loads(file.read_text())["runs"]) == 3
    runs = flake.hunt(run, 3, SETTING, file)
    assert asked[4:] == ["control", "overlap", "control"]
    assert json.loads(file.read_text())["runs"] == runs
    assert {test: found["runs"] for test, found in flake.summary(runs).items()} == {"overlap": 3, "control": 3}
    assert flake.hunt(run, 3, SETTING, file) == runs
    assert len(asked) == 7
    with pytest.raises(SystemExit, match="choose another file"):
        flake.hunt(run, 3, {**SETTING, "load": 2}, file)


def test_a_run_is_judged_by_its_exit_code_if_it_left_a_result(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    write = f"mkdir -p $out && echo '{json.dumps({'verdict': {'findings': []}})}' > $out/result.json"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >&2\n'
        f'case "$*" in *serial*) out={tmp_path}/control; {write}; exit 3;; *crash*) exit 1;; *) exit 2;; esac\n'
    )
    fake.chmod(0o755)
    run = flake.launcher(str(fake), ["--at-least", "2/3"], tmp_path)
    assert run("overlap")["verdict"] == "error"
    assert flake.launcher(str(fake), ["crash"], tmp_path)("overlap")["verdict"] == "error"
    control = run("control")
    assert control["verdict"] == "inconclusive"
    command = "-m overlap_probe run --nproc 2 --device cpu --retries 0"  # each recording counts
    assert control["said"] == [f"{command} -o {tmp_path / 'control'} --schedule serial --at-least 2/3"]


def test_the_second_job_ends_with_the_hunt() -> None:
    with flake.second_job(1):
        pass
    code = (
        "import os, subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {flake.BUSY!r}, str(os.getpid())], stdout=sys.stderr).pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=30)
    orphan = int(done.stdout)
    for _ in range(200):
        stat = Path(f"/proc/{orphan}/stat")
        if not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z"):  # gone, or waiting to be reaped
            return
        subprocess.run(["sleep", "0.05"])
    os.kill(orphan, 9)
    pytest.fail("the second job outlives its parent")


def test_it_can_be_executed_and_explains_itself() -> None:
    assert os.access(SCRIPT, os.X_OK)
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "negative control" in done.stdout
