"""A stand-in for ``nsys``, and one for the package ``nvtx``: what recording with Nsight Systems needs of both.

The idea: it takes the arguments of the real one, runs the command in a session of its own as that does, ends as the
command ends, and "exports" a database that a test has made. Its behaviour is chosen by the name of a file beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

VERSION = "2024.2.3.38"

PROGRAM = f"""
import json, os, pathlib, shutil, signal, subprocess, sys
home = pathlib.Path(__file__).resolve().parent
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA Nsight Systems version {VERSION}-242334140272v0")
    sys.exit()
options = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--"))
with open(home / f"{{arguments[0]}}.calls", "a") as calls:
    calls.write(json.dumps(options | {{"TMPDIR": os.environ["TMPDIR"]}}) + "\\n")
if arguments[0] == "export":
    if (home / "cannot export").exists():
        sys.exit("The report was written by a newer version.")
    shutil.copy(home / "database.sqlite", options["output"])
    sys.exit()
if (home / "fails once").exists():
    (home / "fails once").unlink()
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", options["session-new"]],
                              start_new_session=True)
    (home / "old daemon").write_text(str(daemon.pid))
    sys.exit("Local Endpoint is not available.")
if (home / "cannot profile").exists():
    print("[1/1] [====50%   ] x.nsys-rep")
    sys.exit("Permission denied: perf_event_paranoid")
command = arguments[1:]
while command[0].startswith("--"):
    command.pop(0)
# The real one's daemon is in a session of its own, too, and has the session's name among its arguments.
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", options["session-new"]],
                          start_new_session=True)
(home / f"daemon{{os.environ['RANK']}}").write_text(str(daemon.pid))
child = subprocess.Popen(command, start_new_session=True)
signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(child.pid, number))
code = child.wait()
if not (home / "refuses to end").exists():
    daemon.kill()
if not (home / "loses ranges").exists():
    pathlib.Path(options["output"] + ".nsys-rep").write_text("")
sys.exit(code if code >= 0 else 128 - code)
"""

NVTX = """
import contextlib
def annotate(message):
    return contextlib.nullcontext()
def start_range(message):
    return message
def end_range(message):
    pass
"""


def install(folder: Path) -> Path:
    """Put ``bin/nsys`` and ``lib/nvtx.py`` into a folder; gives the folder of ``nsys``, where its behaviour is chosen.

    A test touches ``cannot profile``, ``fails once``, ``cannot export``, ``loses ranges`` or ``refuses to end`` there,
    and writes ``database.sqlite``.
    """
    home = folder / "bin"
    home.mkdir()
    (folder / "lib").mkdir()
    (folder / "lib" / "nvtx.py").write_text(NVTX)
    (home / "nsys").write_text(f"#!{sys.executable}\n{PROGRAM}")
    (home / "nsys").chmod(0o755)
    return home
