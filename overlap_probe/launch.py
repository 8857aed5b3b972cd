"""Launch a workload on several ranks under the profiler, and leave one trace a rank in the run's folder.

The idea: this process imports no torch. It starts torch's launcher in a process of its own (`agent`), which starts the
ranks (`worker`), and watches over all of them (`supervise`) until every trace is written or it can say why not.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlap_probe.errors import LaunchError, OverlapProbeError
from overlap_probe.job import REPORTS, Job, LaunchOptions, search_path
from overlap_probe.profilers import PROFILERS
from overlap_probe.progress import PROGRESS, Event
from overlap_probe.ranks_at_work import Reports
from overlap_probe.record import RunRecord, without_folders
from overlap_probe.supervise import LaunchInterrupted, Supervisor

__all__ = ["LaunchError", "LaunchInterrupted", "LaunchOptions", "RunRecord", "run"]

OnProgress = Callable[[str], None]


def starts_all_ranks(options: LaunchOptions) -> bool:
    """Whether `run` starts every rank of the run, and so could do it all again: nobody else has to take part."""
    return options.nnodes == 1 and not is_rank()


def is_rank() -> bool:
    """Whether a launcher such as torchrun prepared this process to be a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(options: LaunchOptions, on_progress: OnProgress = lambda text: None) -> RunRecord:
    """Run the workload and leave the trace of every rank of this host in the run's folder: ``rank{R}.json.gz``, or
    ``rank{R}.sqlite`` if Nsight Systems records it.

    In an environment that a launcher such as torchrun has prepared (RANK and WORLD_SIZE are set) this process becomes
    that rank instead of launching any, and imports torch. Then, as with several hosts, only the caller whose record
    `leads` should analyse. ``on_progress`` gets a short text whenever rank 0 gets further.

    Raises:
        LaunchInterrupted: SIGINT, SIGTERM or SIGHUP came; everything that was started has ended.
        LaunchError: the workload cannot be started, the profiler is not there, or a rank died, hung or left no trace;
            the text names the rank.
    """
    if options.script and options.script[0] != "-m" and not Path(options.script[0]).is_file():
        raise LaunchError(f"{options.script[0]}: there is no such script; give its path from the current folder")
    started, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    versions = PROFILERS[options.profiler].versions()
    folder = _make_folder(options, started, shared=not starts_all_ranks(options))
    ranks, notes = _be_a_rank(options, folder, on_progress) if is_rank() else _launch(options, folder, on_progress)
    first, arguments = ranks[0].info, _arguments(options)
    return RunRecord(
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 3),
        workload=arguments["target"] or " ".join(arguments["script"]) or "built-in",
        arguments={**arguments, **first.get("arguments", {})},
        world_size=first["world_size"],
        hosts=first["hosts"],
        versions={**first["versions"], **versions},
        devices=[rank.info["device"] for rank in ranks],
        backend=first["backend"],
        notes=list(dict.fromkeys([*notes, *(note for rank in ranks for note in rank.notes)])),
        folder=folder,
        ranks=tuple(rank.number for rank in ranks),
    )


def _launch(options: LaunchOptions, folder: Path, on_progress: OnProgress) -> tuple[list[Reports], list[str]]:
    if options.rdzv_endpoint and (options.nnodes == 1 or options.node_rank == 0):
        _check_port(options.rdzv_endpoint)
    job = Job(options, folder.absolute(), search_path(), parent=os.getpid(), token=uuid.uuid4().hex)
    on_progress(f"starting {options.nproc} {'rank' if options.nproc == 1 else 'ranks'}")
    with Supervisor(job) as supervisor:
        ranks = supervisor.follow(on_progress)
    return list(ranks), supervisor.notes


def _be_a_rank(options: LaunchOptions, folder: Path, on_progress: OnProgress) -> tuple[list[Reports], list[str]]:
    """This process is the rank; whoever started it watches over it."""
    from overlap_probe.worker import choose_device

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reports, profiler = Reports(rank), PROFILERS[options.profiler]

    def listen(event: Event) -> None:
        reports.take(event)
        if event.kind in ("state", "note") and rank == 0:
            on_progress(f"rank 0: {event.value}")

    for any_profiler in PROFILERS.values():
        (folder / f"rank{rank}{any_profiler.ending}").unlink(missing_ok=True)
    PROGRESS.listener = listen
    try:
        device, note = choose_device(options, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if note:
            PROGRESS.report("note", note)
        job = Job(options, folder.absolute(), search_path(), parent=os.getppid(), token=uuid.uuid4().hex, device=device)
        profiler.be_rank(job, rank)
    except SystemExit as leaving:
        raise LaunchError(f"rank {rank} ended with exit code {leaving.code}; {reports.last_report()}") from leaving
    except OverlapProbeError:
        raise
    except Exception as error:
        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        raise LaunchError(f"rank {rank} failed ({what}); {reports.last_report()}") from error
    finally:
        PROGRESS.listener = None
    if not reports.wrote:
        raise LaunchError(f"rank {rank} left no trace: {'; '.join(reports.notes) or 'it captured no step'}")
    if rank == 0:
        _wait_for_traces([folder / f"rank{other}{profiler.ending}" for other in range(world)], options.timeout)
    return [reports], []


def _wait_for_traces(traces: list[Path], timeout: float) -> None:
    limit = time.monotonic() + timeout
    while missing := [trace.name for trace in traces if not trace.exists()]:
        if time.monotonic() > limit:
            raise LaunchError(
                f"{traces[0].parent}: no {', '.join(missing)} after {timeout:g} s; is the folder shared by all hosts?"
            )
        time.sleep(0.1)


def _make_folder(options: LaunchOptions, started: datetime.datetime, *, shared: bool) -> Path:
    """The run's folder, without the files of an earlier run: were this one to fail, they would be taken for its own.

    Where it is shared with other commands, the reports go, unless this process is a rank other than 0 (rank 0 writes
    them); each rank removes its own old trace before it records.
    """
    if options.out is None and shared:
        raise LaunchError("-o: several commands make this run together; name a folder that all of them can write to")
    folder = Path(options.out or f"overlap_probe_runs/{started:%Y%m%d-%H%M%S}-{os.getpid()}")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if not is_rank() or os.environ["RANK"] == "0":
            for name in REPORTS:
                (folder / name).unlink(missing_ok=True)
        if not shared:
            endings = "|".join(re.escape(profiler.ending) for profiler in PROFILERS.values())
            for old in [*folder.glob("rank*"), *(folder / "logs").glob("*")]:
                if re.fullmatch(rf"rank\d+({endings})|(rank\d+|launcher)(\.nsys)?\.(jsonl|log)", old.name):
                    old.unlink()
    except OSError as error:
        raise LaunchError(f"{folder}: cannot be written: {error.strerror}; choose another folder with -o") from error
    return folder


def _check_port(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"--rdzv-endpoint: expected HOST:PORT, got {endpoint}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return
    except OSError as error:
        problem = "the port is in use" if error.errno == errno.EADDRINUSE else f"cannot listen there: {error.strerror}"
        raise LaunchError(f"--rdzv-endpoint {endpoint}: {problem}; try another, or leave it out") from error


def _arguments(options: LaunchOptions) -> dict[str, Any]:
    """The options as they were given or left, without folders."""
    arguments = {name: value for name, value in asdict(options).items() if name != "out"}
    arguments["script"] = [without_folders(part) for part in options.script]
    arguments["target"] = options.target and without_folders(options.target)
    return arguments
