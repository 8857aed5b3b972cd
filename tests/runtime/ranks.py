"""Runs a function on several gloo ranks and returns what each of them returned.

The rank processes are started once for a test session and world size, and forked from one server that has imported
torch, because importing it costs more than most tests. Each waits for a function (a module-level one, sent by name),
runs it with ``(rank, world, *args)`` and sends back the result or the traceback. A rank that fails or hangs takes its
pool down; the next test starts a new one. Of one that hangs, the stack of each thread is in the report.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


class RankFailed(AssertionError):
    """A function raised on a rank, or did not return in time. The message holds every rank's traceback."""


class RankPool:
    """Processes that form one gloo process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Calls ``function(rank, world, *args)`` on every rank; the results in the order of ranks."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < self.world:
            waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in replies}
            # A rank that raised leaves the others in a collective: give them a moment, not the whole timeout.
            patience = timeout_s if all(ok for ok, _ in replies.values()) else 2.0
            ready = wait(list(waiting), patience)
            if not ready:
                break
            for connection in ready:
                try:
                    replies[waiting[connection]] = connection.recv()
                except EOFError:
                    replies[waiting[connection]] = (False, "the process died")
        if len(replies) < self.world or not all(ok for ok, _ in replies.values()):
            silent = {rank: (False, self._stack(rank)) for rank in range(self.world) if rank not in replies}
            self.close()
            said = sorted((replies | silent).items())
            raise RankFailed("\n".join(f"rank {rank}: {report}" for rank, (ok, report) in said if not ok))
        return [replies[rank][1] for rank in range(self.world)]

    def _stack(self, rank: int) -> str:
        """Where a rank that does not reply is."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"no reply; it is at\n{_stack_file(self._folder, rank).read_text()}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "fsdp_runtime"])
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, self._folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack{rank}"


def _one_operation_at_a_time(gloo: Any) -> Any:
    """The backend with one thread instead of two.

    Where two threads work on one connection, gloo (of torch 2.13) now and then releases a buffer of its own twice: once
    in about 200,000 operations the process aborts in ``malloc``, or an operation never ends.
    """

    class OneThread(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._threads, options._timeout, options._devices = 1, timeout, [gloo.create_default_device()]
            super().__init__(store, rank, size, options)

    return OneThread


def _serve(rank: int, world: int, folder: Path, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, _stack_file(folder, rank).open("w"))
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = _one_operation_at_a_time(dist.ProcessGroupGloo)
    meet = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            connection.send((True, function(rank, world, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
