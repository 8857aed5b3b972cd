"""How a run was made: what a reader of its results needs to know to make it again.

The idea: a record names versions, devices and arguments, never a machine: no folders, no host names, no environment.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `launch.run` did. `to_dict` is what is kept; ``folder`` and ``ranks`` are for the caller only."""

    started: str
    """UTC, ISO 8601."""
    seconds: float
    workload: str
    """``built-in``, the script's file name, or ``module:function``."""
    arguments: dict[str, Any]
    world_size: int
    hosts: int
    versions: dict[str, str]
    """python, torch, and nccl where torch has it."""
    devices: list[str]
    """One name for each rank of this host, in order."""
    backend: str | None
    """Of the default process group; None without one."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: a device that was not there, fewer steps than wanted."""
    folder: Path = Path()
    """Where the traces are."""
    ranks: tuple[int, ...] = ()
    """The ranks that this process launched, or was."""

    @property
    def leads(self) -> bool:
        """True for the one process of the run that should analyse it: the one that has rank 0."""
        return 0 in self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without anything that names the machine."""
        kept = asdict(self)
        del kept["folder"], kept["ranks"]
        return kept


def describe_rank() -> dict[str, Any]:
    """What only the rank itself can say: its device, its world, the versions that it runs with. Imports torch."""
    import torch
    import torch.distributed as dist

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    device = _cpu_name()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_name()
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    grouped = dist.is_available() and dist.is_initialized()
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "versions": versions,
        "device": device,
        "backend": dist.get_backend() if grouped else None,
        "world_size": dist.get_world_size() if grouped else world,
        "hosts": -(-world // local),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return model.group(1) if model else platform.machine()


def without_folders(argument: str) -> str:
    """``argument`` with the folder of each absolute path cut off: ``--data=/home/me/x.bin`` is ``--data=x.bin``."""
    return re.sub(r"(?<![\w.~/-])~?/(?:[^/\s=:,]+/)*(?=[^/\s=:,])", "", argument)
