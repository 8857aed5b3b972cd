"""What the documents say is true: their examples end as they say, their commands parse, their workflow runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from command_line import call, needs_torch
from documents import DOCUMENTS, ROOT, blocks, commands
from jsonschema import Draft202012Validator
from nsys_databases import NsysDatabase

from overlap_probe import schema
from overlap_probe.cli import main

EXAMPLES = ROOT / "overlap_probe" / "docs" / "examples"
OWN_TRAINING = (ROOT / "overlap_probe" / "docs" / "own_training.md").read_text("utf-8")
CI = (ROOT / "overlap_probe" / "docs" / "ci.md").read_text("utf-8")

PROMISED = {
    command: int(code)
    for command, code in re.findall(r"^\| `(overlap_probe run [^`]*)` \| (\d) \|", OWN_TRAINING, re.MULTILINE)
}
"""Commands of the table of examples, and how they end."""


# -- examples


def test_every_example_is_in_the_table() -> None:
    run = {word for command in PROMISED for word in shlex.split(command) if word.endswith(".py")}
    assert run == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize("command", PROMISED, ids=lambda command: re.search(r"\w+\.py", command)[0])
def test_an_example_ends_as_the_document_says(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(EXAMPLES)
    before = set(EXAMPLES.glob("[!_]*"))
    _, run, *arguments = shlex.split(command)
    done = call(capsys, run, "-o", tmp_path / "out", *arguments)
    assert done.code == PROMISED[command], done.out + done.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("rank0.json.gz", "rank1.json.gz", "result.json", "report.html", "junit.xml", "logs")
    }
    assert set(EXAMPLES.glob("[!_]*")) == before
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert not list(Draft202012Validator(schema.load()).iter_errors(result))
    assert all(len(trace["windows"]) == 4 for trace in result["traces"])  # three steps, and the whole
    if command.endswith("fsdp2.py"):
        forward = [
            w["forward"] for trace in result["traces"] for name, w in trace["windows"].items() if name != "whole"
        ]
        assert {(phase["expected"], phase["found"], phase["all_gather"]["hidden_ns"]) for phase in forward} == {
            (3, 0, 0)
        }
        assert "Why all-gathers were exposed:" in done.out


def test_without_a_number_ddp_is_inconclusive_as_the_document_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    database = NsysDatabase()
    database.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 100, 0, streamId=21)
    database.kernel("nvjet_tst", 20, 90, 10)
    trace = database.write(tmp_path / "ddp.sqlite")
    assert call(capsys, "assert", trace, "--overlaps", "auto").code == 3
    assert call(capsys, "assert", trace, "--check", "all_reduce.overlaps >= 1").code == 0


def test_nvtx_ranges_name_units_for_nsight_systems_as_the_document_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Two steps of four layers. A layer's GEMM begins every 200 us and takes 199; its gather runs from 100 to 20 us
    # before that, so all gathers but the first lie inside the GEMM of the layer before.
    database = NsysDatabase()
    for step in range(2):
        at = 5000 * step
        database.range(f"step {step}", at, at + 2000)
        for layer in range(4):
            begin = at + 400 + 200 * layer
            database.range(f"MFSDP layers.{layer} forward", at + 60 * layer, at + 60 * layer + 50)
            database.kernel(
                "ncclDevKernel_AllGather_RING_LL", begin - 100, begin - 20, at + 60 * layer + 10, streamId=21
            )
            database.kernel("nvjet_tst", begin, begin + 199, at + 60 * layer + 30)
    trace = database.write(tmp_path / "rank0.sqlite")
    done = call(capsys, "assert", trace, "--overlaps", "auto", "--window", r"step \d+", "--json", tmp_path / "r.json")
    assert done.code == 0, done.out + done.err
    windows = json.loads((tmp_path / "r.json").read_text())["traces"][0]["windows"]
    assert {name: (w["forward"]["expected"], w["forward"]["found"]) for name, w in windows.items()} == {
        "whole": (6, 6),
        "step 0": (3, 3),
        "step 1": (3, 3),
    }


# -- commands


def parse(words: list[str]) -> None:
    """Parse a command line as the command line does, down to the subcommand; raises if it is wrong."""
    command: click.Command | None = main
    context = click.Context(main)
    _, *rest = words
    while isinstance(command, click.Group):
        name, *rest = rest
        command = command.get_command(context, name)
    if command is None:
        raise click.UsageError(f"no command {name}")
    command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "README.md"], ids=lambda path: path.name)
def test_every_command_in_the_documents_parses(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.chdir(tmp_path)
    Path("overlap").mkdir()  # a run's folder, which some of them write into
    found = commands(path.read_text("utf-8"))
    assert found or path.name in ("causes.md", "pytest.md")
    for words in found:
        parse(words)


def test_a_command_that_does_not_parse_is_found() -> None:
    for wrong in ("overlap_probe asert x", "overlap_probe assert x --overlap auto", "overlap_probe baseline check x"):
        (words,) = commands(f"    {wrong}")
        with pytest.raises(click.UsageError):
            parse(words)


# -- the workflow


def workflow() -> dict[str, Any]:
    (text,) = blocks(CI, "yaml")
    return dict(yaml.safe_load(text))


def test_the_workflow_is_one_and_keeps_what_it_promises() -> None:
    made = workflow()
    assert made[True] == ["push", "pull_request"]  # YAML's `on`
    assert made["jobs"]["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    for job in made["jobs"].values():
        assert job["timeout-minutes"] <= 30
        steps = job["steps"]
        assert all(("uses" in step) != ("run" in step) for step in steps)
        (upload,) = [step for step in steps if step.get("uses", "").startswith("actions/upload-artifact@")]
        (run,) = [step["run"] for step in steps if step.get("name") == "Run"]
        assert upload["with"]["path"] == commands(f"    {run}")[0][commands(f"    {run}")[0].index("-o") + 1]
        summary = [step for step in steps if "--github-summary" in step.get("run", "")]
        assert all(step["if"] == "always()" for step in (upload, *summary))
        assert summary


@pytest.mark.slow
@needs_torch
def test_the_cpu_job_runs_here_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "overlap_probe"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m overlap_probe "$@"\n')
    command.chmod(0o755)
    script = (EXAMPLES / "labelled.py").read_text("utf-8")
    (tmp_path / "train.py").write_text(script.replace("range(5)", "range(7)").replace("steps=3", "steps=5"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    steps = [s["run"] for s in workflow()["jobs"]["cpu"]["steps"] if s.get("run", "").startswith("overlap_probe")]
    assert len(steps) == 3
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", step], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "✅ PASS" in (tmp_path / "summary.md").read_text("utf-8")
    assert {"report.html", "result.json", "junit.xml"} <= {path.name for path in (tmp_path / "overlap").iterdir()}
