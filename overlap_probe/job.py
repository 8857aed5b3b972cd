"""What is to be run, as it travels from the command through torch's launcher to each rank.

The idea: a job is plain data in one environment variable. Each process takes it out of its environment, so that a
user's script never sees it. The caller's module search path is part of it: what the caller can import, each rank can.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from overlap_probe.errors import LaunchError

_VARIABLE = "OVERLAP_PROBE_JOB"

STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank print where it is, even if it hangs."""

DEVICES = ("auto", "cpu", "cuda")
PROFILER_NAMES = ("torch", "nsys")

REPORTS = {"result.json": "json", "report.html": "html", "junit.xml": "xml"}
"""What a run's folder says of its traces, and in which form."""

MOST_RANKS_PER_CORE = 16
"""More ranks on a host than this for each core would not even start in a reasonable time."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of `overlap_probe run`, named as they are there.

    Raises:
        LaunchError: an option's value makes no sense; the message names it.
    """

    nproc: int = 2
    """Ranks on this host."""
    out: str | None = None
    """The run's folder. Default: ``overlap_probe_runs/<UTC time>``; needed where several commands make one run."""
    device: str = "auto"
    """auto, cpu or cuda: where the built-in workload runs."""
    profiler: str = "torch"
    """torch (torch.profiler, inside each rank) or nsys (Nsight Systems, around each rank): see `profilers`."""
    warmup: int = 2
    steps: int = 3
    timeout: float = 300.0
    """Seconds without a sign of life of a rank (a step, a line of output) after which it counts as hanging."""
    retries: int = 2
    """Times that the whole run is recorded again, at most, where the machine was too busy to judge: see `runs`."""
    script: tuple[str, ...] = ()
    """A user's script and its arguments, or ``-m``, a module and its arguments; empty: the built-in workload."""
    target: str | None = None
    """``module:function`` or ``file.py:function``, called on every rank instead of a script."""
    schedule: str = "auto"
    """Of the built-in workload, as the next four: see `fsdp_runtime.fully_shard`."""
    gather: str = "auto"
    children: int = 4
    dim: int | None = None
    """Rows and columns of each weight. Default: 2048 on a CPU, 4096 on a GPU."""
    batch: int | None = None
    """Rows of the input on each rank. Default: 256 on a CPU, 32768 on a GPU."""
    nnodes: int = 1
    """Hosts of the run; this and the next three as in torchrun."""
    node_rank: int | None = None
    """Given: torchrun's static rendezvous. Not given: c10d, which numbers the hosts itself."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where hosts meet. Default: a free port of the loopback address, for one host."""
    rdzv_id: str = "overlap_probe"

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("warmup", 1), ("steps", 1), ("children", 1), ("nnodes", 1), ("retries", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise LaunchError(f"--{name}: expected a whole number, {least} or more, got {value}")
        most = MOST_RANKS_PER_CORE * (os.cpu_count() or 1)
        if self.nproc > most:
            raise LaunchError(f"--nproc: expected {most} or fewer on the {os.cpu_count()} cores here, got {self.nproc}")
        for name in ("dim", "batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise LaunchError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 < self.timeout < math.inf:
            raise LaunchError(f"--timeout: expected a number of seconds, more than 0, got {self.timeout:g}")
        if self.device not in DEVICES:
            raise LaunchError(f"--device: expected one of {', '.join(DEVICES)}, got {self.device}")
        if self.profiler not in PROFILER_NAMES:
            raise LaunchError(f"--profiler: expected one of {', '.join(PROFILER_NAMES)}, got {self.profiler}")
        if self.script and self.target:
            raise LaunchError("--target: cannot be used together with a script; leave one of them out")
        if self.target and not all(self.target.rpartition(":")[::2]):
            raise LaunchError(f"--target: expected module:function or file.py:function, got {self.target}")
        if self.nnodes > 1 and not (self.rdzv_endpoint and self.out):
            raise LaunchError("--nnodes: several hosts need --rdzv-endpoint HOST:PORT and -o FOLDER, the same on each")

    @property
    def builtin(self) -> bool:
        """Whether the built-in workload is what runs."""
        return not self.script and self.target is None


@dataclass(frozen=True, slots=True)
class Job:
    """Options and what the launcher decided: the folder, the search path, and the process that this one ends with."""

    options: LaunchOptions
    folder: Path
    sys_path: tuple[str, ...]
    parent: int
    """Process id of the one that started this one, directly or through a profiler."""
    token: str
    """Tells this run's reports from those of an earlier run, or of another host, in the same folder."""
    device: str | None = None
    """cpu or cuda once decided; None for a user's script, which decides for itself."""
    reports: str | None = None
    """File of the rank's reports where another process passes them on; None: among the logs."""

    @property
    def logs(self) -> Path:
        """Folder of each process's output (``rank0.log``, ``launcher.log``) and reports (``rank0.jsonl``...)."""
        return self.folder / "logs"

    @property
    def agent_name(self) -> str:
        """Name of the agent's files among the logs: hosts may share the folder."""
        return "launcher" if self.options.nnodes == 1 else f"launcher-{self.token[:8]}"

    def reports_of(self, rank: int) -> Path:
        """The file that the rank's process reports to."""
        return Path(self.reports) if self.reports else self.logs / f"rank{rank}.jsonl"

    def environment(self) -> dict[str, str]:
        """The variable that carries this job to a process started with `command`."""
        return {_VARIABLE: json.dumps(asdict(self), default=str)}

    @classmethod
    def take(cls) -> Job:
        """The job of this process, out of its environment."""
        fields = json.loads(os.environ.pop(_VARIABLE))
        options = fields.pop("options")
        options["script"] = tuple(options["script"])
        return cls(
            options=LaunchOptions(**options),
            folder=Path(fields.pop("folder")),
            sys_path=tuple(fields.pop("sys_path")),
            **fields,
        )


def command(module: str) -> list[str]:
    """Arguments of a Python process that calls ``main`` of ``module`` and can import what this one can."""
    start = (
        f"import sys; '' in sys.path and sys.path.remove(''); import json, os; "
        f"sys.path[:] = json.loads(os.environ['{_VARIABLE}'])['sys_path']; from {module} import main; main()"
    )
    return [sys.executable, "-u", "-c", start]


def search_path() -> tuple[str, ...]:
    """This process's module search path, independent of the current folder."""
    return tuple(os.path.abspath(entry) for entry in sys.path)


def end_with_parent(parent: int, end: Callable[[], None]) -> None:
    """Call ``end`` soon after the process ``parent``, which started this one, is gone, however it went.

    At the latest when this process exits: without its parent it may do so early, for want of its peers.
    """

    def gone() -> bool:
        return os.getppid() != parent and not _lives(parent)

    def watch() -> None:
        while not gone():
            time.sleep(0.2)
        end()

    def last_look() -> None:
        if gone():
            end()

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
    atexit.register(last_look)


def _lives(process: int) -> bool:
    """Whether a process that is not the parent runs; one that has ended and that nobody has collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a group; one that is over is no error."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return
