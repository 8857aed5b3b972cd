"""The supervisor against an agent that is played: what it makes of reports and exit codes, without torch.

The idea: the agent is a short program that writes the report files that real ranks would have written, then ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlap_probe import supervise
from overlap_probe.errors import LaunchError
from overlap_probe.job import Job, LaunchOptions
from overlap_probe.progress import Follower, Progress, to_file
from overlap_probe.ranks_at_work import Rank, to_blame

GONE = 2**22 + 1
"""A process id above the largest that Linux gives out."""


def play(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reports: dict[str, list[tuple[str, object]]], exit_code: int
) -> list[Rank]:
    """Follow an agent that reports this for each file of the logs, and return the ranks as the supervisor saw them."""
    logs = folder / "logs"
    logs.mkdir()
    (logs / "rank9.jsonl").write_text('["pid", {"pid": 1, "token": "of an earlier run"}, 0]\n')
    program = [f"import pathlib, sys; logs = pathlib.Path({str(logs)!r})"]
    for name, events in reports.items():
        identity = [("pid", {"pid": GONE, "token": "t"})] if name.startswith("rank") else []
        lines = "".join(json.dumps([*event, 1]) + "\n" for event in [*identity, *events])
        program.append(f"(logs / '{name}.log').write_text('{name} was here')")
        program.append(f"(logs / '{name}.jsonl').write_text({lines!r})")
    program.append(f"sys.exit({exit_code})")
    monkeypatch.setattr(supervise, "command", lambda module: [sys.executable, "-c", "\n".join(program)])
    job = Job(LaunchOptions(nproc=2), folder, (), parent=os.getpid(), token="t")
    with supervise.Supervisor(job) as supervisor:
        return supervisor.follow(lambda text: None)


WROTE = [("state", "writing"), ("wrote", "x"), ("end", None)]


def test_all_is_well_when_every_rank_wrote_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = play(tmp_path, monkeypatch, {"rank0": WROTE, "rank1": [("note", "n"), *WROTE]}, 0)
    assert [(rank.number, rank.notes) for rank in ranks] == [(0, []), (1, ["n"])]


@pytest.mark.parametrize(
    ("rank1", "agent", "exit_code", "message"),
    [
        ([("note", "0 of 3 steps captured"), ("end", None)], [], 0, "rank 1 left no trace: 0 of 3 steps captured"),
        ([("end", None)], [], 0, "rank 1 left no trace: it captured no step"),
        ([("error", "ValueError: boom")], [("failures", {"1": 1})], 1, "rank 1 failed (ValueError: boom)\nrank 1's"),
        ([("state", "step 1/3")], [("failures", {"1": -9})], 1, "rank 1 was killed by SIGKILL\nrank 1's last report "),
        (WROTE, [("failures", {"1": 3})], 1, "rank 1 ended with exit code 3\nrank 1's last report was 'ended'"),
        (WROTE, [("error", "rendezvous at x")], 1, "rendezvous at x"),
        (WROTE, [("failures", {"7": 1})], 1, "rank 7 ended with exit code 1 at its start; torch's launcher ended"),
        (WROTE, [], 1, "torch's launcher ended with exit code 1\n"),
    ],
)
def test_says_what_went_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank1: list[tuple[str, object]],
    agent: list[tuple[str, object]],
    exit_code: int,
    message: str,
) -> None:
    with pytest.raises(LaunchError) as caught:
        play(tmp_path, monkeypatch, {"rank0": WROTE, "rank1": rank1, "launcher": agent}, exit_code)
    assert str(caught.value).startswith(message)
    if "last report" in message:
        assert "rank1 was here" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_launch_and_tells_where_each_rank_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("a line of rank 0")
    (tmp_path / "logs" / "rank0.jsonl").write_text(
        f'["pid", {{"pid": {GONE}, "token": "t"}}, 0]\n["state", "step 2/3", 0]\n'
    )
    monkeypatch.setattr(supervise, "command", lambda module: ["sleep", "300"])
    job = Job(LaunchOptions(nproc=1), tmp_path, (), parent=os.getpid(), token="t")

    def launch() -> None:
        with supervise.Supervisor(job) as supervisor:
            os.kill(os.getpid(), number)
            supervisor.follow(lambda text: None)

    with pytest.raises(supervise.LaunchInterrupted) as caught:
        launch()
    assert caught.value.signal_number == number
    first, second, *rest = str(caught.value).splitlines()
    assert first == f"stopped by {number.name}"
    assert second.startswith("rank 0's last report was 'step 2/3', its last lines")
    assert rest == ["    a line of rank 0"]


def test_a_signal_that_comes_when_all_is_over_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(supervise, "command", lambda module: ["true"])
    job = Job(LaunchOptions(nproc=1), tmp_path, (), parent=os.getpid(), token="t")
    with pytest.raises(supervise.LaunchInterrupted), supervise.Supervisor(job):
        os.kill(os.getpid(), signal.SIGINT)


def test_agent_that_never_starts_a_rank_runs_into_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(supervise, "command", lambda module: ["sleep", "300"])
    monkeypatch.setattr(supervise, "START_S", 0.3)
    options = LaunchOptions(timeout=0.1, nnodes=2, rdzv_endpoint="head:1", out="x")
    job = Job(options, tmp_path, (), parent=os.getpid(), token="t")
    with (
        pytest.raises(LaunchError, match=r"no rank has started within 0\.3 s; 2 hosts were to meet at head:1"),
        supervise.Supervisor(job) as supervisor,
    ):
        supervisor.follow(lambda text: None)


def test_signal_handlers_are_as_before_after_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in supervise.STOP_SIGNALS]
    play(tmp_path, monkeypatch, {"rank0": WROTE, "rank1": WROTE}, 0)
    assert [signal.getsignal(number) for number in supervise.STOP_SIGNALS] == before


def rank(tmp_path: Path, number: int, *, exitcode: int | None, error_ns: int | None = None) -> Rank:
    made = Rank(number, process=GONE, log=tmp_path / "log", follower=Follower(tmp_path / "jsonl"), exitcode=exitcode)
    if error_ns is not None:
        made.error, made.error_ns = "RuntimeError: x", error_ns
    return made


def test_blame_falls_on_the_first_failure_not_on_those_that_fell_with_it(tmp_path: Path) -> None:
    lost_its_peer = rank(tmp_path, 0, exitcode=1, error_ns=200)
    ended_by_the_launcher = rank(tmp_path, 2, exitcode=-signal.SIGTERM)
    aborted_by_nccl = rank(tmp_path, 3, exitcode=-signal.SIGABRT)
    fell = [lost_its_peer, ended_by_the_launcher, aborted_by_nccl]
    crashed = rank(tmp_path, 1, exitcode=-signal.SIGSEGV)
    raised = rank(tmp_path, 1, exitcode=1, error_ns=100)
    assert to_blame([*fell, crashed]) is crashed
    assert to_blame([*fell, raised]) is raised
    assert to_blame([]) is None


def test_reports_are_read_once_and_only_when_their_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    follower = Follower(path)
    assert list(follower.new_events()) == []  # not there yet
    path.write_bytes(b'["state", "warm-up", 5]\n["state", "st')
    assert [(event.value, event.time_ns) for event in follower.new_events()] == [("warm-up", 5)]
    with path.open("ab") as file:
        file.write(b'ep 1/3", 6]\n')
    assert [event.value for event in follower.new_events()] == ["step 1/3"]
    assert list(follower.new_events()) == []


def test_a_heartbeat_moves_the_time_of_the_file_and_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    progress = Progress()
    progress.beat()  # nobody listens
    progress.listener = to_file(path)
    progress.report("state", "warm-up")
    os.utime(path, (1, 1))
    progress.beat()
    assert path.stat().st_mtime > 1
    assert len(list(Follower(path).new_events())) == 1
    os.utime(path, (1, 1))
    progress.beat()  # at most one a second
    assert path.stat().st_mtime == 1


def test_a_process_whose_parent_is_gone_ends_itself(tmp_path: Path) -> None:
    """The last resort of a rank: launcher and agent killed at once."""
    root = Path(__file__).resolve().parent.parent
    child = (
        f"import sys, os, time; sys.path.insert(0, {str(root)!r}); from overlap_probe.job import end_with_parent; "
        f"end_with_parent(os.getppid(), lambda: (open({str(tmp_path / 'ended')!r}, 'w').close(), os._exit(0))); "
        "print(flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE); "
        "p.stdout.readline()"
    )
    subprocess.run([sys.executable, "-c", parent, child], check=True, timeout=30)
    limit = time.monotonic() + 5
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
