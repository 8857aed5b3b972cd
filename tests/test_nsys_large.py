"""A large database of Nsight Systems: made from a real one, read exactly, and for large files in time and memory."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from nsys_databases import REAL, write_large

from overlap_probe import analyze, read_trace

KERNELS = 30_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large(tmp_path_factory.mktemp("large") / "large.sqlite", KERNELS)


def columns(path: Path) -> dict[str, list[str]]:
    with sqlite3.connect(path) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}


def test_the_large_database_has_the_tables_and_columns_of_a_recorded_one(large: Path) -> None:
    assert columns(large) == columns(REAL)


def test_what_is_in_a_large_database_is_read_and_measured_exactly(large: Path) -> None:
    trace = read_trace(large)
    assert trace.notes == ()
    assert len(trace.activities) == KERNELS
    assert (trace.activities.launch_ns >= 0).all()
    # An operator a kernel and one around it, but for the 300 record_param_comms, of which NVTX says nothing.
    assert len(trace.operations) == 2 * KERNELS - KERNELS // 100
    assert len(trace.ranges) == KERNELS // 100 + KERNELS // 10_000
    analysis = analyze(trace)
    assert list(analysis.windows) == ["whole", "step0", "step1", "step2"]
    gathers = analysis.whole.forward.all_gather
    # 300 units with a gather of 60 us each, of which 45 us are hidden: the arithmetic is in write_large.
    assert (gathers.count, gathers.time_ns, gathers.hidden_ns) == (300, 300 * 60_000, 300 * 45_000)
    assert analysis.windows["step1"].forward.children == 100


def test_reading_costs_a_few_passes_over_the_rows_and_no_join_of_pairs(large: Path) -> None:
    # A million kernels may take 30 s, so these may take 0.9 s; a join of pairs of 60 000 rows would take minutes.
    began = time.process_time()
    analyze(read_trace(large))
    assert time.process_time() - began < 6
