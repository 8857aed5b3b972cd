"""`launch.run` where all goes well, and the mistakes that it finds before anything starts.

The idea: real ranks under torch's launcher for each kind of workload; what needs no ranks is tested without.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from overlap_probe.launch import LaunchError, LaunchOptions, run
from overlap_probe.record import without_folders

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent

SMALL = """
    import torch
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps):
        for _ in range(steps):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
"""


def write(path: Path, *parts: str) -> Path:
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return path


def trace(folder: Path, rank: int) -> dict[str, Any]:
    with gzip.open(folder / f"rank{rank}.json.gz", "rt") as file:
        return dict(json.load(file))


def steps_of(content: dict[str, Any]) -> list[str]:
    return sorted(e["name"] for e in content["traceEvents"] if e["name"].startswith("ProfilerStep#"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_builtin_workload_leaves_a_trace_of_each_rank_and_says_how_it_ran(tmp_path: Path) -> None:
    told: list[str] = []
    out = tmp_path / "out"
    record = run(LaunchOptions(out=str(out), device="cpu", warmup=1, steps=2, children=2, dim=64, batch=8), told.append)

    logs = {f"logs/{name}.{kind}" for name in ("rank0", "rank1", "launcher") for kind in ("log", "jsonl")}
    assert files(out) == {"rank0.json.gz", "rank1.json.gz"} | logs
    for rank in (0, 1):
        content = trace(out, rank)
        assert content["distributedInfo"]["rank"] == rank
        assert content["distributedInfo"]["world_size"] == 2
        assert steps_of(content) == ["ProfilerStep#1", "ProfilerStep#2"]
        gathers = [e for e in content["traceEvents"] if e["name"] == "gloo:all_gather"]
        assert len(gathers) >= 2 * 3  # in both steps the root and two children are gathered at least once
        if Path("/proc/self/schedstat").exists():
            # Who waited for a core is in the trace, by the same process and threads and on the same clock.
            assert content["overlap_probe"]["process"] in {e["pid"] for e in gathers}
            waits = content["overlap_probe"]["waits"]
            rows = [e for e in content["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation")]
            assert not waits or {int(thread) for thread in waits} & {e["tid"] for e in rows}
            base = content["baseTimeNanoseconds"]
            ends = [end - base for some in waits.values() for _, end, _ in some]
            first, last = min(e["ts"] for e in rows), max(e["ts"] + e["dur"] for e in rows)
            assert all(1000 * first - 10**9 < end < 1000 * last + 10**9 for end in ends)

    kept = json.loads(json.dumps(record.to_dict()))
    assert (kept["workload"], kept["world_size"], kept["hosts"], kept["backend"]) == ("built-in", 2, 1, "gloo")
    assert set(kept["versions"]) == {"python", "torch"}
    assert len(kept["devices"]) == 2
    assert {"nproc": 2, "device": "cpu", "dim": 64, "steps": 2}.items() <= kept["arguments"].items()
    assert str(tmp_path) not in json.dumps(kept)
    assert record.leads
    assert record.folder == out
    assert told[0] == "starting 2 ranks"
    assert told[-4:] == ["rank 0: warm-up", "rank 0: step 1/2", "rank 0: step 2/2", "rank 0: writing"]


def test_script_left_as_it_is_runs_as_under_torchrun_and_its_steps_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "lib" / "of_the_caller.py", "value = 7")
    write(tmp_path / "neighbour.py", SMALL)
    script = write(
        tmp_path / "script.py",
        """
        import os, sys
        import of_the_caller, neighbour
        print("seen", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], sys.argv[1:], __name__,
              flush=True)
        assert not [name for name in os.environ if "OVERLAP_PROBE_JOB" in name]
        neighbour.train(9)
        sys.exit(0)
        """,
    )
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))  # only this process can import it, until the ranks are told
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = run(LaunchOptions(out="run", warmup=2, steps=3, script=("../script.py", "--data=/home/me/data.bin")))

    for rank in (0, 1):
        assert steps_of(trace(Path("run"), rank)) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
        log = Path(f"run/logs/rank{rank}.log").read_text()
        assert f"seen {rank} 2 {rank} ['--data=/home/me/data.bin'] __main__" in log
    assert script.exists()
    assert record.workload == "../script.py --data=data.bin"
    assert record.backend is None


def test_target_function_with_a_capture_of_its_own(tmp_path: Path) -> None:
    source = write(
        tmp_path / "mine.py",
        SMALL,
        """
        import overlap_probe as op
        def main():
            with op.capture("not here", warmup=1, steps=2) as step:
                for _ in range(3):
                    train(1)
                    step()
        """,
    )
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    for name in ("rank0.json.gz", "rank5.json.gz", "logs/rank5.log", "notes.txt", "rankings.json.gz"):
        (out / name).write_text("of an earlier run")
    record = run(LaunchOptions(nproc=1, out=str(out), target=f"{source}:main"))

    assert steps_of(trace(out, 0)) == ["ProfilerStep#1", "ProfilerStep#2"]
    assert record.workload == "mine.py:main"
    kept = {name for name in files(out) if not name.startswith("logs/")}
    assert kept == {"rank0.json.gz", "notes.txt", "rankings.json.gz"}
    assert not (out / "logs" / "rank5.log").exists()


def test_in_a_launchers_environment_each_process_is_a_rank_and_rank_0_leads(tmp_path: Path) -> None:
    script = write(tmp_path / "script.py", SMALL, "train(4)")
    program = f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from overlap_probe.launch import LaunchOptions, run
        record = run(LaunchOptions(out="shared", warmup=1, steps=2, script=({str(script)!r},)), print)
        import os
        both = all(os.path.exists(f"shared/rank{{rank}}.json.gz") for rank in (0, 1))
        print("RECORD", record.ranks, record.leads, record.world_size, both)
        """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "RECORD (0,) True 2 True" in outputs[0]  # it waited for the trace of rank 1
    assert "RECORD (1,) False 2" in outputs[1]
    assert "rank 0: step 2/2" in outputs[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nproc": 0}, "--nproc"),
        ({"warmup": 0}, "--warmup"),
        ({"steps": 0}, "--steps"),
        ({"retries": -1}, "--retries"),
        ({"retries": 1.5}, "--retries: expected a whole number, 0 or more, got 1.5"),
        ({"retries": None}, "--retries"),
        ({"dim": 0}, "--dim"),
        ({"timeout": 0.0}, "--timeout"),
        ({"timeout": math.nan}, "--timeout"),
        ({"timeout": math.inf}, "--timeout"),
        ({"device": "tpu"}, "--device"),
        ({"target": "no_function"}, "--target"),
        ({"target": "m:f", "script": ("a.py",)}, "--target"),
        ({"nnodes": 2}, "--rdzv-endpoint"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(LaunchError, match=named):
        LaunchOptions(**options)


def test_script_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^nowhere\.py: there is no such script"):
        run(LaunchOptions(out=str(tmp_path / "out"), script=("nowhere.py",)))
    assert not (tmp_path / "out").exists()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"file/out: cannot be written: .*; choose another folder with -o"):
        run(LaunchOptions(out=str(tmp_path / "file" / "out")))


def test_what_an_earlier_run_said_is_gone_before_the_ranks_start(tmp_path: Path) -> None:
    said = [tmp_path / name for name in ("result.json", "report.html", "junit.xml")]
    for file in said:
        file.write_text("pass")
    with pytest.raises(LaunchError, match="rank 0 failed"):
        run(
            LaunchOptions(nproc=1, out=str(tmp_path), target=f"{write(tmp_path / 'mine.py', 'def main(): 1 / 0')}:main")
        )
    assert not any(file.exists() for file in said)


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"--rdzv-endpoint {endpoint}: the port is in use"):
            run(LaunchOptions(out=str(tmp_path), rdzv_endpoint=endpoint))


