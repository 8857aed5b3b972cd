"""Make ``.venv`` beside pyproject.toml ready to work in, or find at once that it is (scripts/setup calls this).

The idea: a stamp inside .venv says what it was made from. It is put down as incomplete before the first step and as
complete after the last, so "is there anything to do" is one comparison, and an interrupted set-up is seen and redone.
A lock on a file beside .venv lets one set-up work at a time. Standard library only; runs on the Python that .venv is
made from, and uses that Python's torch, if it is new enough, instead of installing another.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
BUILD_BACKEND = "hatchling"
"""Installed first and pinned like everything else, so that building this package needs no environment of its own."""

VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "overlap_probe_setup.json"
SITE_PACKAGES = VENV / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
BORROWED = SITE_PACKAGES / "zz_calling_python.pth"
"""Puts the calling Python's packages behind .venv's own; the name sorts after the .pth file that points to ROOT."""

FIND_TORCH = """
import importlib.metadata
from pip._vendor.packaging.version import Version
import torch, torch.distributed
found = importlib.metadata.distribution("torch")
if Version(found.version) >= Version("2.9") and torch.distributed.is_available():
    print(found.version, found._path, sep="\\n")
"""


class SetupError(Exception):
    """Set-up cannot go on; the text says what was found and what to try."""


@dataclass(frozen=True)
class Stamp:
    """What a .venv was made from."""

    root: str
    prefix: str
    """The calling Python's installation (or virtual environment); with the version, this is which Python it is."""
    version: str
    inputs: str
    """Hash of the files that say what to install."""
    torch: str | None = None
    """Metadata folder (its name has the version) of the calling Python's torch, if .venv uses that one."""
    complete: bool = False

    @classmethod
    def wanted(cls) -> Stamp:
        """The stamp that a .venv made now, by this Python, would get."""
        digest = hashlib.sha256()
        for source in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
            digest.update(source.read_bytes())
        return cls(str(ROOT), sys.prefix, sys.version.split()[0], digest.hexdigest())

    @classmethod
    def found(cls) -> Stamp | None:
        """The stamp of the .venv that is there; None if it has none that can be read."""
        try:
            return cls(**json.loads(STAMP.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        part = STAMP.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(STAMP)

    def can_become(self, wanted: Stamp) -> bool:
        """Whether the .venv of this stamp can be installed into: a whole one, of this place and this Python."""
        same = (self.root, self.prefix, self.version) == (wanted.root, wanted.prefix, wanted.version)
        return self.complete and same and VENV_PYTHON.exists() and (self.torch is None or Path(self.torch).exists())

    def satisfies(self, wanted: Stamp) -> bool:
        """Whether nothing is left to do. A Python that nobody asked for by name is no reason to make .venv anew."""
        if self.prefix != wanted.prefix and not os.environ.get("PYTHON"):
            wanted = replace(wanted, prefix=self.prefix, version=self.version)
        return self.can_become(wanted) and self.inputs == wanted.inputs


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def locked() -> Iterator[int]:
    """One set-up at a time; yields the lock's descriptor.

    Subprocesses inherit it, so that a pip that outlives a killed set-up still keeps the next one waiting.
    """
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of .venv")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def discard() -> None:
    """Remove a .venv that this script made (or that never became one); SetupError if somebody else made it."""
    config = VENV / "pyvenv.cfg"
    if config.exists() and not STAMP.exists():
        raise SetupError(f"{VENV} was not made by scripts/setup; try again after moving it away")
    config.unlink(missing_ok=True)  # first, so that what a killed removal leaves is nobody's environment
    if VENV.exists():
        shutil.rmtree(VENV)


def borrow_torch(lock: int) -> tuple[str, str] | None:
    """Let .venv see the calling Python's packages if they include a suitable torch; its version and metadata."""
    site_dirs = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    if not any((Path(path) / "torch").exists() for path in site_dirs):
        return None
    BORROWED.write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in site_dirs))
    probe = subprocess.run([VENV_PYTHON, "-c", FIND_TORCH], capture_output=True, text=True, pass_fds=[lock])
    if probe.returncode == 0 and probe.stdout:
        version, metadata = probe.stdout.split("\n")[-3:-1]
        return version, metadata
    BORROWED.unlink()
    return None


def pip_install(lock: int, constraints: Path, *arguments: str) -> None:
    """Install into .venv. pip's own settings (index, proxy, cache) hold, and its errors show."""
    command = [str(VENV_PYTHON), "-m", "pip", "install", "-c", str(constraints), *arguments]
    if status := subprocess.run([*command, "-qq"], pass_fds=[lock]).returncode:
        raise SetupError(
            f"pip ended with status {status}; try again with a network, or with pip set to an index that can be "
            f"reached (PIP_INDEX_URL); more is said by: {shlex.join(command)}"
        )


def install(lock: int) -> str | None:
    """This package, editable, with its extras, at the pinned versions; the metadata of a borrowed torch, if one was.

    Only torch and what it needs come from the calling Python: the rest is installed while .venv cannot see that Python.
    """
    BORROWED.unlink(missing_ok=True)
    pip_install(lock, CONSTRAINTS, BUILD_BACKEND)
    pip_install(lock, CONSTRAINTS, "--no-build-isolation", "-e", f"{ROOT}[test,dev]")
    version, metadata = borrow_torch(lock) or (None, None)
    constraints = CONSTRAINTS
    if version is None:
        say("no torch 2.9 or newer in that Python: .venv gets its own, which is large")
    else:
        say(f"using torch {version} of that Python ({metadata})")
        lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("torch==")]
        constraints = VENV / "constraints.txt"
        constraints.write_text("\n".join([*lines, f"torch=={version}"]) + "\n")
    pip_install(lock, constraints, "--no-build-isolation", "-e", f"{ROOT}[run,test,dev]")
    return metadata


def set_up(lock: int) -> None:
    """Bring .venv from whatever it is to what is wanted."""
    started = time.monotonic()
    wanted, found = Stamp.wanted(), Stamp.found()
    if found and found.satisfies(wanted):
        return
    say(f"setting up {VENV} with Python {wanted.version} ({sys.executable})")
    if not (found and found.can_become(wanted)):
        discard()
        VENV.mkdir()
        wanted.write()
        if subprocess.run([sys.executable, "-m", "venv", VENV], pass_fds=[lock]).returncode:
            raise SetupError(f"{sys.executable} -m venv {VENV} failed; try PYTHON=/path/to/another/python3")
    wanted.write()
    replace(wanted, torch=install(lock), complete=True).write()
    say(f"ready after {time.monotonic() - started:.0f} s")


def main() -> int:
    wanted, found = Stamp.wanted(), Stamp.found()
    if found and found.satisfies(wanted):
        return 0
    try:
        with locked() as lock:
            set_up(lock)
    except (SetupError, OSError) as error:
        say(f"scripts/setup: {error}")
        return 2
    except KeyboardInterrupt:
        say("scripts/setup: interrupted; the next call starts afresh")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
