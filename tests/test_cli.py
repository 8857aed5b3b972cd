"""The command line with real files: every command and option, the four exit codes, and one line for each mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest
from command_line import call, needs_torch
from documents import ROOT, commands

from overlap_probe.cli import main
from overlap_probe.commands.files import InputFile, OutputFile

DATA = Path(__file__).parent / "data"

FILES = {
    "LATE0": DATA / "fsdp2_llama8_b4s1024_rank0.json.gz",
    "LATE1": DATA / "fsdp2_llama8_b4s1024_rank1.json.gz",
    "RING0": DATA / "linear8_ring_prefetch_rank0.json.gz",
    "RING1": DATA / "linear8_ring_prefetch_rank1.json.gz",
    "COPIES": DATA / "linear8_p2p_inplace_implicit_rank0.json.gz",
    "NSYS": DATA / "nsys2024_gemm_copy.sqlite",
}
"""Real traces, by the names that the commands below give them. OUT is a fresh folder."""

PREPARED = (
    "analyze RING0 RING1 --json OUT/result.json",
    "baseline save OUT/result.json -o OUT/baseline.json --fail-on 'hidden < -5%'",
)
"""What is there before each of the commands below."""

ENDS = {
    "analyze LATE0 LATE1 --collectives --what-if --json OUT/r.json --junit OUT/j.xml --report OUT/r.html": 0,
    "analyze COPIES --rank 0 --rule 'all_gather=Memcpy PtoP' --window 'step[01]' --min-overlap 5us": 0,
    r"analyze RING0 --unit-label 'unit (\d+)' --report OUT/r.csv": 0,
    "analyze OUT/result.json --report OUT/r.md": 0,
    "analyze NSYS": 0,
    "report LATE0 LATE1 -o OUT/r.html --what-if --window 'ProfilerStep#1'": 0,
    r"report COPIES -o OUT/r.txt --rank 0 --rule 'all_gather=Memcpy PtoP' --min-overlap 0 --unit-label 'unit (\d+)'": 0,
    "report OUT/result.json -o OUT/r.xml": 0,
    "assert RING0 RING1 --overlaps 6 --hidden '>=50%' --exposed 900us --stalled '<= 1ms' --at-least 3/3": 0,
    "assert RING0 --net-hidden '>= 0' --slowdown '< 100%'": 0,
    "assert OUT/result.json --check 'all_gather.hidden >= 50%' --check 'overlaps >= 6'": 0,
    "assert COPIES --overlaps 6 --rule 'all_gather=Memcpy PtoP' --rank 0 --window 'step[01]' --min-overlap 1us": 0,
    r"assert LATE0 LATE1 --overlaps auto --what-if --unit-label 'unit (\d+)' --json OUT/r.json --junit OUT/j.xml": 1,
    "assert RING0 RING1 --hidden 99% --report OUT/r.html --github-summary OUT/s.md": 1,
    "assert RING0 RING1 --overlaps auto --junit OUT/j.xml": 3,
    "assert NSYS --overlaps 1": 3,
    "assert COPIES --overlaps 1": 3,
    "assert RING0 RING1 --hidden 99% --overlaps auto": 1,  # a failed check outranks inconclusive
    "diff OUT/result.json RING0 --fail-on 'hidden < -5%'": 3,
    "diff RING0 RING1 --windows --json OUT/d.json --junit OUT/j.xml --github-summary OUT/s.md": 0,
    r"diff COPIES COPIES --rule 'all_gather=Memcpy PtoP' --window 'step\d' --min-overlap 1us --unit-label '(x)'": 0,
    "baseline save RING0 -o OUT/b.json --fail-on 'hidden < -5%' --window 'step[12]' --min-overlap 1us": 0,
    r"baseline save COPIES -o OUT/b.json --rule 'all_gather=Memcpy PtoP' --unit-label 'unit (\d+)'": 0,
    "baseline check OUT/result.json OUT/baseline.json --windows --json OUT/d.json --junit OUT/j.xml": 0,
    "baseline check RING0 OUT/baseline.json --fail-on 'overlaps < 0' --github-summary OUT/s.md": 3,
    r"baseline check COPIES OUT/baseline.json --rule 'all_gather=a' --window s --min-overlap 0 --unit-label '(x)'": 3,
    "scrub RING0 -o OUT/shared.json.gz": 0,
}
"""Commands, and how they end."""

MISTAKES = {
    "assert RING0": "no check was given",
    "assert RING0 --check 'overlap > 1'": "no metric 'overlap'",
    "assert nowhere --hidden 80": "hidden is a time",
    "assert RING0 --overlaps auto --at-least 4/3": "--at-least '4/3'",
    "assert --overlaps auto": "PATHS",
    "assert RING0 RING1 --rank 0 --overlaps 1": "--rank",
    "assert nowhere.json --overlaps auto": "nowhere.json: ",
    "assert OUT/cut.json.gz --overlaps 1": "cut.json.gz: ",
    "assert OUT/text.json --overlaps 1": "text.json: ",
    "assert OUT/empty --overlaps 1": "no trace in this folder",
    "assert OUT/loop --overlaps 1": "loop: cannot be read: Too many levels of symbolic links",
    "diff OUT/loop RING0": "loop: cannot be read: Too many levels of symbolic links",
    "baseline check RING0 OUT/loop": "there is no such baseline",
    "report OUT/loop/x -o OUT/r.html": "loop/x: cannot be read",
    f"assert {'x' * 300}.json --overlaps 1": "xxx.json: File name too long",
    "assert '' --overlaps 1": "the path is empty",
    "baseline check '' OUT/baseline.json": "the path is empty",
    "analyze RING0 --window '('": "--window '('",
    "analyze RING0 --rule nonsense": "--rule 'nonsense'",
    "analyze RING0 --min-overlap 5": "--min-overlap '5'",
    "analyze RING0 --json OUT/empty": "cannot be written",
    "analyze nowhere --report OUT/r.pdf": "r.pdf: no format",
    "analyze nowhere --report OUT/mistyped/r.html": "there is no folder",
    "analyze nowhere --json OUT/mistyped/r.json": "there is no folder",
    "analyze OUT/result.json --what-if": "is a result",
    "assert nowhere --junit OUT/mistyped/j.xml --overlaps 1": "there is no folder",
    "assert nowhere --github-summary OUT/mistyped/s.md --overlaps 1": "there is no folder",
    "assert nowhere --hidden 500%": "at most 100%",
    "report nowhere -o OUT/r.pdf": "r.pdf: no format",
    "report OUT/result.json -o OUT/r.html --window step": "is a result",
    "diff nowhere nowhere --json OUT/mistyped/d.json": "there is no folder",
    "baseline save nowhere -o OUT/mistyped/b.json": "there is no folder",
    "analyze RING0 --bogus": "--bogus",
    "report RING0 -o /proc/no/r.html": "cannot be written",
    "report OUT/other.json -o OUT/r.html": "schema 99",
    "diff RING0": "NEW",
    "diff RING0 nowhere": "nowhere: ",
    "diff RING0 RING1 --fail-on 'hidden < auto'": "--fail-on 'hidden < auto'",
    "baseline save RING0": "--output",
    "baseline check RING0 OUT/result.json": "no baseline",
    "baseline check RING0 OUT/asks_nothing.json": "names nothing to fail on",
    "baseline nonsense": "nonsense",
    "nonsense": "nonsense",
    "run --nproc 0": "--nproc",
    "run --device tpu": "--device",
    "run --timeout nan": "--timeout: expected a number of seconds, more than 0, got nan",
    "run --steps 0 --warmup 1": "--steps",
    "run --nnodes 2 --node-rank 0": "--nnodes",
    "run --rdzv-endpoint nonsense --rdzv-id x -o OUT/run": "--rdzv-endpoint",
    "run --target nonsense": "--target",
    "run --gather nonsense": "--gather",
    "run --check 'hidden > 1' --timeout 9": "hidden is a time",
    "run -- nowhere.py": "nowhere.py",
    "scrub nowhere.json -o OUT/x.json": "nowhere.json",
}
"""Commands that are wrong, and what their one line has to name."""

RUN = (
    "run --nproc 2 -o OUT/run --device cpu --profiler torch --schedule serial --gather process_group --children 2"
    " --dim 64 --batch 8 --warmup 1 --steps 2 --timeout 60 --retries 1"
    " --overlaps 1 --hidden '>=0' --exposed 9s --stalled 9s --net-hidden '>=0'"
    r" --slowdown 9s --check 'forward.all_gather.hidden > 90%' --at-least 2/2 --what-if"
    r" --rule 'all_to_all=x' --window 'ProfilerStep#\d' --min-overlap 1us --unit-label 'unit (\d+)'"
)
"""A small run whose gathers cannot overlap."""

ELSEWHERE = {
    "doctor": {"--json"},
    "run": {"script", "--target", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id"},
}
"""What other tests use for real: the doctor's own, and those of the launcher and the examples."""


