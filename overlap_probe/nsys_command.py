"""Knows the command line of Nsight Systems: how a process is recorded, exported, and how all of it is ended.

The idea: everything that ``nsys`` starts for one rank (a launcher, a daemon in a session of its own, an export) has the
name of that rank's recording among its arguments, so that nothing of it can be left behind, however it was ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlap_probe.errors import LaunchError
from overlap_probe.job import signal_group
from overlap_probe.nsys_recording import CAPTURE

ENDING = ".sqlite"
LAST_WORDS = 6
"""Lines of its output that an error shows."""
VERSION_LIMIT_S = 30.0

_PROGRESS_BAR = re.compile(r"\d%|^\s*$|^Generated:$")


def find_nsys() -> str:
    """The ``nsys`` on the PATH. Raises LaunchError if there is none."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise LaunchError(
            "--profiler nsys: there is no nsys on the PATH; install Nsight Systems (the package nsight-systems-cli of "
            "NVIDIA's repositories is enough) and put the folder of nsys on the PATH, or leave the option out"
        )
    return nsys


def nsys_version() -> str:
    """Its version, as ``2024.2.3.38``. Raises LaunchError if there is none or it does not start."""
    said = run_nsys(["--version"], os.environ, VERSION_LIMIT_S)
    found = re.search(r"\d+(?:\.\d+)+\S*", said)
    return found[0].partition("-")[0] if found else said.strip()


def profile_arguments(name: str, report: Path) -> list[str]:
    """Arguments that record a command, which follows them, from the beginning of the range `CAPTURE` to its end.

    ``report`` is the path of the report without its ending. The command runs on after the range, and ``nsys`` ends with
    it and with its exit code (128 + N if signal N killed it), whatever children it leaves.
    """
    return [
        find_nsys(),
        "profile",
        f"--session-new={name}",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--capture-range=nvtx",
        f"--nvtx-capture={CAPTURE}@*",
        "--capture-range-end=stop",
        "--wait=primary",
        "--force-overwrite=true",
        f"--output={report}",
    ]


PROFILE_ENVIRONMENT = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}
"""Without it only ranges named by a registered string can begin a recording."""


def export(report: Path, database: Path, environment: dict[str, str], limit_s: float) -> None:
    """Export a report. Raises LaunchError with what ``nsys`` said if that does not work."""
    arguments = ["export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    said = run_nsys(arguments, environment, limit_s)
    if not database.is_file():
        raise LaunchError(f"nsys export wrote nothing: {last_words(said)}")


def import_stream(stream: Path, report: Path, environment: dict[str, str], limit_s: float) -> None:
    """Make a report of the events that ``nsys profile`` left: what it does itself, but not always with success.

    Raises LaunchError with what the importer, a program beside ``nsys``, said if that does not work, or if there is
    none.
    """
    importer = next(Path(find_nsys()).resolve().parents[1].glob("host-linux-*/QdstrmImporter"), None)
    if importer is None:
        raise LaunchError("there is no QdstrmImporter beside nsys")
    arguments = [f"--input-file={stream}", f"--output-file={report}", "--force-overwrite"]
    said = _run("QdstrmImporter", [str(importer), *arguments], environment, limit_s)
    if not report.is_file():
        raise LaunchError(f"QdstrmImporter wrote nothing: {last_words(said)}")


def run_nsys(arguments: list[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run ``nsys`` and give what it printed. Raises LaunchError if it cannot be started, fails or takes too long."""
    return _run(f"nsys {arguments[0]}", [find_nsys(), *arguments], environment, limit_s)


def _run(what: str, command: list[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a program and give what it printed; what it has started ends, too, where it is given up or interrupted."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{what} could not be started ({error.strerror}); is it made for this machine?") from error
    with process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            signal_group(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise LaunchError(f"{what} did not end within {limit_s:g} s: {last_words(error.output)}") from error
    if process.returncode:
        raise LaunchError(f"{what} failed with exit code {process.returncode}: {last_words(output)}")
    return str(output, errors="replace")


def last_words(output: bytes | str | None) -> str:
    """The last lines of what ``nsys`` printed, in one, without its progress bars."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if not _PROGRESS_BAR.search(line)]
    return " / ".join(lines[-LAST_WORDS:]) or "it said nothing"


def end_recording(name: str) -> None:
    """Kill every process that has the name of a recording among its arguments, and the groups that such ones lead."""
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name.encode() in arguments.read_bytes():
                process = int(arguments.parent.name)
                if os.getpgid(process) == process:
                    signal_group(process, signal.SIGKILL)
                os.kill(process, signal.SIGKILL)
