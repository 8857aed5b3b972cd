"""Reads one JSON value that is not quite JSON.

The idea: profilers paste names into their output without escaping them, so what is broken is nearly always inside one
string or one value. A value is therefore read as tolerant JSON, else mended first: strings are escaped anew (a string
ends where a quote is followed by what may follow a string), and what is no value at all becomes null.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

UNREADABLE = (ValueError, RecursionError)
"""What reading may raise: JSONDecodeError is a ValueError."""


def _integer(digits: str) -> int | None:
    """None for one of thousands of digits, which Python refuses to read."""
    try:
        return int(digits)
    except ValueError:
        return None


_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal, parse_int=_integer, parse_constant=lambda word: None)
"""Accepts raw control characters, lone surrogates, NaN, Infinity and huge integers (as null); keeps decimals exact."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_STRING_BEGINS = re.compile(r':\s*"')
_STRING_ENDS = re.compile(r'"(?=\s*(?:,\s*"[^"\\]{1,80}"\s*:|[}\]]))')
_BACKSLASH = re.compile(r'(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})|\\')
_QUOTE = re.compile(r'(\\.)|"', re.DOTALL)
_BRACKET = re.compile(rf"{_STRING}|([\[\]{{}}])", re.DOTALL)
_NO_VALUE = re.compile(
    rf"(?P<keep>{_STRING}|(?:true|false|null|NaN|Infinity)\b)"
    r"|(?P<comma>,(?=\s*[}\]]))"
    r"|(?<=:)(?=\s*[,}\]])|(?<![\w.])[-+]?[A-Za-z_][\w./()-]*",
    re.DOTALL,
)

_STEPS = {"{": 1, "[": 1, "}": -1, "]": -1}
_DEEPEST = 64
"""Brackets within brackets that a value may have; what is deeper becomes null."""


def decode_at(text: str, at: int, stop: int) -> tuple[Any, int]:
    """The value that begins at a position and where it ends.

    Raises JSONDecodeError, of which ``pos`` is ``stop`` where more text might have completed the value, or another of
    UNREADABLE.
    """
    if stop == len(text):
        return _DECODER.raw_decode(text, at)
    try:
        value, length = _DECODER.raw_decode(text[at:stop])
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(error.msg, "", at + error.pos) from None
    return value, at + length


def decode_whole(text: str) -> Any:
    """The value that a text consists of. Raises one of UNREADABLE."""
    value, end = _DECODER.raw_decode(text.strip())
    if end < len(text.strip()):
        raise json.JSONDecodeError("text follows the value", text, end)
    return value


def decode_mended(text: str) -> Any:
    """The value that a text consists of once it is mended. Raises one of UNREADABLE."""
    return decode_whole(_escape_anew(_without_depths(text)))


def loads(data: bytes) -> Any:
    """The value of a whole JSON text, mended if need be. Raises one of UNREADABLE, for the text as it was."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        return decode_whole(text)
    except UNREADABLE as error:
        try:
            return decode_mended(text)
        except UNREADABLE:
            raise error from None


def depth_at_end(text: str) -> int:
    """How many more brackets a text opens than it closes, outside of strings."""
    return sum(_STEPS.get(bracket, 0) for bracket in _BRACKET.findall(text))


def _without_depths(text: str) -> str:
    """The same text with null in place of whatever is nested so deeply that decoders refuse it."""
    parts: list[str] = []
    depth = at = 0
    for match in _BRACKET.finditer(text):
        step = _STEPS.get(match[1], 0)
        if step > 0 and depth == _DEEPEST:
            parts += [text[at : match.start()], "null"]
        depth += step
        if step < 0 and depth == _DEEPEST:
            at = match.end()
    return "".join([*parts, text[at:]])


def _escape_anew(text: str) -> str:
    """The same text with stray quotes and backslashes in its strings escaped, and null where a value is no value."""
    parts: list[str] = []
    at = 0
    while (begin := _STRING_BEGINS.search(text, at)) and (end := _STRING_ENDS.search(text, begin.end())):
        value = text[begin.end() : end.start()]
        if "\\" in value:
            value = _BACKSLASH.sub(lambda match: match[1] or r"\\", value)
        if '"' in value:
            value = _QUOTE.sub(lambda match: match[1] or r"\"", value)
        parts += [text[at : begin.end()], value]
        at = end.start()

    def replace(match: re.Match[str]) -> str:
        return match["keep"] or ("" if match["comma"] else "null")

    return _NO_VALUE.sub(replace, "".join([*parts, text[at:]]))
