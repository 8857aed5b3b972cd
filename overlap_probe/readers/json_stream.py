"""Cuts the JSON text of a trace into pieces that can be decoded by themselves.

The idea: the events are the members of one long array, and text that begins at an event and is cut anywhere but after
an event cannot decode: its brackets do not balance, or a string stays open. So cut at the last place that looks like
the end of an event, decode, and if that fails cut earlier; decoding is its own proof. Text that no cut makes decodable
is broken and goes to ``repair.py``, event by event. Neither the whole text nor all events ever exist at one time.

Accepted are an object with ``traceEvents`` among its keys, and a bare array of events.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from overlap_probe.errors import TraceError
from overlap_probe.readers import repair
from overlap_probe.readers.tolerant_json import UNREADABLE, loads

_CUTS = 4
"""Places tried before a piece is salvaged event by event, which always finds the right ones."""

_GAP_BYTES = 64
"""White space and comma between two events that the cutter looks at."""

_OPENING_BYTES = 16
"""Enough to tell what a file is, and to say so."""

_KEYS_BYTES = 1 << 26
"""Text before the events that is kept in memory while they are looked for."""

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*(?=(\S))')

_Event = TypeVar("_Event")


class EventStream(Generic[_Event]):
    """The events of a trace, in pieces.

    Args:
        path: the file, for messages.
        content: its text in pieces of any size.
        decode: decodes ``[event, ...]``; raises msgspec.DecodeError or RecursionError if it cannot.
        convert: makes an event of a JSON object that ``decode`` did not accept.

    After the iteration ``metadata`` holds the other keys of the object, ``mended`` the number of events that had to be
    repaired, and ``lost`` the (byte position, text) of every stretch that could not be read.
    """

    def __init__(
        self,
        path: Path,
        content: Iterator[bytes],
        decode: Callable[[bytes], list[_Event]],
        convert: Callable[[dict[str, Any]], _Event],
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self.mended = 0
        self.lost: list[tuple[int, str]] = []
        self._path, self._content, self._decode, self._convert = path, content, decode, convert
        self._text = b""
        """What was read and not yet given out."""
        self._offset = 0
        """Position of ``_text`` in the file."""
        self._at_end = self._closed = self._bare_array = False

    def __iter__(self) -> Iterator[list[_Event]]:
        """Lists of events, in the order of the file. Raises TraceError for a file that is not a trace or is cut off."""
        self._read_opening()
        while not self._closed:
            events = self._decode_piece()
            if events:
                yield events
            if not self._closed:
                self._read_more()

    # The beginning of the file

    def _read_opening(self) -> None:
        """Advance to the first event."""
        while len(self._text.strip()) < _OPENING_BYTES and not self._at_end:
            self._read_more()
        self._skip(len(codecs.BOM_UTF8) if self._text.startswith(codecs.BOM_UTF8) else 0)
        self._skip(len(self._text) - len(self._text.lstrip()))
        first = self._text[:1]
        if not first:
            raise self._error("there is nothing in it" + (" but white space" if self._offset else ": 0 bytes"))
        self._bare_array = first == b"["
        if self._bare_array:
            self._skip(1)
        elif first == b"{":
            self._read_keys_before()
        else:
            raise self._error(f"it is no JSON trace: it begins with {self._text[:_OPENING_BYTES]!r}")

    def _read_keys_before(self) -> None:
        """Advance past ``"traceEvents": [``; the key counts only where all before it is one object's other keys."""
        while True:
            for match in _EVENTS_KEY.finditer(self._text):
                try:
                    keys = loads(self._text[: match.end()] + b"0}")
                except UNREADABLE:
                    continue
                if match[1] != b"[":
                    raise self._error('"traceEvents" is not a list')
                self.metadata = {key: value for key, value in keys.items() if key != "traceEvents"}
                self._skip(match.end() + 1)
                return
            if self._at_end:
                raise self._no_events_key()
            if len(self._text) > _KEYS_BYTES:
                raise self._error(f"there are no traceEvents in its first {_KEYS_BYTES >> 20} MB")
            self._read_more()

    def _no_events_key(self) -> TraceError:
        try:
            loads(self._text)
        except UNREADABLE as error:
            where = "nested too deeply"
            if isinstance(error, json.JSONDecodeError):
                place = self._offset + len(error.doc[: error.pos].encode("utf-8", "surrogateescape"))
                where = f"broken or cut off at byte {place}"
            return self._error(f"the JSON is {where}, and no traceEvents came before that")
        return self._error("it is JSON but no trace: the key traceEvents is missing")

    # The events

    def _decode_piece(self) -> list[_Event]:
        """All events that can be told apart in what was read; sets ``_closed`` after the last of the file."""
        try:
            events = self._decode_to_close() if self._at_end else self._decode_to_cut()
        except msgspec.ValidationError:  # JSON, but a member of it is not what it should be: no cut can help
            events = None
        return self._salvage() if events is None else events

    def _decode_to_cut(self) -> list[_Event] | None:
        tried = False
        for cut, following in islice(_cuts(self._text), _CUTS):
            if (events := self._try(cut)) is not None:
                self._skip(following)
                return events
            tried = True
        return None if tried else []

    def _decode_to_close(self) -> list[_Event] | None:
        for close, keys in repair.closings(self._text, self._bare_array):
            if (events := self._try(close)) is not None:
                self.metadata |= keys
                self._closed = True
                return events
        return None

    def _try(self, end: int) -> list[_Event] | None:
        """The events before a position, None if that is not where an event ends."""
        try:
            return self._decode(b"[" + self._text[:end] + b"]")
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, RecursionError):
            return None

    def _salvage(self) -> list[_Event]:
        found = repair.salvage(self._text, self._at_end, self._bare_array)
        self.mended += found.mended
        self.lost += [(self._offset + at, text) for at, text in found.lost]
        self._skip(found.used)
        if found.closed:
            self._read_keys_after()
        elif self._at_end:
            raise self._cut_off("the list of events does not end")
        return [self._convert(value) for value in found.objects]

    def _read_keys_after(self) -> None:
        while not self._at_end:
            self._read_more()
        keys = repair.keys_after(self._text[1:], self._bare_array)
        if keys is None:
            if not self._bare_array and not repair.closes_object(self._text[1:]):
                raise self._cut_off("the JSON object does not end")
            self.lost.append((self._offset + 1, self._text[1:].decode(errors="replace")))
        self.metadata |= keys or {}
        self._closed = True

    # The text

    def _read_more(self) -> None:
        """Read as much again as is left over, so that even an event larger than a piece costs linear time."""
        pieces, wanted = [self._text], max(1, len(self._text))
        while wanted > 0 and not self._at_end:
            piece = next(self._content, b"")
            pieces.append(piece)
            wanted -= len(piece)
            self._at_end = not piece
        self._text = b"".join(pieces)

    def _skip(self, count: int) -> None:
        self._text = self._text[count:]
        self._offset += count

    def _cut_off(self, what: str) -> TraceError:
        return self._error(f"the file is cut off at byte {self._offset + len(self._text)}: {what}")

    def _error(self, problem: str) -> TraceError:
        return TraceError(
            self._path, problem, "give a trace of torch.profiler (Kineto JSON) or an Nsight Systems export"
        )


def _cuts(text: bytes) -> Iterator[tuple[int, int]]:
    """Places that look like the end of an event with another one after it, from the last one back.

    Each is (position after the event, position of the next event).
    """
    at = text.rfind(b"{")
    while at > 0:
        window = max(0, at - _GAP_BYTES)
        before = text[window:at].rstrip()
        if before.endswith(b","):
            before = before[:-1].rstrip()
            if before.endswith(b"}"):
                yield window + len(before), at
        at = text.rfind(b"{", 0, at)
