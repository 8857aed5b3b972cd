"""Files that Nsight Systems wrote, or did not: what is read, exported, refused, and with which words."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from pathlib import Path

import pytest
from nsys_databases import NsysDatabase, write_large
from test_nsys import FIXTURE, GEMM, names

from overlap_probe.errors import TraceError
from overlap_probe.intervals import intersect, union
from overlap_probe.readers.nsys import read_nsys
from overlap_probe.readers.nsys_schema import Database


def a_database(folder: Path) -> Path:
    database = NsysDatabase()
    database.kernel(GEMM, 10, 20, 5)
    return database.write(folder / "trace.sqlite")


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_nsys(path)
    text = str(caught.value)
    assert str(path) in text
    assert "nsys" in text
    return text


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "users.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE users (id INTEGER, name TEXT)")
    connection.close()
    assert "not one that Nsight Systems (nsys) exported" in refused(path)


@pytest.mark.parametrize("content", [b"", b"just text", b"SQLite format 3\0"])
def test_what_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.sqlite"
    path.write_bytes(content)
    refused(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.sqlite: cannot be read"):
        read_nsys(tmp_path / "none.sqlite")


@pytest.mark.parametrize("share", [0.999, 0.5, 0.1, 0.001])
def test_a_database_that_is_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    content = FIXTURE.read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(content[: int(len(content) * share)])
    assert "cut off" in refused(path)


def test_damaged_pages_are_an_error_and_no_traceback(tmp_path: Path) -> None:
    content = bytearray(FIXTURE.read_bytes())
    for place in range(4096, len(content), 4096):
        content[place : place + 512] = b"\xa5" * 512
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(content)
    assert "damaged" in refused(path)


def test_a_text_in_a_column_of_numbers_is_damage(tmp_path: Path) -> None:
    path = a_database(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'")
    connection.close()
    assert "damaged" in refused(path)


def test_reading_leaves_no_file_beside_the_database(tmp_path: Path) -> None:
    path = a_database(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = sorted(p.name for p in tmp_path.iterdir())
    content = path.read_bytes()
    with Database(path) as database:
        database.numbers("CUPTI_ACTIVITY_KIND_KERNEL", "start")
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert path.read_bytes() == content


def test_an_unfinished_write_beside_the_database_is_refused(tmp_path: Path) -> None:
    path = a_database(tmp_path)
    path.with_name(path.name + "-wal").write_bytes(b"rows that are not in the database yet")
    with pytest.raises(TraceError, match="unfinished write"):
        read_nsys(path)


@pytest.mark.parametrize("name", ["trace.json", "a b#?%20.sqlite", "no ending"])
def test_the_name_of_the_file_does_not_matter(tmp_path: Path, name: str) -> None:
    path = a_database(tmp_path).rename(tmp_path / name)
    (trace,) = read_nsys(path)
    assert (names(trace), trace.path) == ([GEMM], str(path))


def test_a_compressed_database_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite.gz"
    path.write_bytes(gzip.compress(a_database(tmp_path).read_bytes()))
    (trace,) = read_nsys(path)
    assert (names(trace), trace.path) == ([GEMM], str(path))


def fake_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program named ``nsys`` before all others on the PATH."""
    program = folder / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_a_report_is_exported_by_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = a_database(tmp_path)
    report = tmp_path / "run_rank2.nsys-rep"
    report.write_bytes(b"not public")
    fake_nsys(
        tmp_path,
        monkeypatch,
        f'echo "$@" > {tmp_path}/arguments\n'
        'while [ "$1" != --output ]; do shift; done\n'
        f'[ "$3" = {report} ] && cp {database} "$2"',
    )
    (trace,) = read_nsys(report)
    assert (names(trace), trace.path, trace.rank) == ([GEMM], str(report), 2)
    assert (tmp_path / "arguments").read_text().startswith("export --type sqlite ")


def test_without_nsys_the_error_says_how_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"not public")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("nsys") is None
    assert "nsys export --type sqlite run.nsys-rep" in refused(report)


def test_what_nsys_says_when_it_fails_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"not public")
    fake_nsys(tmp_path, monkeypatch, "echo 'the report is too new' >&2; exit 3")
    assert "exit code 3: the report is too new" in refused(report)


def test_the_large_database_has_the_overlap_that_it_was_made_with(tmp_path: Path) -> None:
    # 3 units of 100 kernels: each gather lasts 60 us, of which 45 lie inside GEMMs.
    (trace,) = read_nsys(write_large(tmp_path / "large.sqlite", 300))
    row = trace.activities
    gather = row.stream == 21
    gathers, gemms = (union(row.start_ns[which], row.end_ns[which]) for which in (gather, ~gather))
    assert (int(gather.sum()), int((~gather).sum())) == (3, 297)
    assert (gathers.total_ns, intersect(gathers, gemms).total_ns) == (3 * 60_000, 3 * 45_000)
    operations = [trace.names[trace.operations.name[row]] for row in row.operation]
    assert set(operations) == {"aten::addmm", "c10d::_allgather_base_"}
    assert operations.count("c10d::_allgather_base_") == 3
    assert trace.notes == ()
