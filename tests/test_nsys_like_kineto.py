"""The same timeline, recorded by either profiler, gives the same analysis.

Three units whose gathers run on stream 22 beside GEMMs on stream 7 (times in us):

    gather  root 100-140    a 140-180    b 190-250
    gemm                    a 185-235             b 255-355.5      backward 400-450

a is gathered while nothing computes; b has 190-235 = 45 of its 60 inside the GEMM of a.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kineto_traces import event, kernel, launch, read
from nsys_databases import NsysDatabase
from test_nsys import GATHER, GEMM, read_one

import overlap_probe as op
from overlap_probe.tables import Trace

LABELS = (
    ("step0", 0, 99),
    ("FSDP::pre_forward", 1, 20),
    ("FSDP::all_gather", 2, 8),
    ("FSDP::pre_forward (a)", 21, 30),
    ("FSDP::all_gather (a)", 22, 28),
    ("FSDP::pre_forward (b)", 41, 50),
    ("FSDP::all_gather (b)", 42, 48),
    ("FSDP::pre_backward (b)", 80, 90),
)
LAUNCHES = (
    ("c10d::_allgather_base_", 3, GATHER, 22, 100, 140),
    ("c10d::_allgather_base_", 23, GATHER, 22, 140, 180),
    ("aten::mm", 33, GEMM, 7, 185, 235),
    ("c10d::_allgather_base_", 43, GATHER, 22, 190, 250),
    ("aten::mm", 53, GEMM, 7, 255, 355.5),
    ("aten::mm", 82, GEMM, 7, 400, 450),
)
"""Operation, start of the operation (its call comes 1 us later), kernel, stream, start and end of the kernel."""
SHAPES = "[[8192, 4096], [4096, 4096]]"


def from_kineto(folder: Path) -> Trace:
    events = [event("user_annotation", name, start, end - start) for name, start, end in LABELS]
    for number, (operation, at, name, stream, start, end) in enumerate(LAUNCHES, 1):
        shapes = {"Input_Dims": [[8192, 4096], [4096, 4096]]} if operation == "aten::mm" else {}
        size = {"grid": [2, 66, 1], "block": [384, 1, 1], "registers_per_thread": 96, "shared_memory": 1040}
        same = {"External_id": number, "correlation": number}
        events.append(event("cpu_op", operation, at, 4, External_id=number, **shapes))
        events.append(launch(at + 1, number, External_id=number))
        events.append(kernel(name, start, end - start, stream=stream, **same, **size))
    return read(folder, events)


def from_nsys(folder: Path) -> Trace:
    database = NsysDatabase()
    for name, start, end in LABELS:
        database.range(f"{name}, op_id = 7", start, end)
    for number, (operation, at, name, stream, start, end) in enumerate(LAUNCHES, 1):
        sizes = f", sizes = {SHAPES}" if operation == "aten::mm" else ""
        database.range(f"{operation}, op_id = {number}{sizes}", at, at + 4)
        database.kernel(name, start, end, at + 1, streamId=stream)
    return read_one(database, folder)


def test_both_profilers_give_the_same_analysis(tmp_path: Path) -> None:
    kineto, nsys = from_kineto(tmp_path), from_nsys(tmp_path)
    assert kineto.notes == nsys.notes == ()
    windows = op.analyze(kineto).windows
    assert op.analyze(nsys).windows == windows
    gathers = windows["whole"].forward.all_gather
    assert (gathers.count, gathers.time_ns, gathers.hidden_by_gemm_ns) == (3, 140_000, 45_000)
    assert (windows["step0"].forward.children, windows["step0"].forward.found) == (2, 1)


@pytest.mark.parametrize("column", ["launch_ns", "start_ns", "end_ns", "stream", "blocks", "threads", "registers"])
def test_both_profilers_give_the_same_columns(tmp_path: Path, column: str) -> None:
    kineto, nsys = from_kineto(tmp_path), from_nsys(tmp_path)
    assert getattr(nsys.activities, column).tolist() == getattr(kineto.activities, column).tolist()
    assert nsys.activities.operation.tolist() == kineto.activities.operation.tolist()
    assert replace(nsys, path="").rank == kineto.rank
