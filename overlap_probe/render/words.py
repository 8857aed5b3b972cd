"""How a number, a name and a path are written for people.

The idea: whatever a trace contains passes through one of these functions before it reaches a terminal, a page or an XML
reader, so that no renderer meets an unprintable character, a folder of somebody's machine, or a 0 / 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from overlap_probe.units import ABSENT, duration

__all__ = [
    "ABSENT",
    "clean",
    "duration",
    "file_name",
    "milliseconds",
    "number",
    "percent",
    "plural",
    "typeset",
    "without_folders",
]

_FOLDERS = re.compile(
    r"""(?<![\w./\\~<])                      # a path begins here, not inside of a word
        (?:[A-Za-z]:[\\/]|\\\\|~?/|\.{1,2}[\\/])   # C:\  \\server  /  ~/  ./  ../
        (?:[^\s"'<>|:,;()\[\]\\/]+[\\/]+)*""",
    re.VERBOSE,
)


def clean(text: str) -> str:
    """The text on one line: control characters, lone surrogates and other unprintables as their escapes (``\\x1b``)."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def file_name(path: str) -> str:
    """The last part of a path of any system, cleaned; never a folder."""
    return clean(re.split(r"[\\/]", path.rstrip("\\/"))[-1]) or ABSENT


def without_folders(text: str, paths: Iterable[str] = ()) -> str:
    """The text, cleaned, with every path in it cut down to its file name; ``paths`` are those known to occur."""
    for path in sorted(filter(None, paths), key=len, reverse=True):
        text = text.replace(path, file_name(path))
    return _FOLDERS.sub("", clean(text))


def milliseconds(ns: int) -> str:
    """``19.240``: one unit for a whole column of moments."""
    return f"{ns / 1e6:.3f}"


def percent(part: int | None, whole: int) -> str:
    """``25.1 %``; ``-`` where there is no whole to be a part of. Never rounds up to 100 % or down to 0 %."""
    if part is None or whole <= 0:
        return ABSENT
    value = 100 * part / whole
    if 0 < value < 0.05:
        return "<0.1 %"
    if 99.95 <= value < 100:
        return ">99.9 %"
    return f"{value:.1f} %"


def typeset(text: str) -> str:
    """The text as a page sets it: a number keeps its unit beside it on the line, and ``us`` is ``µs``."""
    return re.sub(r"(?<=\d) (ns|us|ms|s|%)(?!\w)", lambda unit: "\u00a0" + unit[1].replace("u", "µ"), text)


def number(value: int | None) -> str:
    """The integer, or ``-`` for None."""
    return ABSENT if value is None else str(value)


def plural(count: int, noun: str) -> str:
    """``1 window``, ``2 windows``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
