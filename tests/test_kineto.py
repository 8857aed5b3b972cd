"""A Kineto trace becomes tables: exact times, launches, operations, ranges, devices, ranks."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import DISTRIBUTED, event, kernel, launch, names_of, one_launch, read, text, write

from overlap_probe.errors import TraceError
from overlap_probe.readers import read_trace, read_traces
from overlap_probe.readers.kineto import Decoder, read_kineto
from overlap_probe.readers.kineto_columns import ColumnBuilder
from overlap_probe.readers.kineto_events import event_of
from overlap_probe.tables import KERNEL, MEMCPY, MEMSET, NO_TIME, Trace
from overlap_probe.windows import find_windows

DATA = Path(__file__).parent / "data"


def test_a_launch_its_operation_and_its_kernel_are_joined(tmp_path: Path) -> None:
    trace = read(tmp_path, one_launch())
    row = trace.activities
    assert names_of(trace, "activities") == ["gemm"]
    assert (row.start_ns[0], row.end_ns[0], row.launch_ns[0]) == (20_000, 50_000, 12_000)
    assert (row.kind[0], row.stream[0], row.blocks[0], row.threads[0]) == (KERNEL, 7, 6, 128)
    assert names_of(trace, "operations")[row.operation[0]] == "aten::mm"
    assert row.launch_thread[0] == trace.operations.thread[0] == trace.ranges.thread[0]
    assert names_of(trace, "ranges") == ["step0"]
    assert trace.notes == ()


def test_all_args_that_the_tables_have_are_read(tmp_path: Path) -> None:
    comms = {
        "Collective name": "_allgather_base",
        "Process Group Name": "2",
        "Seq": 17,
        "Out msg nelems": 1000,
        "dtype": "BFloat16",
        "Input Dims": [[8, 4], []],
    }
    call = event("cpu_op", "record_param_comms", 1, 5, External_id=9)
    call["args"] |= comms
    ring = kernel("ncclDevKernel", 10, 5, correlation=3, External_id=9, registers_per_thread=96, shared_memory=2048)
    ring["args"]["Collective name"] = "_allgather_base"
    copy = event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 20, 1, pid=1, tid=29, stream=29, bytes=4096)
    copy["args"] |= {"fromDevice": 0, "inDevice": 1, "toDevice": 1}
    trace = read(tmp_path, [call, ring, copy])
    op, act = trace.operations, trace.activities
    assert trace.names[op.collective[0]] == "_allgather_base"
    assert trace.names[op.group[0]] == "2"
    assert (op.sequence[0], op.bytes[0]) == (17, 2000)  # 1000 elements of 2 bytes
    assert json.loads(trace.names[op.shapes[0]]) == [[8, 4], []]
    assert trace.names[act.collective[0]] == "_allgather_base"
    assert (act.registers[0], act.shared_bytes[0]) == (96, 2048)
    assert (act.bytes[1], act.source[1], act.target[1], act.stream[1]) == (4096, 0, 1, 29)


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [("Memcpy HtoD (Pinned -> Device)", -1, 3), ("Memcpy DtoH (Device -> Pinned)", 3, -1), ("Memcpy DtoD", 3, 3)],
)
def test_a_copy_says_in_its_name_what_it_reads_and_writes(tmp_path: Path, name: str, source: int, target: int) -> None:
    trace = read(tmp_path, [event("gpu_memcpy", name, 1, 1, device=3, stream=7)])
    assert (trace.activities.source[0], trace.activities.target[0]) == (source, target)


# Times


@given(st.lists(st.integers(0, 2**62 // 1000), min_size=1, max_size=6), st.sampled_from(["number", "text", "integer"]))
def test_times_are_the_decimal_text(tmp_path_factory: pytest.TempPathFactory, times: list[int], form: str) -> None:
    if form == "integer":
        times = [ns // 1000 * 1000 for ns in times]
    forms = {
        "number": lambda ns: f"{ns // 1000}.{ns % 1000:03d}",
        "text": lambda ns: f'"{ns // 1000}.{ns % 1000:03d}"',
        "integer": lambda ns: f"{ns // 1000}",
    }
    template = '{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":{},"dur":{},"args":{{"correlation":{}}}}}'
    known = enumerate([1, *times], start=1)
    rows = ",".join(template.format(forms[form](ns), forms[form](ns // 7), number) for number, ns in known)
    trace = read(tmp_path_factory.mktemp("times"), f"[{rows}]")
    durations = {"integer": lambda ns: ns // 7 // 1000 * 1000}.get(form, lambda ns: ns // 7)
    assert sorted(trace.activities.start_ns.tolist()) == sorted([0 if form == "integer" else 1, *times])
    assert sorted((trace.activities.end_ns - trace.activities.start_ns).tolist()) == sorted(map(durations, [1, *times]))


def test_every_size_of_time_is_exact_to_the_nanosecond() -> None:
    """Below 2**43 us as floats, above it as decimals: the same as the decimal arithmetic says."""
    chosen = random.Random(1)
    texts = [f"{chosen.randrange(2**bits)}.{chosen.randrange(1000):03d}" for bits in range(1, 52) for _ in range(40)]
    lines = [f'{{"cat":"kernel","name":"k","pid":0,"tid":7,"ts":{one},"dur":0.001}}' for one in texts]
    builder = ColumnBuilder()
    decode = Decoder()
    for line in lines:
        builder.add(decode(f"[{line}]".encode()))
    (activities, *_), _ = builder.rows()
    assert activities["start_ns"].tolist() == [int(Decimal(one) * 1000) for one in texts]


def test_the_display_unit_does_not_change_the_unit(tmp_path: Path) -> None:
    assert read(tmp_path, text(one_launch(), displayTimeUnit="ns")).activities.start_ns[0] == 20_000


# Launches


def test_calls_are_joined_by_correlation_and_never_by_name(tmp_path: Path) -> None:
    calls = [
        event("hip runtime", "INVALID", 3, 1, correlation=8),
        event("cuda_driver", "cuLaunch", 4, 1, correlation=9),
    ]
    trace = read(tmp_path, [*calls, kernel("a", 10, 1, correlation=8), kernel("b", 12, 1, correlation=9)])
    assert trace.activities.launch_ns.tolist() == [3_000, 4_000]


@pytest.mark.parametrize("correlation", [{}, {"correlation": 0}])
def test_correlation_zero_or_none_is_no_correlation(tmp_path: Path, correlation: dict[str, int]) -> None:
    trace = read(tmp_path, [launch(3, 0), kernel("k", 10, 1, **correlation)])
    assert trace.activities.launch_ns.tolist() == [NO_TIME]
    assert trace.activities.launch_thread.tolist() == [-1]


def test_several_rows_may_have_the_correlation_of_one_launch(tmp_path: Path) -> None:
    rows = [kernel("a", 10, 1, correlation=5), kernel("b", 20, 1, correlation=5)]
    assert read(tmp_path, [launch(3, 5, "cudaGraphLaunch"), *rows]).activities.launch_ns.tolist() == [3_000, 3_000]


def test_of_two_calls_with_one_correlation_the_last_before_the_row_launched_it(tmp_path: Path) -> None:
    rows = [kernel("a", 10, 1, correlation=5), kernel("b", 30, 1, correlation=5)]
    assert read(tmp_path, [launch(21, 5), launch(3, 5), *rows]).activities.launch_ns.tolist() == [3_000, 21_000]


def test_a_kernel_that_starts_before_its_launch_keeps_it(tmp_path: Path) -> None:
    assert read(tmp_path, [launch(15, 5), kernel("a", 10, 1, correlation=5)]).activities.launch_ns.tolist() == [15_000]


# Operations


def test_of_operations_with_one_external_id_the_collective_counts(tmp_path: Path) -> None:
    ops = [event("cpu_op", name, 1, 9, External_id=4) for name in ("aten::x", "c10d::_allgather_base_", "aten::y")]
    trace = read(tmp_path, [*ops, kernel("k", 10, 1, External_id=4)])
    assert names_of(trace, "operations")[trace.activities.operation[0]] == "c10d::_allgather_base_"


def test_without_an_external_id_that_of_the_call_counts(tmp_path: Path) -> None:
    ops = [event("cpu_op", "outer", 0, 20, External_id=4), event("cpu_op", "inner", 1, 9, External_id=5)]
    trace = read(tmp_path, [*ops, launch(2, 8, External_id=4), kernel("k", 10, 1, correlation=8)])
    assert names_of(trace, "operations")[trace.activities.operation[0]] == "outer"


def test_without_any_the_innermost_operation_around_the_call_counts(tmp_path: Path) -> None:
    ops = [
        event("cpu_op", "outer", 0, 20),
        event("cpu_op", "inner", 1, 9),
        event("cpu_op", "before", 0, 1),
        event("cpu_op", "other thread", 1, 2, tid=101),
    ]
    kernels = [kernel("k", 30, 1, correlation=8), kernel("l", 40, 1, correlation=9)]
    trace = read(tmp_path, [*ops, launch(2, 8), launch(25, 9), *kernels])
    assert names_of(trace, "operations")[trace.activities.operation[0]] == "inner"
    assert trace.activities.operation[1] == -1


def test_an_operation_elsewhere_that_has_the_correlation_as_its_external_id_is_not_the_launching_one(
    tmp_path: Path,
) -> None:
    """Some traces repeat the correlation as the External id of calls and device rows."""
    ops = [event("cpu_op", "wrong", 0, 1, External_id=8), event("cpu_op", "right", 2, 9, External_id=900)]
    trace = read(tmp_path, [*ops, launch(3, 8, External_id=8), kernel("k", 20, 1, correlation=8, External_id=8)])
    assert names_of(trace, "operations")[trace.activities.operation[0]] == "right"


def test_without_a_call_the_thread_is_that_of_the_operation(tmp_path: Path) -> None:
    trace = read(tmp_path, [event("cpu_op", "op", 0, 5, tid=8, External_id=3), kernel("k", 9, 1, External_id=3)])
    assert trace.activities.launch_thread[0] == trace.operations.thread[0]
    assert trace.activities.launch_ns[0] == NO_TIME


# Categories


@pytest.mark.parametrize("spelling", [str.lower, str.title, str.upper])
def test_older_spellings_of_categories_and_of_the_external_id_are_known(tmp_path: Path, spelling: Any) -> None:
    rows = [
        event(spelling("operator"), "aten::mm", 5, 4, External_id=1),
        event(spelling("runtime"), "cudaLaunchKernel", 1, 1, correlation=4),
        event(spelling("kernel"), "k", 10, 1, correlation=4, tid=7, external_id=1),
        event(spelling("memcpy"), "c", 12, 1, tid=7),
        event(spelling("memset"), "s", 14, 1, tid=7),
    ]
    trace = read(tmp_path, rows)
    assert trace.activities.kind.tolist() == [KERNEL, MEMCPY, MEMSET]
    assert trace.activities.launch_ns[0] == 1_000
    assert trace.activities.operation[0] == 0


def test_a_step_that_an_older_profiler_wrote_as_an_operation_is_a_range(tmp_path: Path) -> None:
    rows = [event("Operator", "aten::mm", 5, 4), event("Operator", "ProfilerStep#3", 1, 50)]
    trace = read(tmp_path, [*rows, event("user_annotation", "forward", 2, 9)])
    assert [trace.names[code] for code in trace.ranges.name] == ["ProfilerStep#3", "forward"]
    assert [trace.names[code] for code in trace.operations.name] == ["aten::mm"]
    assert find_windows(trace, None).names == ("ProfilerStep#3",)


def test_what_only_looks_like_work_is_left_out(tmp_path: Path) -> None:
    others = [
        event("gpu_user_annotation", "nccl:all_gather", 0, 99, pid=0, tid=7),
        event("python_function", "train.py(3): step", 0, 99),
        event("Trace", "PyTorch Profiler (0)", 0, 99, pid="Spans", tid="PyTorch Profiler"),
        event("overhead", "Activity Buffer Request", 0, 99, pid=-1, tid=0),
        {"ph": "s", "id": 77, "pid": 100, "tid": 100, "ts": 12, "cat": "ac2g", "name": "ac2g"},
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 100, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "s": "g", "pid": "", "tid": "", "ts": 99},
    ]
    trace = read(tmp_path, [*others, *one_launch(), *others])
    assert [len(table) for table in (trace.activities, trace.operations, trace.ranges)] == [1, 1, 1]
    assert trace.notes == ()


def test_without_a_stream_the_track_is_the_stream(tmp_path: Path) -> None:
    trace = read(
        tmp_path, [event("kernel", "a", 0, 1, pid=0, tid=21), event("kernel", "b", 5, 1, pid=0, tid="stream 9")]
    )
    assert trace.activities.stream.tolist() == [21, 9]


def test_threads_of_different_processes_are_different(tmp_path: Path) -> None:
    rows = [event("user_annotation", "r", at, 1, pid=pid, tid=1) for at, pid in enumerate((1, 2, 1))]
    first, second, third = read(tmp_path, rows).ranges.thread.tolist()
    assert first == third != second


def test_rows_are_sorted_outermost_first(tmp_path: Path) -> None:
    rows = [event("user_annotation", name, ts, dur) for name, ts, dur in [("c", 5, 1), ("b", 0, 5), ("a", 0, 9)]]
    kernels = [kernel("z", 5, 1), kernel("y", 0, 9), kernel("x", 0, 5)]
    trace = read(tmp_path, [*rows, *kernels])
    assert names_of(trace, "ranges") == ["a", "b", "c"]
    assert names_of(trace, "activities") == ["x", "y", "z"]


# Devices, ranks, metadata


def test_each_device_on_which_kernels_ran_has_a_trace(tmp_path: Path) -> None:
    rows = [
        kernel("a", 10, 1, device=0, correlation=1),
        kernel("b", 11, 1, device=2, correlation=2),
        kernel("c", 12, 1, device=2),
        event("gpu_memset", "Memset (Device)", 13, 1, device=1, stream=7),
    ]
    properties = [{"id": 2, "name": "NVIDIA H200", "numSms": 132}]
    path = write(tmp_path, text([launch(1, 1), launch(2, 2), *rows], deviceProperties=properties))
    first, second = read_traces(path)
    assert (first.device_index, names_of(first, "activities")) == (0, ["a"])
    assert (second.device_index, names_of(second, "activities")) == (2, ["b", "c", "Memset (Device)"])
    assert (second.device.name, second.device.sms, first.device.name) == ("NVIDIA H200", 132, None)
    assert (first.process, second.process) == (100, 100)
    with pytest.raises(TraceError, match=r"trace\.json: there are 2 .*; use read_traces"):
        read_trace(path)


def test_copies_of_a_peer_do_not_make_a_second_device(tmp_path: Path) -> None:
    rows = [kernel("k", 10, 1, device=1), event("gpu_memcpy", "Memcpy PtoP", 13, 1, pid=0, device=0, stream=7)]
    trace = read(tmp_path, rows)
    assert names_of(trace, "activities") == ["k", "Memcpy PtoP"]
    assert trace.device_index is None


def test_distributed_info_and_device_properties_are_read(tmp_path: Path) -> None:
    device = {
        "id": 0,
        "name": "NVIDIA H200",
        "numSms": 132,
        "regsPerMultiprocessor": 65536,
        "sharedMemPerMultiprocessor": 233472,
        "maxThreadsPerMultiprocessor": 2048,
    }
    trace = read(tmp_path, text(one_launch(), distributedInfo=DISTRIBUTED, deviceProperties=[device]))
    assert (trace.rank, trace.world_size, trace.groups) == (0, 2, {"0": (0, 1)})
    known = trace.device
    assert (known.name, known.sms, known.registers_per_sm) == ("NVIDIA H200", 132, 65536)
    assert (known.shared_bytes_per_sm, known.threads_per_sm) == (233472, 2048)


@pytest.mark.parametrize(
    "info",
    [None, 3, [], {"rank": None, "world_size": "x", "pg_config": {}}, {"rank": -1, "pg_config": [1, {"ranks": "["}]}],
)
def test_distributed_info_of_another_shape_is_as_if_absent(tmp_path: Path, info: Any) -> None:
    trace = read(tmp_path, text(one_launch(), distributedInfo=info, deviceProperties=info))
    assert (trace.rank, trace.world_size, trace.groups, trace.device.name) == (None, None, {}, None)


WAITS = {"process": 100, "waits": {"100": [[1_000_020_000, 1_000_030_000, 7_000]], "555": [[1, 2, 1]]}}
"""Of the thread of `one_launch`: 7 us between 20 and 30 us of a trace that begins at 1 s. And of one without rows."""


def test_waits_for_a_core_are_read_on_the_clock_of_the_trace_and_by_its_threads(tmp_path: Path) -> None:
    trace = read(tmp_path, text(one_launch(), overlap_probe=WAITS, baseTimeNanoseconds=1_000_000_000))
    waits = trace.waits
    assert (waits.start_ns.tolist(), waits.end_ns.tolist(), waits.waited_ns.tolist()) == ([20_000], [30_000], [7_000])
    assert waits.thread.tolist() == [trace.ranges.thread[0]]
    assert not len(read(tmp_path, one_launch()).waits)


@pytest.mark.parametrize(
    "waits",
    [
        *(None, 3, [], {}, WAITS | {"process": None}, WAITS | {"process": 7}, WAITS | {"waits": [1]}),
        *({"process": 100, "waits": {"100": some}} for some in (3, [3], [[1, 2]], [["1", "x", 1]], [[2, 1, 0]])),
        {"process": 100, "waits": {"100": [[1, 5, 9]], "x": [[1, 2, 1]]}},
    ],
)
def test_waits_of_another_shape_are_as_if_absent(tmp_path: Path, waits: Any) -> None:
    assert not len(read(tmp_path, text(one_launch(), overlap_probe=waits)).waits)


def waits_in(folder: Path, waits: Any, **keys: Any) -> Trace:
    """`one_launch`, 0 to 60 us, whose thread has these waits, by its number or as a list."""
    by_thread = waits if isinstance(waits, dict) else {"100": waits}
    return read(folder, text(one_launch(), overlap_probe={"process": 100, "waits": by_thread}, **keys))


HUGE = "9" * 5000
"""More digits than Python turns into an integer."""


@pytest.mark.parametrize(
    "waits", [[["1", "2", "1"]], [[1, 2, True]], [[HUGE, 2, 1]], [[1, 2**63, 1]], {HUGE: [[1, 2, 1]]}]
)
def test_what_is_no_wait_is_left_out_and_said_and_the_others_count(tmp_path: Path, waits: Any) -> None:
    trace = waits_in(tmp_path, {"100": [[10_000, 20_000, 5_000]], "7": waits} if isinstance(waits, list) else waits)
    assert len(trace.waits) == isinstance(waits, list)
    assert trace.notes == (
        "recorded waits for a core that are not [start, end, waited] in ns of a thread are left out: 1",
    )


@pytest.mark.parametrize(
    "keys", [{"overlap_probe": {"process": HUGE}}, {"overlap_probe": {}, "dropped": int("9" * 4000)}]
)
def test_a_number_of_thousands_of_digits_is_none(tmp_path: Path, keys: Any) -> None:
    assert not len(read(tmp_path, text(one_launch(), **keys)).waits)
    whole = f'{{"overlap_probe": {{"process": {HUGE}}}, {text(one_launch())[1:]}'
    assert len(read(tmp_path, whole).activities) == 1


def test_waits_that_contradict_each_other_or_the_trace_excuse_nothing(tmp_path: Path) -> None:
    everything, copies = [0, 2**63 - 1, 2**63 - 1], [[10_000, 20_000, 5_000]] * 2_000
    assert not len(waits_in(tmp_path, [everything, [60_000, 70_000, 1], [-5, 0, 1]]).waits)
    trace = waits_in(tmp_path, [everything, *copies])
    assert len(trace.waits) == 3  # as many as `run_queue` may find to overlap
    assert trace.notes == ("recorded waits for a core that contradict each other or the trace are left out: 1998",)
    assert not len(waits_in(tmp_path, copies, baseTimeNanoseconds=10**9).waits)
    assert len(waits_in(tmp_path, copies[:1], baseTimeNanoseconds=2**70).waits) == 1  # no such time: as if absent


def test_waits_that_a_sampler_dates_back_are_all_kept(tmp_path: Path) -> None:
    """A wait is seen when it ends: 8 us that end at 22 began at 14, before the look at 15 that saw another one end."""
    seen = [[-3_000, 5_000, 8_000], [8_000, 15_000, 2_000], [14_000, 22_000, 8_000], [20_000, 27_000, 7_000]]
    base = 1_000_000_000
    written = [[start + base, end + base, waited] for start, end, waited in seen]
    trace = waits_in(tmp_path, written, baseTimeNanoseconds=base)
    assert (trace.waits.start_ns.tolist(), trace.notes) == ([start for start, _, _ in seen], ())


def test_metadata_may_be_nested_deeply(tmp_path: Path) -> None:
    nested: Any = "3 records were dropped"
    for _ in range(500):
        nested = [nested]
    assert read(tmp_path, text(one_launch(), overlap_probe=nested)).incomplete == (
        "the profiler says: 3 records were dropped",
    )


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("rank-12.json.gz", 12),
        ("trace_rank_7_step5.json", 7),
        ("tr.Rank0.pt.trace.json", 0),
        ("rank0_of_rank1.json", None),
        ("local_rank2.json", None),
        ("crank4.json", None),
        ("host_1234.1700000000.pt.trace.json", None),
    ],
)
def test_the_rank_is_the_file_names_only_where_the_trace_has_none(tmp_path: Path, name: str, rank: int | None) -> None:
    assert read(tmp_path, one_launch(), name).rank == rank
    assert read(tmp_path, text(one_launch(), distributedInfo=DISTRIBUTED), name).rank == 0
    assert read_trace(tmp_path / name, rank=5).rank == 5


# Files


def _same(one: Trace, other: Trace) -> bool:
    """Whether two traces say the same; their codes of texts and threads may differ."""

    def plain(trace: Trace, column: str, values: np.ndarray[Any, Any]) -> list[Any]:
        if column in ("name", "collective", "group", "shapes"):
            return [trace.names[code] if code >= 0 else "" for code in values]
        if column in ("thread", "launch_thread"):  # numbered by first occurrence
            number: dict[int, int] = {}
            return [number.setdefault(code, len(number)) for code in values.tolist()]
        return values.tolist()

    for table in ("activities", "operations", "ranges"):
        a, b = getattr(one, table), getattr(other, table)
        for column in type(a).__dataclass_fields__:
            if plain(one, column, getattr(a, column)) != plain(other, column, getattr(b, column)):
                return False
    return (one.rank, one.world_size, one.device, one.notes) == (
        other.rank,
        other.world_size,
        other.device,
        other.notes,
    )


def test_the_content_says_what_a_file_is_not_its_name(tmp_path: Path) -> None:
    content = text(one_launch()).encode()
    plain = read(tmp_path, content)
    assert _same(plain, read(tmp_path, content, "plain.json.gz"))
    assert _same(plain, read(tmp_path, gzip.compress(content), "packed.json"))
    assert _same(plain, read(tmp_path, b"\xef\xbb\xbf" + content, "mark.json"))
    assert _same(plain, read(tmp_path, gzip.compress(content[:100]) + gzip.compress(content[100:]), "members"))


def test_a_database_goes_to_the_other_reader_whatever_it_is_called(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.json") as database:
        database.execute("create table t (x)")
    with pytest.raises(TraceError, match=r"(?i)nsight|nsys"):
        read_traces(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["absent.json", "folder"])
def test_a_file_that_cannot_be_opened_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match=rf"{name}: cannot be read: (No such file|Is a directory)"):
        read_trace(tmp_path / name)


@pytest.mark.parametrize("piece_bytes", [1 << 14, 1 << 16, 1 << 24])
def test_real_traces_do_not_depend_on_the_size_of_the_pieces(piece_bytes: int) -> None:
    path = DATA / "fsdp2_llama8_b4s1024_rank0.json.gz"
    assert _same(read_kineto(path, piece_bytes)[0], read_trace(path))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda path: path.name)
def test_real_traces_are_read_without_a_note(path: Path) -> None:
    trace = read_trace(path)
    assert trace.notes == ()
    assert trace.rank == int(path.name.split("rank")[1][0])
    assert (trace.device.name, trace.device.sms) == ("NVIDIA H200", 132)
    assert (trace.activities.launch_ns <= trace.activities.start_ns).all()
    assert (trace.activities.operation >= 0).all()


def test_a_real_trace_read_by_json_alone_has_the_same_numbers() -> None:
    path = DATA / "linear8_ring_prefetch_rank0.json.gz"
    whole = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    builder = ColumnBuilder()
    builder.add([event_of(one) for one in whole["traceEvents"]])
    (activities, _, operations, _), left_out = builder.rows()
    trace = read_trace(path)
    assert sorted(activities["start_ns"]) == trace.activities.start_ns.tolist()
    assert sorted(operations["end_ns"]) == sorted(trace.operations.end_ns)
    assert left_out == [0, 0, 0, 0]


def test_an_event_that_a_file_holds_twice_is_read_once(tmp_path: Path) -> None:
    """As in a file that was merged from overlapping ones: device rows, calls, operations and ranges, number or not."""
    lost = [launch(13, 78), launch(14, 79), launch(15, 80), launch(40, 81), kernel("gemm", 60, 1, correlation=81)]
    once = [*one_launch(), *lost, event("cpu_op", "aten::add", 20, 1), kernel("nccl", 20, 30, stream=9)]
    twice, single = read(tmp_path, [*once, *once]), read(tmp_path, once)
    for table in ("activities", "operations", "ranges"):
        assert names_of(twice, table) == names_of(single, table)
    assert names_of(single, "operations") == ["aten::mm", "aten::add"]
    assert twice.notes == single.notes
    assert "2 of 5 kernel launches" in single.notes[0]  # 3 lost, and the kernel without a number may be one of them


def test_events_of_the_same_times_that_differ_are_all_kept_and_each_once(tmp_path: Path) -> None:
    """Sorted by time alone, two of them that a file holds twice would alternate: A, B, A, B."""
    alike = [kernel(name, 20, 30, stream=stream, correlation=stream) for name, stream in (("nccl", 7), ("gemm", 8))]
    assert names_of(read(tmp_path, alike * 2), "activities") == ["nccl", "gemm"]
    pair = [kernel("gemm", 20, 30, correlation=number) for number in (1, 2)]
    assert names_of(read(tmp_path, pair * 2), "activities") == ["gemm", "gemm"]
