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
    if (home / "hangs").exists():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        (home / "child.part").write_text(str(child.pid))
        (home / "child.part").rename(home / "child")
        child.wait()
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
if (home / "loses ranges").exists():
    sys.exit(print("Generated:"))
print("Capture range started in the application.")
if (home / "cannot import").exists():
    print("Importer error status: Importation failed. InvalidArgumentException")
    pathlib.Path(options["output"] + ".qdstrm").write_text("")
elif not (home / "writes nothing").exists():
    pathlib.Path(options["output"] + ".nsys-rep").write_text("")
sys.exit(code if code >= 0 else 128 - code)
"""

IMPORTER = """
import pathlib, sys
home = pathlib.Path(__file__).resolve().parents[1] / "bin"
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if "=" in a)
assert pathlib.Path(options["input-file"]).is_file()
if (home / "cannot import again").exists():
    sys.exit("File is corrupted.")
pathlib.Path(options["output-file"]).write_text("")
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
    """Put ``bin/nsys``, its importer and ``lib/nvtx.py`` into a folder; gives that of ``nsys``, which chooses.

    A test touches ``cannot profile``, ``fails once``, ``loses ranges``, ``writes nothing``, ``cannot import``, ``cannot
    import again``, ``cannot export``, ``hangs`` (its export) or ``refuses to end`` there, and writes
    ``database.sqlite``.
    """
    home = folder / "bin"
    home.mkdir()
    (folder / "lib").mkdir()
    (folder / "lib" / "nvtx.py").write_text(NVTX)
    (folder / "host-linux-x64").mkdir()
    for program, text in ((home / "nsys", PROGRAM), (folder / "host-linux-x64" / "QdstrmImporter", IMPORTER)):
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
    return home
