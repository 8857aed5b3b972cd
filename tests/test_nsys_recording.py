"""``run --profiler nsys``: real ranks under a stand-in for ``nsys``, from the command line to the verdict.

The database that it exports, of each rank (us): two units under the root whose gathers run on stream 22, GEMMs on 7.

    gather  root 100-140    a 140-180    b 190-250
    gemm                    a 185-235             b 255-355

b has 190-235 of its 60 us inside the GEMM of a; of 2 children 2 - 1 = 1 is expected to overlap.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_nsys
import pytest
from command_line import call
from nsys_databases import NsysDatabase
from test_launch_failures import lives, wait_until
from test_launch_supervise import GONE

import overlap_probe as op
from overlap_probe import nsys_command, nsys_rank, nsys_trace
from overlap_probe.errors import LaunchError
from overlap_probe.launch import LaunchOptions, run
from overlap_probe.nsys_recording import CAPTURE, NsysRecording, Nvtx
from overlap_probe.progress import PROGRESS, Event

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent
GATHER, GEMM = "ncclDevKernel_AllGather_RING_LL(x)", "nvjet_sm90_tst_128x256_TNT"
SECRET = "HF_TOKEN=hf_a_secret"

SCRIPT = """
    import os, sys, tempfile, time
    import torch
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = os.environ["RANK"]
    print("temporary folder", tempfile.gettempdir(), flush=True)
    def train(steps):
        for _ in range(steps):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
"""


def recorded(steps: tuple[str, ...] = ("ProfilerStep#2",)) -> NsysDatabase:
    """What Nsight Systems makes of a rank."""
    made = NsysDatabase()
    made.add("TARGET_INFO_SYSTEM_ENV", devStateName="environment", name="environ", value=SECRET)
    made.range(CAPTURE, 0, 2000)
    for number, step in enumerate(steps):
        made.range(step, 1000 * number, 1000 * number + 99, eventType=60)
    for unit, launched, start, end in (("", 3, 100, 140), (" (a)", 23, 140, 180), (" (b)", 43, 190, 250)):
        made.range(f"FSDP::pre_forward{unit}", launched - 2, launched + 12)
        made.range(f"FSDP::all_gather{unit}, op_id = {launched}", launched - 1, launched + 7)
        made.kernel(GATHER, start, end, launched, streamId=22)
    made.kernel(GEMM, 185, 235, 53)
    made.kernel(GEMM, 255, 355, 63)
    return made


@pytest.fixture
def nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for ``nsys`` that is on the PATH and exports what `recorded` makes."""
    home = fake_nsys.install(tmp_path)
    recorded().write(home / "database.sqlite")
    monkeypatch.setenv("PATH", str(home), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return home


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(body))
    return path


def calls(home: Path, command: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (home / f"{command}.calls").read_text().splitlines()]


def left_in(folder: Path) -> set[str]:
    """What a run has left in its folder beside the logs, and of its own in the temporary folder."""
    left = [*(folder / "out").iterdir(), *(folder / "tmp").glob("overlap_probe*")]
    return {path.name for path in left} - {"logs"}


