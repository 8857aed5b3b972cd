"""scripts/setup, run, test: from nothing to .venv, with small wheels on disk in place of the real packages.

The project that is set up here has the real scripts; its build back end, torch and pytest are stand-ins of a few lines,
so that no network is needed and every package that could be installed is known.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BACKEND = """
import shutil, sys
def build_editable(directory, config_settings=None, metadata_directory=None):
    return shutil.copy({wheel!r}, directory).rpartition("/")[2]
"""
SAY = """
import os, sys, torch
def main():
    print({name!r}, torch.__version__, os.getcwd(), *sys.argv[1:], sep="|")
"""
TORCH = "__version__ = {version!r}\n"
DISTRIBUTED = "def is_available():\n    return True\n"


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], metadata: str = "", command: str = ""
) -> Path:
    """A wheel of a pure package; command: ``name = module:function`` of its console script."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{command}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for where, content in files.items():
            wheel.writestr(where, content)
    return path


@dataclass
class Project:
    """A checkout to set up, and the calling Python that does it."""

    root: Path
    calling: Path
    """The calling Python's virtual environment."""
    environment: dict[str, str]

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """``scripts/run ARGS`` or ``scripts/test ARGS`` from a folder that is not the checkout's."""
        return subprocess.Popen(
            [self.root / "scripts" / command[0], *command[1:]],
            cwd=self.calling,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *command: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the same."""
        process = self.start(*command, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def add_torch(self, version: str) -> None:
        """Give the calling Python a torch."""
        (site,) = (self.calling / "lib").glob("python*/site-packages")
        wheel = make_wheel(
            self.calling,
            "torch",
            version,
            {"torch/__init__.py": TORCH.format(version=version), "torch/distributed.py": DISTRIBUTED},
        )
        zipfile.ZipFile(wheel).extractall(site)

    @property
    def installed_torch(self) -> list[str]:
        """Versions of torch that were installed into .venv itself."""
        return [path.name for path in (self.root / ".venv").glob("lib/*/site-packages/torch-*.dist-info")]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root, wheels, calling = tmp_path / "a checkout", tmp_path / "wheels", tmp_path / "calling"
    (root / "scripts").mkdir(parents=True)
    wheels.mkdir()
    for script in ("run", "test", "setup", "make_venv.py"):
        shutil.copy(ROOT / "scripts" / script, root / "scripts")
    (root / "pyproject.toml").write_text('[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling"\n')
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    editable = make_wheel(
        tmp_path,
        "overlap_probe",
        "0.1.0",
        {"overlap_probe_stand_in.py": SAY.format(name="overlap_probe")},
        'Provides-Extra: run\nProvides-Extra: test\nProvides-Extra: dev\nRequires-Dist: torch>=2.9; extra == "run"\n'
        'Requires-Dist: pytest; extra == "test"\n',
        "overlap_probe = overlap_probe_stand_in:main",
    )
    make_wheel(wheels, "hatchling", "1.0", {"hatchling.py": BACKEND.format(wheel=str(editable))})
    make_wheel(
        wheels, "pytest", "1.0", {"pytest_stand_in.py": SAY.format(name="pytest")}, "", "pytest = pytest_stand_in:main"
    )
    torch = {"torch/__init__.py": TORCH.format(version="2.13.0"), "torch/distributed.py": DISTRIBUTED}
    make_wheel(wheels, "torch", "2.13.0", torch)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", calling], check=True, timeout=60)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    return Project(root, calling, environment | {"PYTHON": str(calling / "bin" / "python")})


@pytest.mark.slow
def test_two_set_ups_at_once_make_one_environment_and_the_next_call_finds_it_ready(project: Project) -> None:
    run, test = project.start("run", "--schedule", "a b"), project.start("test", "-k", "x")
    (run_out, run_err), (test_out, test_err) = run.communicate(timeout=120), test.communicate(timeout=120)
    # scripts/run stays in the caller's folder, where the results are to lie; scripts/test goes to the tests.
    assert run_out == f"overlap_probe|2.13.0|{project.calling}|run|--nproc|2|--schedule|a b\n"
    assert test_out == f"pytest|2.13.0|{project.root}|-k|x\n"
    assert (run_err + test_err).count("setting up") == 1
    assert project.call("test", PIP_FIND_LINKS="nothing") == (0, f"pytest|2.13.0|{project.root}\n", "")


@pytest.mark.slow
def test_a_set_up_that_failed_is_done_again_and_a_changed_constraint_is_followed(project: Project) -> None:
    status, out, err = project.call("test", PIP_FIND_LINKS="nothing")
    assert (status, out) == (2, "")
    assert "hatchling" in err  # pip's own words
    assert "PIP_INDEX_URL" in err
    (left_behind := project.root / ".venv" / "left_behind").touch()
    assert project.call("test")[0] == 0
    assert not left_behind.exists()

    wheels = Path(project.environment["PIP_FIND_LINKS"])
    newer = {"torch/__init__.py": TORCH.format(version="2.14.0"), "torch/distributed.py": DISTRIBUTED}
    make_wheel(wheels, "torch", "2.14.0", newer)
    (project.root / "constraints.txt").write_text("torch==2.14.0\n")
    assert project.call("test")[1] == f"pytest|2.14.0|{project.root}\n"


@pytest.mark.slow
def test_a_suitable_torch_of_the_calling_python_is_used_and_an_older_one_is_not(project: Project) -> None:
    project.add_torch("2.9.1")
    status, out, err = project.call("run")
    assert (status, out) == (0, f"overlap_probe|2.9.1|{project.calling}|run|--nproc|2\n")
    assert "using torch 2.9.1" in err
    assert project.installed_torch == []

    for found in (project.calling / "lib").glob("python*/site-packages/torch*"):
        shutil.rmtree(found)
    project.add_torch("2.8.0")
    assert project.call("run")[1] == f"overlap_probe|2.13.0|{project.calling}|run|--nproc|2\n"
    assert project.installed_torch == ["torch-2.13.0.dist-info"]
    assert not list((project.root / ".venv").rglob("zz_calling_python.pth"))  # and sees none of its other packages


def test_an_environment_that_somebody_else_made_is_left_alone(project: Project) -> None:
    theirs = project.root / ".venv" / "pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.touch()
    status, _, err = project.call("test")
    assert status == 2
    assert "was not made by scripts/setup" in err
    assert theirs.exists()


READY = """
import sys
sys.path.insert(0, "scripts")
import make_venv as m
from dataclasses import replace
whole = replace(m.Stamp.wanted(), complete=True, torch=str(m.ROOT / "pyproject.toml"))
changes = [dict(), dict(complete=False), dict(root="/other"), dict(inputs="0"), dict(version="3.9")]
changes += [dict(torch="/gone"), dict(prefix="/other")]
print(*(replace(whole, **change).satisfies(whole) for change in changes))
"""


def test_an_environment_is_ready_only_if_it_is_whole_and_what_it_was_made_from_is_as_it_was(project: Project) -> None:
    # A copy of a checkout brings along a .venv that points to the first one: its root is another.
    python = project.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    command = [project.calling / "bin" / "python", "-c", READY]
    named = project.environment
    unnamed = {name: value for name, value in named.items() if name != "PYTHON"}
    ready = [
        subprocess.check_output(command, cwd=project.root, env=environment, text=True, timeout=60).split()
        for environment in (named, unnamed)
    ]
    assert ready[0] == ["True", "False", "False", "False", "False", "False", "False"]
    assert ready[1] == [
        "True",
        "False",
        "False",
        "False",
        "False",
        "False",
        "True",
    ]  # no Python was asked for: any will do


def test_a_python_that_is_too_old_or_missing_is_named_with_what_to_try(project: Project) -> None:
    old = project.root / "python3.9"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    for python, fault in ((str(old), "is Python 3.9, older than 3.10"), ("/no/python", "is not found")):
        status, _, err = project.call("run", PYTHON=python)
        assert status == 2
        assert f"{python} {fault}" in err
        assert "try PYTHON=" in err
