"""Gathers what is known of this machine, for the doctor.

The idea: all that touches the machine is here, and changes nothing on it. torch is asked in a process of its own,
because a driver that hangs or a library that crashes is among the things to find out.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

TORCH_LIMIT_S = 120.0
NSYS_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Torch:
    """What `torch_facts` says. A reason is empty where the attempt works, None where it makes no sense."""

    version: str
    cuda: str | None = None
    """Version of CUDA or ROCm that torch was built for."""
    backends: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    far_peers: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs of which the first cannot read the second's memory."""
    records_cpu: str = ""
    """Why the profiler records nothing on the CPU; ``records_gpu`` likewise."""
    records_gpu: str | None = None
    symmetric_memory: str | None = None
    """Why memory that other processes could read cannot be allocated."""
    nccl: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of a machine."""

    python: str
    cores: int
    """That this process may use."""
    load: float
    """Processes that wanted a core in the last minute."""
    environment: Mapping[str, str] = field(default_factory=dict)
    torch: Torch | None = None
    torch_fault: str | None = None
    """Why torch, which is installed, does not start."""
    nsys: str | None = None
    """Version of Nsight Systems on the PATH."""
    loopback_fault: str | None = None
    """Why ranks of this host cannot meet on 127.0.0.1."""
    shared_memory: int | None = None
    """Bytes of /dev/shm, where there is one."""
    has_driver: bool = False
    """An NVIDIA driver is there."""
    admin_only_counters: bool = False
    """The driver keeps the GPU's performance counters for administrators, and this is none."""


def examine() -> Machine:
    """Look at this machine. Takes as long as starting torch, at most TORCH_LIMIT_S."""
    torch, torch_fault = _ask_torch()
    shm, driver = Path("/dev/shm"), Path("/proc/driver/nvidia/params")
    restricted = driver.is_file() and "RmProfilingAdminOnly: 1" in driver.read_text(errors="replace")
    return Machine(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0],
        environment=dict(os.environ),
        torch=torch,
        torch_fault=torch_fault,
        nsys=_nsys_version(),
        loopback_fault=_try_loopback(),
        shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        has_driver=driver.is_file() or shutil.which("nvidia-smi") is not None,
        admin_only_counters=restricted and os.geteuid() != 0,
    )


def _ask_torch() -> tuple[Torch | None, str | None]:
    if importlib.util.find_spec("torch") is None:
        return None, None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "overlap_probe.torch_facts"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"gives no answer within {TORCH_LIMIT_S:g} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return msgspec.json.decode(lines[-1], type=Torch), None
    said = done.stderr.strip().splitlines()
    return None, said[-1] if said else f"ends with exit code {done.returncode}"


def _nsys_version() -> str | None:
    nsys = shutil.which("nsys")
    if nsys is None:
        return None
    try:
        done = subprocess.run([nsys, "--version"], capture_output=True, text=True, timeout=NSYS_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start: {error}"
    return done.stdout.strip() or f"ends with exit code {done.returncode}"


def _try_loopback() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return f"nothing can be reached on 127.0.0.1: {error.strerror or error}"
    return None
