"""The cutter gives the same events however the text arrives, and says where a text that is no trace goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_probe.errors import TraceError
from overlap_probe.readers.json_stream import EventStream

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(alphabet='ab{}[]",:\\\n\u00e9\u20ac', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_EVENTS = st.lists(st.dictionaries(st.sampled_from(["name", "ph", "args", "x"]), _VALUES, max_size=3), max_size=12)
_KEYS = st.dictionaries(st.sampled_from(["a", "b", "deviceProperties", "traceEvent"]), _VALUES, max_size=3)


def _decode(piece: bytes) -> list[dict[str, Any]]:
    return msgspec.json.decode(piece, type=list[dict[str, Any]])


def _stream(content: bytes, piece: int) -> EventStream[dict[str, Any]]:
    def pieces() -> Iterator[bytes]:
        yield from (content[at : at + piece] for at in range(0, len(content), piece))

    return EventStream(Path("trace.json"), pieces(), _decode, lambda value: value)


def _read(content: str | bytes, piece: int = 1 << 20) -> tuple[list[dict[str, Any]], EventStream[dict[str, Any]]]:
    stream = _stream(content.encode() if isinstance(content, str) else content, piece)
    return [event for events in stream for event in events], stream


@given(_EVENTS, _KEYS, _KEYS, st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_piece_size_gives_the_events_and_keys_of_the_json(
    events: list[Any], before: dict[str, Any], after: dict[str, Any], piece: int, indent: int | None, ascii_only: bool
) -> None:
    after = {f"{key}2": value for key, value in after.items()}
    whole = {**before, "traceEvents": events, **after}
    read, stream = _read(json.dumps(whole, indent=indent, ensure_ascii=ascii_only), piece)
    assert read == events
    assert stream.metadata == {**before, **after}
    assert stream.mended == 0
    assert stream.lost == []


@given(_EVENTS, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_bare_array_of_events_is_a_trace(events: list[Any], piece: int) -> None:
    read, stream = _read(json.dumps(events), piece)
    assert read == events
    assert stream.metadata == {}


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_what_looks_like_an_event_inside_a_string_or_in_args_is_not_one(piece: int) -> None:
    events = [
        {"name": 'x"}, {"name": "y', "args": {"list": [{"name": 1}, {"name": 2}, {"a": {}}]}},
        {"name": "}, {", "args": {}},
        {"name": "]}", "args": {"text": '], "traceEvents": [{'}},
    ]
    assert _read(json.dumps({"note": '"traceEvents": [', "traceEvents": events}), piece)[0] == events


def test_the_key_counts_only_at_the_top_of_the_object() -> None:
    whole = {"nested": {"traceEvents": [{"name": "wrong"}]}, "traceEvents": [{"name": "right"}]}
    read, stream = _read(json.dumps(whole))
    assert read == [{"name": "right"}]
    assert stream.metadata == {"nested": {"traceEvents": [{"name": "wrong"}]}}


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_white_space_a_byte_order_mark_and_long_gaps_do_not_matter(piece: int) -> None:
    gap = "\n" * 500
    content = f'\ufeff \n{{ "a" : 1 ,{gap}"traceEvents" :{gap}[ {{"x": 1}}{gap},{gap}{{"x": 2}} ] }}\n \n'
    read, stream = _read(content, piece)
    assert read == [{"x": 1}, {"x": 2}]
    assert stream.metadata == {"a": 1}


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_members_that_are_not_objects_are_skipped(piece: int) -> None:
    content = '{"traceEvents": [{"x": 1}, null, 12, "text", [{"x": 9}], true, {"x": 2}], "a": 3}'
    read, stream = _read(content, piece)
    assert read == [{"x": 1}, {"x": 2}]
    assert stream.metadata == {"a": 3}


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_missing_and_surplus_commas_lose_no_event(piece: int) -> None:
    content = '{"traceEvents": [{"ph": "X", "x": 1},, {"ph": "X", "x": 2} {"ph": "X", "x": 3},]}'
    assert [event["x"] for event in _read(content, piece)[0]] == [1, 2, 3]


def test_every_truncation_is_reported_with_the_length_of_the_file() -> None:
    content = json.dumps({"a": [1], "traceEvents": [{"x": 1, "y": "}, {"}, {"x": [2]}], "b": [{}]}).encode()
    first_event = content.index(b"[{") + 1
    for length in range(first_event, len(content)):
        for piece in (5, 1 << 20):
            with pytest.raises(TraceError, match=rf"trace\.json: the file is cut off at byte {length}\b"):
                _read(content[:length], piece)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b" \n\t ", "nothing in it but white space"),
        (b"null", "no JSON trace: it begins with b'null'"),
        (b"PK\x03\x04rest", "no JSON trace"),
        (b"{}", "traceEvents is missing"),
        (b'{"events": [{"name": "x"}]}', "traceEvents is missing"),
        (b'{"traceEvents": null}', '"traceEvents" is not a list'),
        (b'{"traceEvents": {"a": 1}}', '"traceEvents" is not a list'),
        (b'{"a": [1, 2', r"cut off at byte 1\d, and no traceEvents"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply, and no traceEvents"),
    ],
)
@pytest.mark.parametrize("piece", [4, 1 << 20])
def test_what_is_no_trace_is_refused_with_the_reason(content: bytes, message: str, piece: int) -> None:
    if len(content) > 1000 and piece < 1000:
        piece = 1000
    with pytest.raises(TraceError, match=message):
        _read(content, piece)


def test_keys_that_are_nested_too_deeply_cost_only_themselves() -> None:
    deep = "[" * 200_000 + "]" * 200_000
    read, stream = _read(f'{{"a": {{"b": {deep}}}, "c": 1, "traceEvents": [{{"x": 1}}], "d": {deep}, "e": 2}}')
    assert read == [{"x": 1}]
    assert (stream.metadata["c"], stream.metadata["e"], stream.lost) == (1, 2, [])


def test_stray_backslashes_and_quotes_in_the_keys_beside_the_events_are_mended() -> None:
    content = r"""{"a": "C:\x\model "b"", "traceEvents": [{"x": 1}], "traceName": "D:\dir\", "c": N/A}"""
    read, stream = _read(content)
    assert read == [{"x": 1}]
    assert stream.metadata == {"a": r'C:\x\model "b"', "traceName": "D:\\dir\\", "c": None}


def test_keys_after_the_events_that_are_broken_are_reported() -> None:
    read, stream = _read('{"traceEvents": [{"x": 1}], "name": oops "b" }')
    assert read == [{"x": 1}]
    assert stream.lost == [(26, ', "name": oops "b" }')]