def words(command: str, out: Path) -> list[str]:
    """The words of a command, with the names of files filled in."""
    filled = (FILES.get(word, word) for word in shlex.split(command))
    return [re.sub(r"\bOUT\b", str(out), str(word)) for word in filled]


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """The folder OUT with a result, a baseline, and files that cannot be read."""
    for command in PREPARED:
        assert call(capsys, *words(command, tmp_path)).code == 0
    (tmp_path / "cut.json.gz").write_bytes(FILES["RING0"].read_bytes()[:9000])
    (tmp_path / "text.json").write_text("not a trace")
    (tmp_path / "other.json").write_text('{"schema": 99, "run": {}, "traces": []}')
    baseline = json.loads((tmp_path / "baseline.json").read_text())
    (tmp_path / "asks_nothing.json").write_text(json.dumps(baseline | {"fail_on": []}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Every command with its name as it is typed."""
    waiting: list[tuple[str, click.Command]] = [("", main)]
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, click.Group):
            waiting += [(f"{name} {sub}".strip(), found) for sub, found in command.commands.items()]
        else:
            yield name, command


@pytest.mark.parametrize("command", ENDS)
def test_a_command_ends_with_its_exit_code_and_writes_what_it_was_asked_for(
    command: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(out)
    done = call(capsys, *words(command, out))
    assert done.code == ENDS[command], done.out + done.err
    assert done.err == ""
    asked = {out / name for name in re.findall(r"(?:-o|--json|--junit|--report|--github-summary) OUT/(\S+)", command)}
    assert files(out) - before == asked
    assert all(path.stat().st_size for path in asked)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_exit_code_2_with_one_line_that_names_it_and_nothing_written(
    command: str, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    before = files(out)
    done = call(capsys, *words(command, out))
    assert (done.code, done.out) == (2, ""), done.out + done.err
    assert done.err.startswith("overlap_probe: ")
    assert done.err.count("\n") == 1, done.err
    assert MISTAKES[command] in done.err
    assert files(out) == before


READ_AND_WRITTEN = [
    (name, option.opts[-1])
    for name, command in every_command()
    if any(isinstance(param.type, InputFile) for param in command.params)
    for option in command.params
    if isinstance(option.type, OutputFile)
]
"""Commands that read files, with each of their options that name a file to write."""


@pytest.mark.parametrize("output", ["run/rank0.json", "link.json", "run/../run/rank0.json"])
@pytest.mark.parametrize("read", ["run/rank0.json", "run"])
@pytest.mark.parametrize(("command", "option"), READ_AND_WRITTEN)
def test_no_command_overwrites_what_it_reads(
    command: str, option: str, read: str, output: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "run" / "rank0.json"
    trace.parent.mkdir()
    trace.write_text("precious")
    (tmp_path / "link.json").symlink_to(trace)
    inputs = 2 if command in ("diff", "baseline check") else 1
    check = ["--overlaps", "1"] if command == "assert" else []
    done = call(capsys, *command.split(), *[tmp_path / read] * inputs, *check, option, tmp_path / output)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"overlap_probe: {tmp_path / output}: is what is read, and would be overwritten; " + (
        "write to another file\n"
    )
    assert trace.read_text() == "precious"


def test_the_result_that_stands_for_a_folder_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], out: Path, tmp_path: Path
) -> None:
    before = (out / "result.json").read_text()
    assert "is what is read" in call(capsys, "diff", out, out, "--json", out / "result.json").err
    assert "is what is read" in call(capsys, "report", out / "result.json", "-o", out / "result.json").err
    assert (out / "result.json").read_text() == before


def test_an_output_may_replace_an_older_one_in_the_folder_that_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json.gz").write_bytes(FILES[f"RING{rank}"].read_bytes())
    for _ in range(2):  # the second time, what the first wrote is no trace of the run
        for command in (
            "assert OUT --overlaps 6 --json OUT/numbers.json",
            "baseline save OUT -o OUT/kept.json --fail-on 'hidden < -5%'",
            "diff OUT/rank0.json.gz OUT/rank0.json.gz --json OUT/changes.json",
        ):
            done = call(capsys, *words(command, tmp_path))
            assert done.code == 0, done.out + done.err


def test_a_crash_is_neither_a_verdict_nor_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("what nobody\nforesaw")

    monkeypatch.setattr("overlap_probe.commands.assert_.load", broken)
    done = call(capsys, "assert", "some file", "--overlaps", "1")
    assert done.code == 2
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert done.err.splitlines()[-1] == (
        "overlap_probe: internal error: ZeroDivisionError: what nobody foresaw "
        "(command assert 'some file' --overlaps 1); please report it with this traceback"
    )


def test_a_mistake_is_one_line_with_a_click_before_8_2_too() -> None:
    code = (
        "import click\nif hasattr(click.exceptions, 'NoArgsIsHelpError'): del click.exceptions.NoArgsIsHelpError\n"
        "from overlap_probe.cli import main\nmain(['assert', 'nowhere'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


@pytest.mark.slow
@needs_torch
def test_a_small_run_with_every_option_fails_its_check(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, *words(RUN, out))
    assert done.code == 1, done.out + done.err
    assert done.out.splitlines()[-2].startswith("FAIL  ")
    assert done.out.splitlines()[-1] == f"report: {out / 'run' / 'report.html'}"
    for name in ("result.json", "report.html", "junit.xml"):
        assert (out / "run" / name).stat().st_size


def test_every_option_of_every_command_is_used_above() -> None:
    used: dict[str, set[str]] = {name: set(some) for name, some in ELSEWHERE.items()}
    for command in (*ENDS, RUN):
        typed = shlex.split(command)
        name = " ".join(typed[:2]) if typed[0] == "baseline" else typed[0]
        used.setdefault(name, set()).update(word.partition("=")[0] for word in typed if word.startswith("-"))
    for name, command in every_command():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert {*parameter.opts} & used[name], f"{name} {parameter.opts}"


def test_every_command_and_option_says_what_it_is_for() -> None:
    documents = [*(ROOT / "overlap_probe" / "docs").glob("*.md"), ROOT / "README.md"]
    shown = {" ".join(found[1:]) for path in documents for found in commands(path.read_text("utf-8"))}
    for name, command in every_command():
        assert command.help, name
        assert any(text.startswith(name) for text in shown), f"{name} is in no document"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


@needs_torch
def test_run_offers_the_schedules_and_gathers_of_the_runtime() -> None:
    from fsdp_runtime.gather import GatherName
    from fsdp_runtime.schedule import ScheduleName

    offered = {parameter.name: parameter.type for parameter in main.commands["run"].params}
    for name, names in (("schedule", ScheduleName), ("gather", GatherName)):
        choice = offered[name]
        assert isinstance(choice, click.Choice)
        assert set(choice.choices) == set(get_args(names))


def test_help_works_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in every_command():
        done = call(capsys, *name.split(), "--help")
        assert done.code == 0
        assert all(option.opts[-1] in done.out for option in command.params if isinstance(option, click.Option))
    assert call(capsys, "--version").out.split()[-1].count(".") == 2


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f'overlap_probe() {{ {shlex.quote(sys.executable)} -m overlap_probe "$@"; }}\n{command}'
    return subprocess.run(["bash", "-c", script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_an_output_that_cannot_be_written_is_no_verdict(tmp_path: Path) -> None:
    ring = shlex.quote(str(FILES["RING0"]))
    full = shell(f"overlap_probe assert {ring} --overlaps 6 > /dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (
        2,
        "overlap_probe: the output cannot be written: No space left on device\n",
    )
    gone = shell(f"overlap_probe analyze {ring} --collectives | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (gone.returncode, gone.stderr) in ((141, ""), (0, ""))  # 0: all of it fitted into the pipe in time