def test_from_the_command_line_to_the_verdict(nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    (out / "rank0.json.gz").write_text("of an earlier run, by the other profiler")
    ran = call(capsys, "run", "--profiler", "nsys", "--steps", "1", "-o", out, "--", script(tmp_path, "train(3)"))
    assert (ran.code, ran.out.splitlines()[-2][:4]) == (0, "PASS"), ran.out + ran.err
    assert left_in(tmp_path) == {"rank0.sqlite", "rank1.sqlite", "result.json", "report.html", "junit.xml"}
    assert "rank 0: exporting what nsys recorded" in ran.err

    result = json.loads((out / "result.json").read_text())
    assert result["run"]["arguments"]["profiler"] == "nsys"
    assert result["run"]["versions"]["nsys"] == fake_nsys.VERSION
    assert [(trace["format"], trace["rank"]) for trace in result["traces"]] == [("nsys", 0), ("nsys", 1)]
    forward = result["traces"][1]["windows"]["ProfilerStep#2"]["forward"]
    assert (forward["children"], forward["expected"], forward["found"]) == (2, 1, 1)
    assert forward["all_gather"]["hidden_ns"] == 45_000

    for trace in out.glob("*.sqlite"):
        assert SECRET.encode() not in trace.read_bytes()
    # The rank's own temporary files stay where they were; those of nsys are removed with its scratch folder.
    assert f"temporary folder {tmp_path / 'tmp'}\n" in (out / "logs" / "rank0.log").read_text()
    assert {Path(c["TMPDIR"]).parent for c in calls(nsys, "profile")} == {tmp_path / "tmp"}
    for profile in calls(nsys, "profile"):
        wanted = {"trace": "cuda,nvtx", "sample": "none", "cpuctxsw": "none", "wait": "primary"}
        wanted |= {"capture-range": "nvtx", "nvtx-capture": f"{CAPTURE}@*", "capture-range-end": "stop"}
        assert wanted.items() <= profile.items()


RECORDED = ("recorded", {"nvtx": "the package nvtx 0.2.17", "unfinished": None})
INFO = ("info", {"world_size": 1, "hosts": 1, "versions": {}, "device": "a device", "backend": None})
WELL = (RECORDED, INFO, ("end", None))


@pytest.fixture
def play(nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchOptions]:
    """Makes this process the only rank of a launcher, with a worker that only reports, prints and exits."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def play(*reports: tuple[str, Any], exits: int = 0, **others: Any) -> LaunchOptions:
        lines = [json.dumps([*report, 1]) for report in (("pid", {"pid": GONE, "token": "t"}), *reports)]
        program = (
            "import json, os, sys; job = json.loads(os.environ['OVERLAP_PROBE_JOB']); "
            f"open(job['reports'], 'w').write({chr(10).join(lines) + chr(10)!r}); sys.exit({exits})"
        )
        monkeypatch.setattr(nsys_rank, "command", lambda module: [sys.executable, "-c", program])
        return LaunchOptions(out=str(tmp_path / "out"), profiler="nsys", nproc=1, device="cpu", **others)

    return play


def test_in_a_launchers_environment_this_process_keeps_the_trace(
    play: Callable[..., LaunchOptions], tmp_path: Path
) -> None:
    told: list[str] = []
    record = run(play(("state", "warm-up"), *WELL, script=(__file__,)), told.append)
    assert (record.ranks, record.leads, record.versions) == ((0,), True, {"nsys": fake_nsys.VERSION})
    assert told == ["rank 0: warm-up", "rank 0: exporting what nsys recorded"]
    assert left_in(tmp_path) == {"rank0.sqlite"}


def test_nsys_that_fails_to_start_is_started_again(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path
) -> None:
    """As it does now and then where several start at once."""
    (nsys / "fails once").touch()
    run(play(*WELL, script=(__file__,)))
    assert len(calls(nsys, "profile")) == 2
    assert not lives(int((nsys / "old daemon").read_text()))
    assert left_in(tmp_path) == {"rank0.sqlite"}


def test_nothing_on_the_device_is_inconclusive_and_says_so(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = NsysDatabase()
    nothing.range("ProfilerStep#2", 0, 99)
    nothing.write(nsys / "database.sqlite")
    play(("note", "a note of the rank"), *WELL)
    ran = call(capsys, "run", "--profiler", "nsys", "-o", tmp_path / "out", "--", __file__)
    assert ran.code == 3
    assert re.search(r"^INCONCLUSIVE .*: no all-gathers in this window: nothing ran on a device, or", ran.out, re.M)
    assert "rank 0: a note of the rank" in ran.err


def test_an_unfinished_step_is_no_window(play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path) -> None:
    recorded(("ProfilerStep#2", "ProfilerStep#3")).write(nsys / "database.sqlite")
    run(play(("recorded", {"nvtx": "x", "unfinished": "ProfilerStep#3"}), *WELL[1:], script=(__file__,)))
    assert set(op.analyze_run(tmp_path / "out").ranks[0].windows) == {"whole", "ProfilerStep#2"}


def test_no_nsys_on_the_path_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = call(capsys, "run", "--profiler", "nsys", "-o", tmp_path / "out")
    assert ran.code == 2
    assert "--profiler nsys: there is no nsys on the PATH; install Nsight Systems" in ran.err
    assert not (tmp_path / "out").exists()


UNDER = re.escape(f", under Nsight Systems {fake_nsys.VERSION}")
ADVICE = re.escape("; nvtx 0.2.12 to 0.2.17 lose all ranges under Nsight Systems 2024.2")
TORCH = ("recorded", {"nvtx": "torch 2.11.0+cu130", "unfinished": None})
KEEPS = ("recorded", {"nvtx": "the package nvtx 0.2.11", "unfinished": None})
IMPORTER_SAID = "nsys said: .*Importer error status: Importation failed. InvalidArgumentException"


@pytest.mark.parametrize(
    ("behaviour", "emitter", "message"),
    [
        (
            "cannot profile",
            RECORDED,
            "nsys profile ended with exit code 1 before the rank began: Permission denied: perf_event_paranoid",
        ),
        ("cannot export", RECORDED, "nsys export failed with exit code 1: The report was written by a newer version."),
        (
            "loses ranges",
            RECORDED,
            f"nsys recorded nothing: no range of the package nvtx 0.2.17{UNDER}, arrived{ADVICE}",
        ),
        (
            "loses ranges",
            KEEPS,
            rf"nsys recorded nothing: no range of the package nvtx 0.2.11{UNDER}, arrived \(nsys said: it said nothing",
        ),
        ("loses ranges", TORCH, rf"nsys recorded nothing: no range of torch 2.11.0\+cu130{UNDER}, arrived \("),
        (
            "writes nothing",
            RECORDED,
            rf"nsys recorded nothing: no report, of the package nvtx 0.2.17{UNDER} \(nsys said: Capture range started",
        ),
    ],
)
def test_failing_nsys_is_an_error_with_its_last_words_and_blames_nvtx_only_where_it_is_known_to_lose_ranges(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path, behaviour: str, emitter: Any, message: str
) -> None:
    (nsys / behaviour).touch()
    with pytest.raises(LaunchError, match=rf"^rank 0 failed \({message}"):
        run(play(emitter, *WELL[1:], script=(__file__,)))
    assert left_in(tmp_path) == set()


def test_what_nsys_could_not_import_is_imported_again(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path
) -> None:
    (nsys / "cannot import").touch()
    told: list[str] = []
    run(play(*WELL, script=(__file__,)), told.append)
    assert "rank 0: importing again what nsys recorded" in told
    assert left_in(tmp_path) == {"rank0.sqlite"}


@pytest.mark.parametrize("importer", ["fails again", "missing"])
def test_an_import_that_fails_twice_is_an_error_with_the_importers_words_that_does_not_blame_nvtx(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path, importer: str
) -> None:
    (nsys / "cannot import").touch()
    if importer == "missing":
        (tmp_path / "host-linux-x64" / "QdstrmImporter").unlink()
        then = "there is no QdstrmImporter beside nsys"
    else:
        (nsys / "cannot import again").touch()
        then = "QdstrmImporter failed with exit code 1: File is corrupted."
    with pytest.raises(LaunchError, match=rf"run again \({IMPORTER_SAID}; then {then}\)") as raised:
        run(play(*WELL, script=(__file__,)))
    assert "nvtx" not in str(raised.value)
    assert left_in(tmp_path) == set()


def test_an_unreadable_export_is_an_error_that_names_the_rank_and_nsys_and_no_file_that_is_gone(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path
) -> None:
    (nsys / "database.sqlite").write_bytes(b"garbage" * 100)
    wanted = rf"what nsys export wrote of rank 0 cannot be read \(Nsight Systems {fake_nsys.VERSION}\): not a SQLite"
    with pytest.raises(LaunchError, match=wanted) as raised:
        run(play(*WELL, script=(__file__,)))
    assert str(tmp_path / "tmp") not in str(raised.value)
    assert "nsys export --type" not in str(raised.value)
    assert left_in(tmp_path) == set()


def test_an_export_that_hangs_is_ended_with_what_it_has_started(nsys: Path, tmp_path: Path) -> None:
    (nsys / "hangs").touch()
    # Long enough for two interpreters to start on a busy machine.
    with pytest.raises(LaunchError, match=r"^nsys export did not end within 10 s"):
        nsys_command.export(tmp_path / "x.nsys-rep", tmp_path / "x.sqlite", dict(os.environ), 10)
    assert_ended(nsys / "child")


def test_an_export_that_is_interrupted_is_ended_with_what_it_has_started(nsys: Path, tmp_path: Path) -> None:
    (nsys / "hangs").touch()

    def interrupt() -> None:
        wait_until(lambda: (nsys / "child").exists(), 60, "the export")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        nsys_command.export(tmp_path / "x.nsys-rep", tmp_path / "x.sqlite", dict(os.environ), 60)
    assert_ended(nsys / "child")


def test_what_an_export_has_started_ends_with_its_recording(nsys: Path, tmp_path: Path) -> None:
    """As where the launcher was killed: nobody but `end_recording` is left to end an export."""
    (nsys / "hangs").touch()
    options = [f"--output={tmp_path / 'a_recording.sqlite'}"]
    export = subprocess.Popen([str(nsys / "nsys"), "export", *options], start_new_session=True)
    wait_until(lambda: (nsys / "child").exists(), 60, "the export")
    nsys_command.end_recording(str(tmp_path / "a_recording"))
    assert export.wait(10) == -signal.SIGKILL
    assert_ended(nsys / "child")


def assert_ended(pid: Path) -> None:
    """The process whose id is in a file ends soon; ends it if not."""
    process = int(pid.read_text())
    try:
        wait_until(lambda: not lives(process), 5, "its end")
    finally:
        if lives(process):
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    ("lost", "what"), [("ProfilerStep#2", "steps"), ("fsdp_runtime::compute forward (a)", "units")]
)
@pytest.mark.parametrize(
    ("emitter", "advice"), [(RECORDED, ADVICE), (KEEPS, r" \(nsys said"), (TORCH, r" \(nsys said")]
)
def test_built_in_workload_without_its_ranges_is_an_error(
    play: Callable[..., LaunchOptions], nsys: Path, tmp_path: Path, lost: str, what: str, emitter: Any, advice: str
) -> None:
    made = NsysDatabase()
    for name in {"ProfilerStep#2", "fsdp_runtime::compute forward (a)"} - {lost}:
        made.range(name, 0, 99)
    made.write(nsys / "database.sqlite")
    with pytest.raises(LaunchError, match=rf"the ranges of the {what}, of .*, did not arrive{advice}"):
        run(play(emitter, *WELL[1:]))
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("reports", "exits", "message"),
    [
        ((RECORDED, ("error", "exit code 7")), 7, r"^rank 0 ended with exit code 7\n"),
        ((RECORDED,), 137, r"^rank 0 was killed by SIGKILL\n"),
        (
            WELL,
            1,
            r"^rank 0 failed \(nsys profile ended with exit code 1 after the rank had ended: Capture range started",
        ),
        ((("note", "0 of 3 steps captured"), ("end", None)), 0, "^rank 0 left no trace: 0 of 3 steps captured"),
    ],
)
def test_rank_that_ends_badly_or_captures_nothing_leaves_nothing(
    play: Callable[..., LaunchOptions], tmp_path: Path, reports: tuple[Any, ...], exits: int, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        run(play(*reports, exits=exits, script=(__file__,)))
    assert left_in(tmp_path) == set()


def test_killed_rank_is_named_as_without_nsys(nsys: Path, tmp_path: Path) -> None:
    body = """
        train(2)
        if rank == "1":
            print("the end is near", flush=True)
            os.kill(os.getpid(), 9)
        time.sleep(300)
        """
    path = script(tmp_path, body)
    with pytest.raises(LaunchError, match=r"^rank 1 was killed by SIGKILL\nrank 1's last report was 'step") as raised:
        run(LaunchOptions(out=str(tmp_path / "out"), profiler="nsys", steps=1, script=(str(path),)))
    assert "the end is near" in str(raised.value)
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_launcher_leaves_no_process_and_no_half_trace(nsys: Path, tmp_path: Path, number: int) -> None:
    """Not even the daemon of ``nsys``, with ranks that refuse to end; SIGKILL gives the launcher no say."""
    (nsys / "refuses to end").touch()
    body = """
        import pathlib, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(3)
        pathlib.Path(f"pid{rank}.part").write_text(str(os.getpid()))
        os.rename(f"pid{rank}.part", f"pid{rank}")
        time.sleep(300)
        """
    program = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(tmp_path / 'lib')]!r}; from overlap_probe.cli import main; "
        f"main(['run', '--profiler', 'nsys', '--steps', '1', '-o', 'out', '--', {str(script(tmp_path, body))!r}])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL)
    pids = [tmp_path / "pid0", tmp_path / "pid1", nsys / "daemon0", nsys / "daemon1"]
    try:
        wait_until(lambda: all(path.exists() for path in pids), 120, "both ranks")
        launcher.send_signal(number)
        began = time.monotonic()
        assert launcher.wait(6) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(lives(int(path.read_text())) for path in pids), 6, "the end of all processes")
        wait_until(lambda: left_in(tmp_path) == set(), 3, "the end of all files")
        assert time.monotonic() - began < 10
    finally:
        launcher.kill()
        for path in pids:
            if path.exists() and lives(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to NVTX ranges, in order."""
    seen: list[str] = []

    def start(name: str) -> str:
        seen.append(f"+ {name}")
        return name

    def init(self: Nvtx) -> None:
        self.name = "played"
        self.start, self.end = start, lambda name: seen.append(f"- {name}")

    monkeypatch.setattr(Nvtx, "__init__", init)
    return seen


def test_steps_are_ranges_inside_the_one_that_starts_the_recording(ranges: list[str], tmp_path: Path) -> None:
    told: list[Event] = []
    recording = NsysRecording(warmup=2, steps=2, lead_in=1)
    recording.start()
    assert ranges == []
    for _ in range(4):
        recording.step()
    recording.stop()
    PROGRESS.listener = told.append
    try:
        recording.write(tmp_path, None)
    finally:
        PROGRESS.listener = None
    steps = ["lead-in step", "ProfilerStep#2", "ProfilerStep#3"]
    assert ranges == [f"+ {CAPTURE}", *(f"{sign} {step}" for step in steps for sign in "+-"), f"- {CAPTURE}"]
    assert [event.value for event in told if event.kind == "recorded"] == [{"nvtx": "played", "unfinished": None}]
    notes = ["Nsight Systems records nothing of what a CPU computes; leave out --profiler nsys"]
    assert [event.value for event in told if event.kind == "note"] == notes


def test_capture_marks_steps_where_nsight_systems_records(
    ranges: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_PROBE_NVTX", "1")
    with op.capture(tmp_path / "out", warmup=1, steps=1) as step:
        for _ in range(4):
            step()
    assert ranges == [f"+ {CAPTURE}", "+ ProfilerStep#1", "- ProfilerStep#1", f"- {CAPTURE}"]
    assert not (tmp_path / "out").exists()


def test_on_gpus_torch_turns_its_own_ranges_into_nvtx(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class EmitNvtx:
        def __enter__(self) -> None:
            ranges.append("operators")

        def __exit__(self, *error: object) -> None:
            ranges.append("no operators")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", EmitNvtx)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    recording = NsysRecording(warmup=0, steps=1, lead_in=0)
    recording.start()
    recording.step()
    recording.stop()
    step = ["+ ProfilerStep#0", "- ProfilerStep#0"]
    assert ranges == [f"+ {CAPTURE}", "operators", *step, "no operators", f"- {CAPTURE}"]


def test_labels_do_not_double_what_torch_turns_into_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_runtime import labels

    opened: list[str] = []

    @contextlib.contextmanager
    def nvtx_range(text: str) -> Iterator[None]:
        opened.append(text)
        yield

    monkeypatch.setattr(labels, "_nvtx_range", lambda: nvtx_range)
    kinds = torch._C._profiler.ActiveProfilerType
    for kind, expected in ((kinds.NVTX, 0), (kinds.KINETO, 1), (kinds.NONE, 1)):
        opened.clear()
        monkeypatch.setattr(torch._C._autograd, "_profiler_type", lambda kind=kind: kind)
        with labels.annotate("all_gather", "forward", "a"):
            pass
        assert len(opened) == expected


def test_every_option_of_nsys_is_one_argument_so_that_the_command_can_follow(nsys: Path, tmp_path: Path) -> None:
    program, command, *rest = nsys_command.profile_arguments("name", tmp_path / "report")
    assert (program, command) == (str(nsys / "nsys"), "profile")
    assert all(re.match(r"--[\w-]+=", argument) for argument in rest)
    assert nsys_command.nsys_version() == fake_nsys.VERSION


def test_an_unfinished_steps_name_may_be_stored_once_for_all(tmp_path: Path) -> None:
    """Registered strings (the nvtx package's) are in StringIds, others in the row."""
    made = NsysDatabase()
    made.range("ProfilerStep#3", 0, 9)
    made.range(None, 0, 9, textId=made.string("ProfilerStep#4"))
    path = made.write(tmp_path / "x.sqlite")
    for step in (3, 4):
        nsys_trace.rename_range(path, f"ProfilerStep#{step}", "unfinished step")
    names = "SELECT coalesce(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId"
    assert sqlite3.connect(path).execute(names).fetchall() == [("unfinished step",)] * 2
