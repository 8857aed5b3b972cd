"""What is shipped, what it needs, and which module may know what."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import overlap_probe

ROOT = Path(__file__).parent.parent
PACKAGES = ("overlap_probe", "fsdp_runtime")
SHELL_SCRIPTS = (".ci/run", "scripts/run", "scripts/setup", "scripts/test")

CORE = ("tables", "kernels", "labels", "intervals", "overlap", "causes", "ranks", "checks")
HEAVY = ("torch", "matplotlib", "pandas", "click", "jinja2", "rich", "sqlalchemy", "fsdp_runtime")
"""What is imported only where it is needed: by a command, a renderer, a reader of databases, or a launched rank."""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Top-level names of the absolute imports anywhere in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


# -- what is shipped


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from this checkout by the build back end that is installed (nothing is downloaded)."""
    assert importlib.util.find_spec("hatchling"), "the `dev` extra brings the build back end: pip install -e '.[dev]'"
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return zipfile.ZipFile(made)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_wheel_holds_every_file_of_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == here
    assert any(name.startswith("overlap_probe/render/") and name.endswith(".j2") for name in shipped)
    assert {f"{package}/py.typed" for package in PACKAGES} <= shipped


def test_the_version_stands_in_one_place(wheel: zipfile.ZipFile) -> None:
    assert Parser().parsestr(metadata(wheel, "METADATA"))["Version"] == overlap_probe.__version__
    quoted = re.compile(rf"""["']{re.escape(overlap_probe.__version__)}["']""")
    places = [path for path in (*sources(), ROOT / "pyproject.toml") if quoted.search(path.read_text("utf-8"))]
    assert places == [ROOT / "overlap_probe" / "__init__.py"]


def test_the_changelog_knows_the_version() -> None:
    assert f"## [{overlap_probe.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_installing_the_package_asks_for_no_torch(wheel: zipfile.ZipFile) -> None:
    required = Parser().parsestr(metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    torch = [line for line in required if re.match(r"(torch|nvtx)\b", line)]
    assert len(torch) == 2
    assert all(re.search(r"extra == ['\"]run['\"]", line) for line in torch)


def test_the_command_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    assert "overlap_probe = overlap_probe.cli:main" in metadata(wheel, "entry_points.txt").splitlines()


def test_what_is_imported_is_what_is_declared(wheel: zipfile.ZipFile) -> None:
    required = Parser().parsestr(metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    declared = {
        re.split(r"[^\w-]", line)[0].lower()
        for line in required
        if not re.search(r"extra == ['\"](test|dev)['\"]", line)
    }
    imported = set().union(*(imports_of(path) for path in sources()))
    assert {name.lower() for name in imported - sys.stdlib_module_names} - set(PACKAGES) == declared


def test_every_direct_requirement_is_pinned(wheel: zipfile.ZipFile) -> None:
    required = Parser().parsestr(metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    direct = {re.split(r"[^\w-]", line)[0].lower() for line in required}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9-]+==[\w.]+(; python_version (<|>=) \"3\.\d+\")?$", line) for line in pins)
    assert direct <= {line.partition("==")[0] for line in pins}


# -- which module may know what


@pytest.mark.parametrize("module", ["overlap_probe", *(f"overlap_probe.{name}" for name in CORE)])
def test_the_analysis_core_imports_no_torch_no_plotting_and_no_command_line(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_only_the_built_in_workload_knows_fsdp_runtime() -> None:
    knowing = {path.relative_to(ROOT).as_posix() for path in sources() if "fsdp_runtime" in imports_of(path)}
    assert {path for path in knowing if path.startswith("overlap_probe/")} == {"overlap_probe/workload.py"}


def test_fsdp_runtime_does_not_know_overlap_probe() -> None:
    assert not [
        path for path in sources() if path.is_relative_to(ROOT / "fsdp_runtime") and "overlap_probe" in imports_of(path)
    ]


# -- what lies in the repository


def repository_files() -> list[Path]:
    """Files that are committed or could be: everything that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_the_machine_it_was_made_on() -> None:
    # Each pattern breaks a word that it looks for, so that it does not find itself.
    machine = re.compile(
        rb"(?<![\w.>-])/(?:wor[k]|roo[t]|far[m])/[\w.]|/tm[p]/w/|/opt/(?:pyp[i]|wheel[s])|\.librar[y]/"
    )
    named = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192] and (match := machine.search(content)):
            named.append(f"{path.relative_to(ROOT)}: {content[max(0, match.start() - 30) : match.end() + 30]!r}")
    assert not named


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_scripts_can_be_executed(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_scripts_pass_shellcheck() -> None:
    checker = shutil.which("shellcheck")
    command = [checker] if checker else ["bash", "-n"]  # where there is no shellcheck, at least the syntax
    for script in SHELL_SCRIPTS:
        done = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
