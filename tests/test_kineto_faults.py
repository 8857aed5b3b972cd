"""Broken Kineto traces: everything that can be read is read, what cannot is said, and nothing crashes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import event, kernel, launch, names_of, one_launch, read, text, write

from overlap_probe.errors import TraceError
from overlap_probe.readers.kineto import read_kineto

GOOD = '{"ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": 7, "ts": %d, "dur": 10, "args": {"stream": 7}}'


def _amid(broken: str | bytes) -> bytes:
    """A trace with an event between two good ones: kernels a and b."""
    middle = broken if isinstance(broken, bytes) else broken.encode()
    return (
        b'{"traceEvents": [' + b",\n".join([(GOOD % ("a", 10)).encode(), middle, (GOOD % ("b", 30)).encode()]) + b"]}"
    )


def _row(category: str, name: str, extra: str = "") -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 0, "tid": 7, "ts": 20, "dur": 5,'
        f' "args": {{"stream": 7{extra}}}}}'
    )


# Broken text


@pytest.mark.parametrize(
    ("name", "as_read"),
    [
        (b"caf\xe9 \xff\xfe", "caf\ufffd \ufffd\ufffd"),
        (b"half \\ud83d of a pair \\udc00", "half \ufffd of a pair \ufffd"),
        (b"a whole \\ud83d\\ude00 pair", "a whole \U0001f600 pair"),
        (b"line\nfeed\ttab\x01", "line\nfeed\ttab\x01"),
    ],
)
def test_a_name_with_odd_characters_costs_nothing_else(tmp_path: Path, name: bytes, as_read: str) -> None:
    trace = read(tmp_path, _amid(_row("kernel", "NAME").encode().replace(b"NAME", name)))
    assert names_of(trace, "activities") == ["a", as_read, "b"]
    assert trace.names[trace.activities.name[1]].encode()
    assert trace.notes == ()


@pytest.mark.parametrize(
    ("name", "as_read"),
    [
        ('split of str "a b" at 0x7f', 'split of str "a b" at 0x7f'),
        ('one " only', 'one " only'),
        ('"', '"'),
        (r"C:\Users\x\model.py(3): forward", r"C:\Users\x\model.py(3): forward"),
        ("C:\\dir\\", "C:\\dir\\"),
        (r"\u12", r"\u12"),
        (r"fine \" and \\ and \d", r'fine " and \ and \d'),
    ],
)
def test_stray_quotes_and_backslashes_in_a_name_are_mended_and_noted(tmp_path: Path, name: str, as_read: str) -> None:
    trace = read(tmp_path, _amid(_row("kernel", name)))
    assert names_of(trace, "activities") == ["a", as_read, "b"]
    assert trace.activities.start_ns.tolist() == [10_000, 20_000, 30_000]
    assert trace.notes == ("1 event had broken JSON and could be mended",)
    assert trace.incomplete == ()


@given(st.text(alphabet='"\\{}[],: abn\n', max_size=12), st.sampled_from(["kernel", "python_function"]))
def test_whatever_is_in_a_name_no_device_row_is_lost_in_silence(
    tmp_path_factory: pytest.TempPathFactory, name: str, category: str
) -> None:
    trace = read(tmp_path_factory.mktemp("name"), _amid(_row(category, name)))
    found = names_of(trace, "activities")
    assert found[0] == "a"
    assert (found[-1] == "b" and (len(found) == 3 or category == "python_function")) or trace.incomplete


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "N/A", "nan", "-nan(ind)", "None", "True", "inf", "", "undefined"]
)
def test_a_bare_word_as_a_value_costs_only_that_value(tmp_path: Path, value: str) -> None:
    trace = read(tmp_path, _amid(_row("kernel", "odd", f', "registers per thread": {value}, "correlation": 12')))
    assert names_of(trace, "activities") == ["a", "odd", "b"]
    assert trace.activities.registers.tolist() == [-1, -1, -1]
    assert trace.activities.stream.tolist() == [7, 7, 7]


def test_what_looks_like_events_inside_a_broken_one_does_not_end_it(tmp_path: Path) -> None:
    inside = ', "list": [{"name": "x"}, {"name": "y"}, {"name": N/A}], "correlation": 3'
    trace = read(tmp_path, _amid(_row("kernel", "odd", inside)))
    assert names_of(trace, "activities") == ["a", "odd", "b"]


@pytest.mark.parametrize(
    ("category", "rows_missing"),
    [("python_function", False), ("cpu_op", False), ("kernel", True), ("Memcpy", True), ("", True)],
)
def test_an_event_that_cannot_be_read_is_left_out_and_noted(tmp_path: Path, category: str, rows_missing: bool) -> None:
    broken = _row(category, "bad").replace('"dur": 5', '"dur" 5 5').replace('"cat": "", ', "")
    trace = read(tmp_path, _amid(broken))
    assert names_of(trace, "activities") == ["a", "b"]
    place = len('{"traceEvents": [') + len(GOOD % ("a", 10)) + 2
    assert trace.notes == (f"broken JSON had to be left out in 1 place, the first at byte {place}",)
    assert trace.incomplete == (trace.notes if rows_missing else ())


def test_a_name_that_closes_the_list_of_events_too_early_is_noted(tmp_path: Path) -> None:
    trace = read(tmp_path, _amid(_row("kernel", '"}]')))
    assert names_of(trace, "activities")[0] == "a"
    assert trace.incomplete


def test_the_last_event_may_be_the_broken_one(tmp_path: Path) -> None:
    content = (
        '{"traceEvents": [' + GOOD % ("a", 10) + "," + _row("kernel", "bad").replace('"dur": 5', '"dur" 5 5') + "]}"
    )
    trace = read(tmp_path, content)
    assert names_of(trace, "activities") == ["a"]
    assert len(trace.incomplete) == 1


@pytest.mark.parametrize("brackets", ['{"a":', "["])
@pytest.mark.parametrize("closed", [True, False])
def test_args_nested_too_deeply_cost_only_themselves(tmp_path: Path, brackets: str, closed: bool) -> None:
    closing = "}" if brackets.startswith("{") else "]"
    nested = brackets * 100_000 + "1" + closing * 100_000 * closed
    trace = read(tmp_path, _amid(_row("kernel", "deep", f', "x": {nested}, "correlation": 5')))
    assert names_of(trace, "activities") == (["a", "deep", "b"] if closed else ["a", "b"])
    assert len(trace.notes) == 1
    assert len(trace.incomplete) == (not closed)


def test_broken_events_among_many_pieces_cost_only_themselves(tmp_path: Path) -> None:
    """Every 500th of 20000 kernels has a name with a stray quote; about 2.4 MB, so some 20 pieces."""
    rows = [GOOD % (f"k{i}" if i % 500 else f'k"{i}', 100 * i) for i in range(20_000)]
    path = write(tmp_path, '{"traceEvents": [' + ",\n".join(rows) + "]}")
    for piece_bytes in (1 << 14, 1 << 17, 1 << 24):
        (trace,) = read_kineto(path, piece_bytes)
        assert trace.activities.start_ns.tolist() == [100_000 * i for i in range(20_000)]
        assert trace.notes == ("40 events had broken JSON and could be mended",)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_off_is_refused_with_the_place(tmp_path: Path, packed: bool) -> None:
    content = text(one_launch() * 50).encode()
    content = gzip.compress(content) if packed else content
    for length in (len(content) // 2, len(content) - 1):
        where = rf"trace\.json: .*cut off.* (after {length} bytes|at byte {length}\b)"
        with pytest.raises(TraceError, match=where):
            read(tmp_path, content[:length])


def test_gzip_whose_checksum_is_wrong_is_refused_with_the_place(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(text(one_launch() * 500).encode()))
    content[-6] ^= 0xFF  # in the checksum
    with pytest.raises(TraceError, match=r"trace\.json: the gzip data is damaged after \d+ bytes"):
        read(tmp_path, bytes(content))


# Odd rows


def test_rows_with_values_of_the_wrong_kind_keep_what_is_right(tmp_path: Path) -> None:
    odd = event("kernel", "odd", "12.345", "1", pid="GPU 3", tid=None, stream="7", correlation="x", bytes=2**70)
    odd["args"]["grid"] = "none"
    trace = read(tmp_path, [odd, {"ph": "X", "cat": 5, "name": ["x"]}, {"name": None}, {}])
    assert names_of(trace, "activities") == ["odd"]
    assert (trace.activities.start_ns[0], trace.activities.end_ns[0], trace.activities.stream[0]) == (12_345, 13_345, 7)
    assert (trace.activities.blocks[0], trace.activities.bytes[0]) == (-1, -1)


@pytest.mark.parametrize(
    ("ts", "dur"), [(None, 1), (5, None), ("x", 1), (5, -1), (-1e300, 1), ("NaN", 1), (5, "Infinity")]
)
def test_a_device_row_without_a_usable_time_is_left_out_and_noted(tmp_path: Path, ts: object, dur: object) -> None:
    trace = read(tmp_path, [*one_launch(), kernel("odd", ts, dur)])
    assert names_of(trace, "activities") == ["gemm"]
    assert trace.incomplete == (
        "1 device row had no usable time (none, or an end before the start) and had to be left out",
    )


def test_an_operation_without_a_usable_time_leaves_the_trace_complete(tmp_path: Path) -> None:
    trace = read(tmp_path, [*one_launch(), event("cpu_op", "odd", 5, -3)])
    assert names_of(trace, "operations") == ["aten::mm"]
    assert trace.notes == ("1 host row had no usable time (none, or an end before the start) and had to be left out",)
    assert trace.incomplete == ()


def test_a_range_without_a_usable_time_may_have_been_a_window_so_no_check_may_pass(tmp_path: Path) -> None:
    trace = read(tmp_path, [*one_launch(), event("user_annotation", "step0", 5, -3)])
    assert trace.incomplete == trace.notes
    assert "1 named range had no usable time" in trace.incomplete[0]


def test_a_call_without_a_duration_still_launches(tmp_path: Path) -> None:
    call = launch(3, 5)
    del call["dur"]
    trace = read(tmp_path, [call, kernel("k", 10, 1, correlation=5)])
    assert trace.activities.launch_ns.tolist() == [3_000]
    assert trace.notes == ()


def test_rows_of_no_duration_are_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, [*one_launch(), kernel("empty", 30, 0)])
    assert names_of(trace, "activities") == ["gemm", "empty"]
    assert trace.notes == ()


def test_rows_at_time_zero_amid_a_trace_far_from_it_are_left_out(tmp_path: Path) -> None:
    rows = [{**one, "ts": one["ts"] + 5e12} for one in one_launch()]
    trace = read(tmp_path, [*rows, kernel("rubbish", 0, 3), event("cpu_op", "rubbish", 0, 0)])
    assert names_of(trace, "activities") == ["gemm"]
    assert names_of(trace, "operations") == ["aten::mm"]
    assert len(trace.notes) == 2


# Missing rows


def _launches(count: int, name: str = "cudaLaunchKernel") -> list[dict[str, object]]:
    return [launch(10 * i, i + 1, name) for i in range(count)]


def _kernels(count: int, without: set[int]) -> list[dict[str, object]]:
    return [kernel(f"k{i}", 1000 + 10 * i, 5, correlation=i + 1) for i in range(count) if i not in without]


def test_launches_without_device_rows_are_counted_as_dropped(tmp_path: Path) -> None:
    trace = read(tmp_path, [*_launches(100), *_kernels(100, without={10, 11, 50})])
    assert trace.notes == ("3 of 100 kernel launches have no row on the device: the profiler dropped records",)
    assert trace.incomplete == trace.notes


def test_a_few_launches_at_the_very_end_may_lack_their_rows(tmp_path: Path) -> None:
    assert read(tmp_path, [*_launches(100), *_kernels(100, without={98, 99})]).notes == ()
    assert len(read(tmp_path, [*_launches(100), *_kernels(100, without=set(range(80, 100)))]).incomplete) == 1


def test_calls_that_need_no_device_row_are_no_losses(tmp_path: Path) -> None:
    """Copies of nothing, graph launches, launches that are captured, names that launched nothing at all."""
    captured = [
        launch(500, 900, "cudaStreamBeginCapture_v2"),
        launch(510, 901),
        launch(520, 902),
        launch(530, 903, "cudaStreamEndCapture"),
    ]
    others = [launch(505, 950, "cudaMemcpyAsync"), launch(506, 951, "cuLaunchKernelEx"), launch(507, 0)]
    copy = [launch(3, 960, "cudaMemcpyAsync"), event("gpu_memcpy", "Memcpy DtoD", 4, 1, correlation=960)]
    assert read(tmp_path, [*_launches(100), *captured, *others, *copy, *_kernels(100, without=set())]).notes == ()


def test_rows_without_correlation_may_be_those_of_the_launches(tmp_path: Path) -> None:
    rows = _kernels(10, without={4})
    assert read(tmp_path, [*_launches(10), *rows, kernel("k4", 1040, 5)]).notes == ()


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ({"WARNING": ["Dropped 12 activity records: ctx=0x7f, stream=7"]}, True),
        ({"stats": {"droppedRecords": 5}}, True),
        ({"WARNING": ["0 records were dropped"], "droppedRecords": 0, "dropout": 5}, False),
    ],
)
def test_losses_that_the_profiler_admits_are_noted(tmp_path: Path, keys: dict[str, object], noted: bool) -> None:
    trace = read(tmp_path, text(one_launch(), **keys))
    assert len(trace.notes) == len(trace.incomplete) == int(noted)


# Memory


def test_a_trace_is_never_held_whole(tmp_path: Path) -> None:
    """Reading 60 MB of text takes a small part of that: of the order of the pieces, whatever their size."""
    row = json.dumps(event("python_function", "train.py(12): forward " + "x" * 3000, 5, 1, Python_id=7))
    path = tmp_path / "large.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [' + ",".join(map(json.dumps, one_launch())))
        for n in range(1, 601):
            rows = [json.dumps({**one, "ts": one["ts"] + 1000 * n}) for one in one_launch()]
            file.write("," + ",".join([row] * 33 + rows))
        written = file.tell()
        file.write("]}")
    assert written > 60_000_000
    for piece_bytes, limit in ((1 << 13, 3_000_000), (1 << 17, 3_000_000), (1 << 20, 10_000_000)):
        tracemalloc.start()
        (trace,) = read_kineto(path, piece_bytes)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(trace.activities) == 601
        assert peak < limit
