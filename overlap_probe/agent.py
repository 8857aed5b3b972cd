"""The process between the launcher and the ranks: torch's elastic launcher, in a process of its own.

The idea: torchrun's API installs signal handlers, changes the environment and blocks until the end; here it may. The
launcher stays small and free, and if it is killed outright this process still ends every rank.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from typing import Any

from overlap_probe.errors import LaunchError
from overlap_probe.job import Job, LaunchOptions, command, end_with_parent, signal_group
from overlap_probe.profilers import PROFILERS
from overlap_probe.progress import PROGRESS, to_file
from overlap_probe.ranks_at_work import RanksAtWork
from overlap_probe.worker import choose_device

SHUTDOWN_S = 1
"""Seconds that ranks get between SIGTERM and SIGKILL."""


def main() -> None:
    """Entry of the agent: launches the job's ranks, reports failures, exits 0 only if every rank did."""
    job = Job.take()
    PROGRESS.listener = to_file(job.logs / f"{job.agent_name}.jsonl")
    end_with_parent(job.parent, lambda: _end_ranks_and_self(job))
    try:
        device, note = choose_device(job.options, job.options.nproc)
        if note:
            PROGRESS.report("note", note)
        _launch(dataclasses.replace(job, device=device, parent=os.getpid()))
    except LaunchError as error:
        PROGRESS.report("error", str(error))
        sys.exit(1)


def _launch(job: Job) -> None:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = job.options
    os.environ.update(job.environment())
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_S)
    if options.nnodes == 1:
        _use_loopback()
    python, *arguments = command(PROFILERS[options.profiler].rank_module)
    try:
        elastic_launch(LaunchConfig(**launch_config(options)), python)(*arguments)
    except ChildFailedError as error:
        PROGRESS.report("failures", {rank: failure.exitcode for rank, failure in error.failures.items()})
        sys.exit(1)
    except SignalException:
        sys.exit(1)
    except (RendezvousError, DistError, OSError, ValueError) as error:
        where = options.rdzv_endpoint or "a free port of 127.0.0.1"
        raise LaunchError(f"rendezvous at {where}: {error}; try another --rdzv-endpoint HOST:PORT") from error


def launch_config(options: LaunchOptions) -> dict[str, Any]:
    """Arguments of torch's `LaunchConfig`, as torchrun would choose them for the same options. No restarts."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    static = options.nnodes > 1 and options.node_rank is not None
    config: dict[str, Any] = {
        "min_nodes": options.nnodes,
        "max_nodes": options.nnodes,
        "nproc_per_node": options.nproc,
        "run_id": options.rdzv_id,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "rdzv_backend": "static" if static else "c10d",
        "rdzv_endpoint": options.rdzv_endpoint or "127.0.0.1:0",
        "logs_specs": DefaultLogsSpecs(log_dir=os.devnull),
    }
    if static:
        config["rdzv_configs"] = {"rank": options.node_rank}
    if options.nnodes == 1:
        config["local_addr"] = "127.0.0.1"
    return config


def _use_loopback() -> None:
    """All ranks are on this host: gloo need not look for its address, which a host name may not have."""
    import socket

    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _end_ranks_and_self(job: Job) -> None:
    ranks = RanksAtWork(job)
    ranks.update()
    ranks.signal(signal.SIGKILL)
    signal_group(os.getpgrp(), signal.SIGKILL)
