"""Removing what identifies people and machines, without changing what is measured."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_traces import DISTRIBUTED, event, kernel, launch, one_launch, write
from nsys_databases import VM, NsysDatabase, global_pid, global_tid
from test_nsys import FIXTURE, GATHER, GEMM

import overlap_probe as op
from overlap_probe.errors import TraceError
from overlap_probe.readers import read_trace, read_traces
from overlap_probe.scrub import scrub
from overlap_probe.tables import Trace

SECRETS = (
    *("alice", "gpu-node-17", "hunter2", "/home/alice/project", "train_secret.py", "WANDB_API_KEY", "0000:3b:00.0"),
    *("GPU-c7564f1d", "wandb-core", "pt_data_worker", "secret mark"),
)


def tables_of(trace: Trace) -> dict[str, Any]:
    """Every column, with texts in place of their codes, so that traces with other codes can be compared."""
    texts = np.array([*trace.names, None], object)
    columns: dict[str, Any] = {}
    for table in ("activities", "operations", "ranges"):
        for column in fields(getattr(trace, table)):
            values = getattr(getattr(trace, table), column.name)
            coded = column.name in ("name", "collective", "group", "shapes")
            columns[f"{table}.{column.name}"] = (texts[values] if coded else values).tolist()
    return columns


def assert_same(before: Trace, after: Trace) -> None:
    assert tables_of(after) == tables_of(before)
    names = ("rank", "world_size", "device", "process", "device_index", "groups", "incomplete")
    assert {n: getattr(after, n) for n in names} == {n: getattr(before, n) for n in names}
    assert op.analyze(replace(after, path="")).windows == op.analyze(replace(before, path="")).windows


def a_telling_database() -> NsysDatabase:
    database = NsysDatabase()
    database.kernel(GATHER, 100, 140, 12, streamId=21)
    database.kernel(GEMM, 110, 200, 15)
    database.copy(8, 150, 160, 20)
    database.range("MFSDP layers.0 forward", 10, 30)
    database.range("/home/alice/project/train_secret.py:12 load", 5, 8)
    database.range(None, 5, 9, textId=database.string("/home/alice/project/train_secret.py:12 load"))
    database.range("/home/alice/project/other.py", 5, 8)
    database.range("secret mark", 6, None, eventType=34)
    database.add("PROCESSES", globalPid=global_pid(580), pid=580, name="wandb-core")
    database.add("ThreadNames", nameId=database.string("pt_data_worker"), globalTid=global_tid(580, 580))
    database.add(
        "TARGET_INFO_SYSTEM_ENV", name="Hostname", value="gpu-node-17", devStateName="", nameEnum=1, globalVid=VM
    )
    database.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value="USER=alice;WANDB_API_KEY=hunter2;")
    database.add("META_DATA_CAPTURE", name="PROCESS_0:ARGUMENT_0", value="/home/alice/project/train_secret.py")
    database.add("META_DATA_EXPORT", name="EXPORT_HOST", value="gpu-node-17")
    database.add(
        "TARGET_INFO_GPU",
        vmId=VM,
        id=0,
        name="NVIDIA H200",
        smCount=132,
        busLocation="0000:3b:00.0",
        uuid="GPU-c7564f1d",
    )
    database.add("DIAGNOSTIC_EVENT", severity=1, text="Profiling started by alice.", globalPid=global_pid(580))
    return database


def test_a_database_keeps_its_numbers_and_loses_its_owner(tmp_path: Path) -> None:
    path = a_telling_database().write(tmp_path / "trace.sqlite")
    content = path.read_bytes()
    assert [secret for secret in SECRETS if secret.encode() not in content] == []
    copy = scrub(path, tmp_path / "copy.sqlite")
    left = copy.read_bytes()
    assert [secret for secret in SECRETS if secret.encode() in left] == []
    (before,), (after,) = read_traces(path), read_traces(copy)
    assert [len(before.ranges), len(before.activities)] == [4, 3]
    hidden = replace(before, names=tuple(_without_path(name) for name in before.names))
    assert_same(hidden, after)
    assert path.read_bytes() == content


def _without_path(name: str) -> str:
    """Two different paths, so two numbers."""
    name = name.replace("/home/alice/project/other.py", "<path 2>")
    return name.replace("/home/alice/project/train_secret.py:12", "<path 1>")


def test_rows_that_were_deleted_before_do_not_come_back_from_freed_pages(tmp_path: Path) -> None:
    path = a_telling_database().write(tmp_path / "trace.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("DELETE FROM TARGET_INFO_SYSTEM_ENV")
    connection.close()
    assert b"hunter2" in path.read_bytes()
    assert b"hunter2" not in scrub(path, tmp_path / "copy.sqlite").read_bytes()


def test_messages_about_lost_events_stay_without_their_paths(tmp_path: Path) -> None:
    database = a_telling_database()
    text = "CUDA events were dropped while writing /home/alice/project/report.qdstrm"
    database.add("DIAGNOSTIC_EVENT", severity=3, text=text, globalPid=global_pid(580))
    copy = scrub(database.write(tmp_path / "trace.sqlite"), tmp_path / "copy.sqlite")
    said = read_trace(copy).incomplete
    assert said == ("Nsight Systems says: CUDA events were dropped while writing <path 1>",)


def test_a_real_database_analyses_as_before_and_can_be_scrubbed_twice(tmp_path: Path) -> None:
    once = scrub(FIXTURE, tmp_path / "once.sqlite")
    twice = scrub(once, tmp_path / "twice.sqlite")
    for copy in (once, twice):
        assert_same(read_trace(FIXTURE), read_trace(copy))
        assert b"python3" not in copy.read_bytes()
    assert once.stat().st_size < FIXTURE.stat().st_size


def a_telling_trace() -> list[dict[str, Any]]:
    return [
        *one_launch(),
        event("user_annotation", "load /home/alice/project/train_secret.py", "8.001", 1),
        event("cpu_op", "c10d::_allgather_base_", 20, 8, External_id=6),
        launch("22.123", 78, External_id=6),
        kernel(
            *(GATHER, "30.001", "30.002"),
            **{"correlation": 78, "External_id": 6, "Collective_name": "_allgather_base", "Process_Group_Name": "0"},
        ),
        event("python_function", "/home/alice/project/train_secret.py(12): main", 0, 60, Python_id=1),
        event("cpu_op", "aten::mm", 40, 8, External_id=7, Input_Dims=[[2, 3], [3, 4]], Call_stack="train_secret.py(3)"),
        {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": 0, "args": {"name": "wandb-core"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 3, "ts": 0, "args": {"name": "pt_data_worker"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7 "}},
        {"ph": "s", "id": 78, "pid": 100, "tid": 100, "ts": 12, "cat": "ac2g", "name": "ac2g"},
    ]


def as_json(events: list[Any], **keys: Any) -> str:
    return json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", **keys, "traceEvents": events})


TELLING_KEYS = {
    "traceName": "/home/alice/project/trace.json",
    "hostname": "gpu-node-17",
    "environment": {"WANDB_API_KEY": "hunter2"},
    "distributedInfo": DISTRIBUTED | {"backend": "nccl", "master": "gpu-node-17"},
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132, "uuid": "GPU-c7564f1d"}],
    "baseTimeNanoseconds": 1_000_000_000,
    "overlap_probe": {
        "process": 100,
        "waits": {"100": [[1_000_020_000, 1_000_030_000, 7_000]], "alice": [[1, 2, 1]]},
        "host": "gpu-node-17",
    },
}


@pytest.mark.parametrize("name", ["copy.json", "copy.json.gz"])
def test_a_trace_keeps_its_numbers_and_loses_its_owner(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, as_json(a_telling_trace(), **TELLING_KEYS))
    copy = scrub(path, tmp_path / name)
    left = copy.read_bytes()
    assert (left[:2] == b"\x1f\x8b") == name.endswith(".gz")
    text = (gzip.decompress(left) if name.endswith(".gz") else left).decode()
    assert [secret for secret in SECRETS if secret in text] == []
    assert b"trace" not in left[:64] or not name.endswith(".gz")
    before, after = read_trace(path), read_trace(copy)
    hidden = replace(
        before, names=tuple(n.replace("/home/alice/project/train_secret.py", "<path 1>") for n in before.names)
    )
    assert_same(hidden, after)
    assert (after.rank, after.world_size, after.device.sms) == (0, 2, 132)
    assert (after.waits.start_ns.tolist(), after.waits.waited_ns.tolist()) == ([20_000], [7_000])


def test_a_trace_can_still_be_viewed(tmp_path: Path) -> None:
    copy = scrub(write(tmp_path, as_json(a_telling_trace(), **TELLING_KEYS)), tmp_path / "copy.json")
    events = json.loads(copy.read_text())["traceEvents"]
    labels = [e["args"] for e in events if e["ph"] == "M"]
    assert labels == [{"labels": "GPU 0"}, {"name": "stream 7 "}]
    assert [e["id"] for e in events if e["ph"] == "s"] == [78]


def test_times_keep_every_digit(tmp_path: Path) -> None:
    text = as_json(a_telling_trace()).replace('"30.001"', "5103188896015400.0010")
    copy = scrub(write(tmp_path, text), tmp_path / "copy.json").read_text()
    assert "5103188896015400.0010" in copy
    assert '"8.001"' in copy


def test_a_broken_trace_is_mended_and_what_is_lost_stays_said(tmp_path: Path) -> None:
    text = as_json(a_telling_trace()).replace('"dur": 60', '"dur": 60.125')
    mended = text.replace('"name": "step0"', '"name": "step0 of "the" run\x01"')
    lost = text.replace('"name": "gemm"', '"name": "gemm}{,"')
    assert mended != text != lost
    for number, broken in enumerate((mended, lost)):
        path = write(tmp_path, broken, f"broken{number}.json")
        copy = scrub(path, tmp_path / f"copy{number}.json")
        assert 60.125 in [e.get("dur") for e in json.loads(copy.read_text())["traceEvents"]]
        before, after = read_trace(path), read_trace(copy)
        assert len(after.activities) == len(before.activities)
        assert after.ranges.end_ns.tolist() == before.ranges.end_ns.tolist()
        assert bool(after.incomplete) == bool(before.incomplete)


def test_what_the_profiler_says_of_dropped_records_stays(tmp_path: Path) -> None:
    keys = {"dropped_records": 5, "log": "12 records were dropped in /home/alice/project"}
    path = write(tmp_path, as_json(a_telling_trace(), **keys))
    after = read_trace(scrub(path, tmp_path / "copy.json"))
    assert after.incomplete == (
        "the profiler says: dropped_records: 5",
        "the profiler says: 12 records were dropped in <path 2>",
    )
    assert len(read_trace(path).incomplete) == 2


@pytest.mark.parametrize(
    "path", ["/home/alice", "C:\\Users\\alice\\x", "\\\\server\\alice", "~/alice/x", "/a/alice-1.2/b"]
)
@pytest.mark.parametrize("around", ["{}", "load({}) now", 'at "{}"', "x={}", "file://{}"])
def test_absolute_paths_are_found_wherever_they_stand(tmp_path: Path, path: str, around: str) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    database.range(around.format(path), 1, 2)
    copy = scrub(database.write(tmp_path / "trace.sqlite"), tmp_path / "copy.sqlite")
    trace = read_trace(copy)
    assert b"alice" not in copy.read_bytes()
    assert "<path 1>" in trace.names[trace.ranges.name[0]]


@pytest.mark.parametrize(
    "name", ["FSDP::all_gather (layers.0)", "layers/0/attention", "a / b", "GB/s", "MFSDP <root> forward"]
)
def test_labels_that_are_no_paths_stay(tmp_path: Path, name: str) -> None:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    database.range(name, 1, 2)
    trace = read_trace(scrub(database.write(tmp_path / "trace.sqlite"), tmp_path / "copy.sqlite"))
    assert trace.names[trace.ranges.name[0]] == name


def test_the_original_is_never_replaced(tmp_path: Path) -> None:
    path = a_telling_database().write(tmp_path / "trace.sqlite")
    content = path.read_bytes()
    with pytest.raises(TraceError, match="another name"):
        scrub(path, tmp_path / "." / "trace.sqlite")
    assert path.read_bytes() == content


def test_a_copy_goes_where_a_link_points_and_through_a_pipe(tmp_path: Path) -> None:
    path = write(tmp_path, as_json(a_telling_trace()))
    plain = scrub(path, tmp_path / "plain.json").read_bytes()
    link, pipe = tmp_path / "link.json", tmp_path / "pipe.json"
    link.symlink_to("real.json")
    scrub(path, link)
    assert (link.is_symlink(), (tmp_path / "real.json").read_bytes()) == (True, plain)

    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    scrub(path, pipe)
    assert pipe.is_fifo()
    reader.join(10)
    assert received == [plain]
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_what_cannot_be_read_leaves_neither_a_copy_nor_a_beginning_of_one(tmp_path: Path) -> None:
    old = tmp_path / "copy.json"
    old.write_text("an older copy")
    path = write(tmp_path, as_json(a_telling_trace())[:-200])
    with pytest.raises(TraceError, match=r"trace\.json"):
        scrub(path, old)
    assert old.read_text() == "an older copy"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.json", "trace.json"]


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, as_json(a_telling_trace()))
    with pytest.raises(TraceError, match="cannot be written"):
        scrub(path, tmp_path / "none" / "copy.json")
    with pytest.raises(TraceError, match="cannot be written"):
        scrub(FIXTURE, tmp_path / "none" / "copy.sqlite")
