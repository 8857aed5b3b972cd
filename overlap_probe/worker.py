"""What each rank runs: a user's script, a user's function, or the built-in workload, with the profiler arranged.

The idea: the user's code gets what it would get under torchrun (rank and address in the environment, no process group)
and a capture that finds its steps; all that is ours happens before it starts and after it ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap_probe.capture import OUT_VARIABLE, capture_optimizer_steps
from overlap_probe.errors import LaunchError, OverlapProbeError
from overlap_probe.job import STACK_SIGNAL, Job, LaunchOptions, end_with_parent, signal_group
from overlap_probe.progress import PROGRESS, to_file


def main() -> None:
    """Entry of a rank's process: reports to the launcher, ends with it, and exits as the workload did."""
    job = Job.take()
    rank = int(os.environ["RANK"])
    redirect_output(job.logs / f"rank{rank}.log")
    faulthandler.register(STACK_SIGNAL)
    end_with_parent(job.parent, lambda: signal_group(os.getpgrp(), signal.SIGKILL))
    PROGRESS.listener = to_file(job.reports_of(rank))
    PROGRESS.report("pid", {"pid": os.getpid(), "token": job.token})
    try:
        run_rank(job.options, job.folder, job.device)
    except SystemExit as leaving:
        PROGRESS.report("error", f"exit code {leaving.code}")
        raise
    except OverlapProbeError as error:
        print(error, file=sys.stderr)
        PROGRESS.report("error", str(error))
        sys.exit(1)
    except BaseException as error:
        traceback.print_exc()
        PROGRESS.report("error", f"{type(error).__name__}: {error}")
        sys.exit(1)
    PROGRESS.report("end")


def run_rank(options: LaunchOptions, folder: Path, device: str | None) -> None:
    """Run the workload as the rank that the environment says; its trace is written into ``folder``.

    Raises:
        SystemExit: the user's code ended with an exit code other than 0.
    """
    os.environ[OUT_VARIABLE] = str(folder)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and device != "cpu":
        PROGRESS.report("note", "CUDA_DEVICE_MAX_CONNECTIONS=1 makes CUDA streams wait for each other; unset it")
    if options.builtin:
        from overlap_probe import workload

        assert device is not None
        workload.train(options, folder, device)
        return
    run = _call_target(options.target) if options.target else _run_script(options.script)
    with capture_optimizer_steps(folder, warmup=options.warmup, steps=options.steps):
        try:
            run()
        except SystemExit as leaving:
            if leaving.code:
                raise


def choose_device(options: LaunchOptions, local_ranks: int) -> tuple[str | None, str | None]:
    """Where the workload runs (cpu or cuda; None: the user's code decides), and a note if that may surprise.

    Raises:
        LaunchError: ``--device cuda`` with fewer GPUs than ranks on this host.
    """
    import torch

    gpus = torch.cuda.device_count()
    if options.builtin and options.device == "cuda" and options.gather == "copy_engine" and 0 < gpus < local_ranks:
        return "cuda", (
            f"{local_ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}: this tests that copy_engine gathers right; "
            "its times are no measure of anything"
        )
    if options.device == "cuda" and gpus < local_ranks:
        raise LaunchError(
            f"--device cuda: {local_ranks} ranks on this host need {local_ranks} GPUs, found {gpus}; "
            f"try {f'--nproc {gpus} or ' if gpus else ''}--device cpu"
        )
    if not options.builtin:
        return None, None
    if options.device == "auto" and gpus < local_ranks:
        return "cpu", f"{gpus or 'no'} GPU for {local_ranks} ranks on this host: running on the CPU with gloo"
    return ("cuda" if options.device == "auto" else options.device), None


def target_name(function: Callable[[], Any]) -> str:
    """The ``--target`` of a function at the top of a module: by the module's name if that finds it, else by its file.

    Raises:
        LaunchError: a lambda, a method or a nested function, which another process cannot find by name.
    """
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    if code is None or not name.isidentifier():
        raise LaunchError(f"target: {name} cannot be found by name; use a function at the top of a module")
    module = getattr(function, "__module__", "__main__")
    spec = importlib.util.find_spec(module) if module != "__main__" else None
    found = spec is not None and spec.origin is not None and os.path.samefile(spec.origin, code.co_filename)
    return f"{module if found else code.co_filename}:{name}"


def _call_target(target: str) -> Callable[[], Any]:
    where, _, name = target.rpartition(":")
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise LaunchError(f"--target {target}: there is no file {where}")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise LaunchError(f"--target {target}: {where} has no function {name}")
    return function  # type: ignore[no-any-return]


def _run_script(script: tuple[str, ...]) -> Callable[[], Any]:
    if script[0] == "-m":
        sys.argv = list(script[1:])
        sys.path.insert(0, os.getcwd())
        return lambda: runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    return lambda: runpy.run_path(script[0], run_name="__main__")


def redirect_output(log: Path) -> None:
    """From here on everything that this process and its children print goes into ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
