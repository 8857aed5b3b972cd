"""The doctor: what it makes of machines that are not at hand, and that it finds out about this one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call

from overlap_probe import machine as machine_module
from overlap_probe.doctor import EXIT_CODES, HARMFUL, Diagnosis, diagnose, worst
from overlap_probe.machine import Machine, Torch, examine

H200 = "NVIDIA H200"
TORCH = Torch(
    version="2.13.0+cu130",
    cuda="13.0",
    backends=("gloo", "nccl"),
    gpus=(H200, H200),
    records_gpu="",
    symmetric_memory="",
    nccl=(2, 28, 9),
)
SERVER = Machine(
    python="3.11.7 on Linux x86_64",
    cores=64,
    load=3.0,
    torch=TORCH,
    nsys="2025.3",
    shared_memory=1 << 34,
    has_driver=True,
)
"""Two GPUs of which nothing is to be complained."""
LAPTOP = replace(SERVER, torch=Torch("2.13.0+cpu", backends=("gloo",)), nsys=None, has_driver=False)


def about(machine: Machine, topic: str) -> Diagnosis:
    (only,) = [diagnosis for diagnosis in diagnose(machine) if diagnosis.topic == topic]
    return only


def test_a_good_server_is_ok_and_a_laptop_has_no_fault() -> None:
    assert {d.status for d in diagnose(SERVER)} == {"ok"}
    assert {d.topic for d in diagnose(SERVER)} == {
        *("python", "torch", "GPUs", "profiler", "nccl", "peer access", "symmetric memory"),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "cores", "nsys"),
    }
    assert about(SERVER, "GPUs").found == "2 x NVIDIA H200"
    assert worst(diagnose(LAPTOP)) == "note"
    assert EXIT_CODES["note"] == 0


def of_torch(**changes: Any) -> Machine:
    return replace(SERVER, torch=replace(TORCH, **changes))


@pytest.mark.parametrize(
    ("machine", "topic", "status", "says"),
    [
        (replace(SERVER, torch=None), "torch", "warning", "pip install 'overlap-probe[run]'"),
        (replace(SERVER, torch=None, torch_fault="libcudart.so: no such file"), "torch", "error", "libcudart"),
        (of_torch(version="2.8.1"), "torch", "warning", "2.9 or newer"),
        (of_torch(version="2.10.0a0+git1"), "torch", "ok", "2.10"),
        (of_torch(gpus=(H200,)), "GPUs", "note", "1 x NVIDIA H200"),
        (of_torch(gpus=(), nccl=None), "GPUs", "warning", "there is an NVIDIA driver"),
        (of_torch(records_cpu="RuntimeError: no"), "profiler", "error", "CPU: RuntimeError: no"),
        (of_torch(records_gpu="RuntimeError: CUPTI"), "profiler", "error", "GPU: RuntimeError: CUPTI"),
        (of_torch(backends=("gloo",), nccl=None), "nccl", "error", "cannot talk"),
        (of_torch(nccl=(2, 27, 5)), "nccl", "note", "zero_cta needs 2.28"),
        (of_torch(far_peers=((0, 1), (1, 0))), "peer access", "warning", "none from 0 to 1, 1 to 0"),
        (of_torch(symmetric_memory="RuntimeError: fd"), "symmetric memory", "warning", "copy_engine"),
        (replace(SERVER, cores=1), "cores", "warning", "two ranks take turns"),
        (replace(SERVER, load=99.5), "cores", "note", "64, for 99.5 processes"),
        (replace(SERVER, loopback_fault="nothing can be reached"), "loopback", "error", "nothing can be reached"),
        (replace(SERVER, shared_memory=64 << 20), "/dev/shm", "warning", "--shm-size"),
        (replace(LAPTOP, shared_memory=64 << 20), "/dev/shm", "note", "64 MiB"),
        (replace(SERVER, admin_only_counters=True), "GPU counters", "note", "administrators"),
        (replace(SERVER, nsys=None), "nsys", "note", "read without"),
        (replace(SERVER, environment={"RANK": "1", "WORLD_SIZE": "4"}), "RANK", "note", "is 1 of 4"),
        *((replace(SERVER, environment={name: "1"}), name, "warning", "is 1: ") for name in HARMFUL),
        *((replace(LAPTOP, environment={name: "1"}), name, "note", "is 1: ") for name in HARMFUL),
    ],
)
def test_each_fault_is_named_with_its_severity_and_what_to_do(
    machine: Machine, topic: str, status: str, says: str
) -> None:
    diagnosis = about(machine, topic)
    assert diagnosis.status == status
    assert says in f"{diagnosis.found} {diagnosis.advice}"
    assert diagnosis.advice or status == "ok"


def test_a_setting_that_does_no_harm_is_left_alone() -> None:
    harmless = replace(SERVER, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0"})
    assert worst(diagnose(harmless)) == "ok"


@pytest.mark.parametrize(
    ("machine", "code"),
    [(SERVER, 0), (LAPTOP, 0), (replace(SERVER, torch=None), 3), (of_torch(records_gpu="RuntimeError: CUPTI"), 1)],
)
def test_the_exit_code_is_that_of_the_worst_line(
    machine: Machine, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("overlap_probe.commands.doctor.examine", lambda: machine)
    done = call(capsys, "doctor", "--json", tmp_path / "doctor.json")
    assert done.code == code
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["status"] == worst(diagnose(machine))
    assert [d["topic"] for d in written["diagnoses"]] == [d.topic for d in diagnose(machine)]
    assert [line for line in done.out.splitlines() if line.startswith(("warning", "error"))] == [
        f"{d.status:7}  {d.topic:27}  {d.found}" for d in diagnose(machine) if d.status in ("warning", "error")
    ]


def test_this_machine_is_examined_by_trying() -> None:
    found = examine()
    assert found.cores >= 1
    assert found.loopback_fault is None
    if importlib.util.find_spec("torch") is None:
        assert (found.torch, found.torch_fault) == (None, None)
        return
    assert found.torch_fault is None
    assert found.torch is not None
    assert found.torch.records_cpu == ""
    assert "gloo" in found.torch.backends


def test_a_torch_that_does_not_start_or_answer_is_a_fault_and_not_the_doctors_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    broken = tmp_path / "torch" / "__init__.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    broken.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert examine().torch_fault == "ImportError: libcudart.so.13: cannot open shared object file"
    broken.write_text("import os; os._exit(7)")
    assert examine().torch_fault == "ends with exit code 7"
    broken.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(machine_module, "TORCH_LIMIT_S", 2.0)
    assert examine().torch_fault == "gives no answer within 2 s"


def test_it_works_where_there_is_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from importlib.machinery import PathFinder; find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from overlap_probe.cli import main; main(['doctor'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "warning  torch                        not installed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 3
