"""Everything that the README claims is done here, with the README's own text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAIN = [sys.executable, "-m", "overlap_probe"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*MAIN, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def shape(text: str) -> list[str]:
    """What a transcript says without its numbers, names of runs, and wrapping: one entry a kind of line."""
    text = re.sub(r"overlap_probe_runs/\S+?/", "RUN/", text)
    text = re.sub(r"-?\d+(?:\.\d+)?", "N", text)
    text = re.sub(r"N (?:ns|us|ms|s)\b", "N T", text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]


def transcript() -> str:
    match = re.search(r"```text\n\$ (overlap_probe [^\n]*)\n(.*?)```", README, re.DOTALL)
    assert match
    assert match[1] == "overlap_probe run --nproc 2"
    return match[2]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    where = tmp_path_factory.mktemp("newcomer")
    return where, run("run", "--nproc", "2", "--device", "cpu", cwd=where)


def test_the_main_job_prints_what_the_readme_shows(first_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, made = first_run
    assert made.returncode == 0, made.stdout + made.stderr
    printed, shown = shape(made.stderr + made.stdout), shape(transcript())
    rows = [line for line in shown if line.startswith("ProfilerStep#N")]
    assert [line for line in printed if line.startswith("ProfilerStep#N")] == rows  # a row a window, rank and scope
    fixed = [line for line in shown if re.match(r"\[|window |Counted|PASS|report:|Left out", line)]
    fixed = [line for line in fixed if "no GPU" not in line]  # said only where there is none, and --device cpu was not
    missing = [
        line for line in fixed if re.sub(r" \(all.*", "", line) not in [re.sub(r" \(all.*", "", p) for p in printed]
    ]
    assert not missing


def test_the_run_leaves_what_the_readme_promises(first_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    where, made = first_run
    report = made.stdout.strip().splitlines()[-1].removeprefix("report: ")
    folder = (where / report).parent
    assert {"rank0.json.gz", "rank1.json.gz", "result.json", "report.html", "junit.xml"} <= {
        p.name for p in folder.iterdir()
    }


def test_the_negative_control_fails(tmp_path: Path) -> None:
    assert "scripts/run --schedule serial" in README
    made = run("run", "--nproc", "2", "--device", "cpu", "--schedule", "serial", "-o", "out", cwd=tmp_path)
    assert made.returncode == 1, made.stdout + made.stderr
    assert "0 of 3 expected forward all-gathers overlap a GEMM" in made.stdout


def test_the_library_example_runs_as_it_stands(tmp_path: Path) -> None:
    example = re.search(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)
    assert example
    code = re.sub(r"\s*#.*", "", example[1])
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pass")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_commands_on_traces_work_as_shown(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/data/cpu_prefetch", tmp_path / "out")
    shown = re.findall(r"^    overlap_probe ((?:analyze|report|assert) out/.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(shown) == 3
    for line in shown:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        done = run(*words, cwd=tmp_path)
        assert done.returncode in ((0,) if words[0] != "assert" else (0, 1)), done.stderr
        assert "Traceback" not in done.stderr
    assert {"overlap.html", "junit.xml"} <= {p.name for p in tmp_path.iterdir()}


def test_every_check_in_the_table_is_a_check() -> None:
    import overlap_probe as op

    checks = re.findall(r"^\| `([^`]+)` \|", README.split("## In CI")[1].split("##")[0], re.MULTILINE)
    assert len(checks) >= 5
    judged = op.analyze_run(ROOT / "tests/data/cpu_prefetch")
    for check in checks:
        assert op.evaluate(judged, [check]).status in ("pass", "fail")


def test_the_pictures_and_pages_it_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target