def test_rank_of_another_launcher_needs_a_folder_that_all_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"^-o: "):
        run(LaunchOptions())


def test_gpus_that_are_not_there_are_an_error_if_asked_for_and_a_note_if_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from overlap_probe.worker import choose_device

    for gpus, device, expected in [(0, "auto", "cpu"), (1, "auto", "cpu"), (2, "auto", "cuda"), (2, "cuda", "cuda")]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        chosen, note = choose_device(LaunchOptions(device=device), local_ranks=2)
        assert chosen == expected
        assert (note is None) == (chosen == "cuda")
    assert choose_device(LaunchOptions(script=("a.py",)), local_ranks=2) == (None, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match=r"2 ranks .* need 2 GPUs, found 1; try --nproc 1 or --device cpu"):
        choose_device(LaunchOptions(device="cuda"), local_ranks=2)


def test_ranks_share_a_gpu_only_to_test_copy_engine_gathers_and_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from overlap_probe.worker import choose_device

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device, note = choose_device(LaunchOptions(device="cuda", gather="copy_engine"), local_ranks=2)
    assert device == "cuda"
    assert note is not None
    assert note.startswith("2 ranks share 1 GPU:")
    # Nobody gets it without asking for both.
    assert choose_device(LaunchOptions(gather="copy_engine"), local_ranks=2)[0] == "cpu"
    with pytest.raises(LaunchError):
        choose_device(LaunchOptions(device="cuda", gather="copy_engine", script=("a.py",)), local_ranks=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchError):
        choose_device(LaunchOptions(device="cuda", gather="copy_engine"), local_ranks=2)


def test_hosts_meet_as_under_torchrun() -> None:
    from overlap_probe.agent import launch_config

    one = launch_config(LaunchOptions(nproc=4))
    assert (one["rdzv_backend"], one["rdzv_endpoint"], one["local_addr"]) == ("c10d", "127.0.0.1:0", "127.0.0.1")
    assert (one["min_nodes"], one["max_nodes"], one["nproc_per_node"], one["max_restarts"]) == (1, 1, 4, 0)
    meeting = {"nnodes": 2, "rdzv_endpoint": "head:29400", "out": "shared"}
    numbered = launch_config(LaunchOptions(**meeting, node_rank=1))
    assert (numbered["rdzv_backend"], numbered["rdzv_configs"]) == ("static", {"rank": 1})
    assert launch_config(LaunchOptions(**meeting))["rdzv_backend"] == "c10d"
    assert "local_addr" not in numbered


def test_functions_get_a_name_that_a_rank_can_call() -> None:
    from overlap_probe.worker import target_name

    assert target_name(textwrap.dedent) == "textwrap:dedent"
    assert target_name(write).endswith(":write")  # this module, by name or by file, as pytest imported it
    with pytest.raises(LaunchError, match="cannot be found by name"):
        target_name(lambda: None)


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/home/me/train.py", "train.py"),
        ("--data=/home/me/x.bin", "--data=x.bin"),
        ("~/x/y", "y"),
        ("mine:/a/b", "mine:b"),
        ("./a/b", "./a/b"),
        ("1/2", "1/2"),
        ("http://host/x", "http://host/x"),
    ],
)
def test_records_keep_no_folder_of_the_machine(argument: str, kept: str) -> None:
    assert without_folders(argument) == kept
