"""Tells the events of a broken trace apart, and says what could not be read.

The idea: read event by event, and where one cannot be read believe the text after it instead: a broken event ends where
the text next looks like the beginning of another. Whatever is mended or given up is counted, never hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from overlap_probe.readers.tolerant_json import (
    UNREADABLE,
    decode_at,
    decode_mended,
    depth_at_end,
    loads,
)

_BETWEEN = re.compile(r"[\s,]*")
_AFTER_EVENT = re.compile(r"\s*(?:[,\]{]|$)")
_AFTER_LAST = re.compile(r"[\s,]*\]")
_NEXT_EVENT = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|bp|s|args)"\s*:)')

_ATTEMPTS = 3
"""Beginnings of a next event that are tried as the end of a broken one."""

_CLOSINGS = 16
"""Brackets that are tried as the end of the array."""

_ENOUGH_BYTES = 1 << 18
"""An event counts as broken, not as cut by the end of the piece, only with so much text behind its beginning."""

_READ, _MENDED, _LOST, _UNFINISHED = range(4)


@dataclass
class Salvage:
    """What could be read of a text of events."""

    objects: list[dict[str, Any]] = field(default_factory=list)
    mended: int = 0
    lost: list[tuple[int, str]] = field(default_factory=list)
    """(byte position in the text, text) of every event that is given up."""
    used: int = 0
    """Bytes that need not be looked at again."""
    closed: bool = False
    """Whether ``used`` is the position of the bracket that closes the array."""


def salvage(data: bytes, at_end: bool, bare_array: bool) -> Salvage:
    """Read the events of ``data``, which begins at (or between) events of the array and may end inside one.

    ``at_end`` says that nothing follows in the file, ``bare_array`` that nothing may follow the array.
    """
    text = data.decode("utf-8", "surrogateescape")
    result = Salvage()
    at = counted = 0
    while True:
        at = _skip(_BETWEEN, text, at)
        result.used += len(text[counted:at].encode("utf-8", "surrogateescape"))
        counted = at
        if at == len(text) or text[at] == "]":
            result.closed = at < len(text)
            return result
        value, end, state = _read_one(text, at, at_end, bare_array)
        if state == _UNFINISHED:
            return result
        if state == _LOST:
            result.lost.append((result.used, text[at:end]))
        result.mended += state == _MENDED
        if isinstance(value, dict):
            result.objects.append(value)
        elif value is not None and end == len(text) and not at_end:
            return result  # a bare number may go on in the next piece
        at = end


def keys_after(rest: bytes, bare_array: bool) -> dict[str, Any] | None:
    """The keys that follow the array of events, if ``rest`` is all that follows its bracket; None if it is not that."""
    if bare_array:
        return None if rest.strip() else {}
    try:
        keys = loads(b'{"":0' + rest)
    except UNREADABLE:
        return None
    return {key: value for key, value in keys.items() if key}


def closes_object(rest: bytes) -> bool:
    """Whether the object that the array of events is in is closed after it, were it only by its brackets."""
    return depth_at_end("{" + rest.decode("latin-1")) <= 0


def closings(data: bytes, bare_array: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Brackets that may close the array of events, from the last one back: position, and the keys that follow it."""
    at = len(data)
    for _ in range(_CLOSINGS):
        at = data.rfind(b"]", 0, at)
        if at < 0:
            return
        keys = keys_after(data[at + 1 :], bare_array)
        if keys is not None:
            yield at, keys


def clean(text: str) -> str:
    """The text with every half of a surrogate pair, and every byte that is not UTF-8, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_one(text: str, at: int, at_end: bool, bare_array: bool) -> tuple[Any, int, int]:
    """The value at a position, where it ends, and what had to be done to read it."""
    ends = _possible_ends(text, at, at_end, bare_array)
    first = next(ends, None)
    value, end, goes_on = _decode(text, at, len(text) if first is None else first)
    if goes_on and first is not None:  # what looks like the next event lies inside this one
        value, end, _ = _decode(text, at, len(text))
    if end >= 0 and (first in (None, end) or not _AFTER_LAST.match(text, end)):
        return value, end, _READ
    if end < 0 and not at_end and len(text) - at < _ENOUGH_BYTES:
        return None, -1, _UNFINISHED
    # It is broken, or it ends the array but further events seem to follow: then it may be part of a broken name.
    for stop in [] if first is None else [first, *ends]:
        try:
            return decode_mended(text[at:stop]), stop, _MENDED
        except UNREADABLE:
            continue
    if end >= 0:
        return value, end, _READ
    return (None, -1, _UNFINISHED) if first is None else (None, first, _LOST)


def _decode(text: str, at: int, stop: int) -> tuple[Any, int, bool]:
    """The JSON value at a position and its end, -1 if it is none; then also whether it may go on beyond ``stop``."""
    try:
        value, end = decode_at(text, at, stop)
    except json.JSONDecodeError as error:
        return None, -1, error.pos >= stop
    except UNREADABLE:
        return None, -1, False
    return (value, end, False) if _AFTER_EVENT.match(text, end) else (None, -1, False)


def _possible_ends(text: str, at: int, at_end: bool, bare_array: bool) -> Iterator[int]:
    """Where the event at a position may end: before what looks like another one, or for the last one before "]"."""
    none = True
    for match in islice(_NEXT_EVENT.finditer(text, at), _ATTEMPTS):
        none = False
        yield match.start() + 1
    if none and at_end:
        data = text[at:].encode("utf-8", "surrogateescape")
        for close, _ in closings(data, bare_array):
            if event := data[:close].decode("utf-8", "surrogateescape").rstrip(" \t\r\n,"):
                yield at + len(event)


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
