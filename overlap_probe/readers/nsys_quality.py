"""Says what makes a database of Nsight Systems less than the whole truth about a process.

The idea: a kernel launch without a kernel is a row that was lost, whatever the profiler says; and where every launch
has its kernel, a warning that events *might* be missing is disproved. So launches are looked at first (``losses.py``),
and the profiler's own messages are judged by what they show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from overlap_probe.readers.losses import lost_rows
from overlap_probe.readers.nsys_device import Calls, DeviceRows, process_id
from overlap_probe.readers.nsys_nvtx import Names
from overlap_probe.readers.nsys_schema import DIAGNOSTICS, GRAPHS, Database, with_one_of

_WARNING, _ERROR = 2, 3
"""Values of ``ENUM_DIAGNOSTIC_SEVERITY_LEVEL``."""

_KERNEL_LAUNCH = re.compile(r"launch\w*kernel", re.IGNORECASE)

_LOSS = re.compile(
    r"not all\b.*\bcollected|\bdrop|\blost\b|\bloss\b|discard|overflow|truncat|incomplete", re.IGNORECASE
)
_PERHAPS = re.compile(r"\b(?:might|may|could)\b", re.IGNORECASE)
_OF_DEVICES = re.compile(r"\b(?:CUDA|GPU|CUPTI|kernel|device|memcpy|activit)", re.IGNORECASE)
_OF_RANGES = re.compile(r"\bNVTX\b", re.IGNORECASE)
_OF_NEITHER = re.compile(r"OS runtime|\bCPU\b|sampl|context switch|backtrace|call ?stack|scheduling", re.IGNORECASE)


@dataclass(slots=True)
class Notes:
    """What ``Trace.notes`` and ``Trace.incomplete`` will say."""

    all: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def add(self, note: str, rows_missing: bool = False) -> None:
        """Add a note; ``rows_missing`` says that device rows are missing, so that no check may pass."""
        self.all.append(note)
        if rows_missing:
            self.incomplete.append(note)

    def copy(self) -> Notes:
        return Notes(self.all.copy(), self.incomplete.copy())


@dataclass(frozen=True, slots=True)
class Message:
    """A warning or an error of the profiler that speaks of lost events."""

    text: str
    process: int
    """``globalPid``; one without a process id is the profiler's own and concerns all."""


class Quality:
    """Judges a file, one process at a time."""

    def __init__(self, database: Database, calls: Calls, rows: DeviceRows, names: Names) -> None:
        text_of = database.texts(np.unique(calls.name).tolist())
        self._calls, self._rows = calls, rows
        self._call_name = names.codes(calls.name, lambda i: text_of.get(i, ""))
        self._names = tuple(names)
        self._messages = tuple(_messages(database))
        graphs = database.numbers(GRAPHS, "globalPid", "deviceId")
        self.graphs = Counter(zip(graphs["globalPid"].tolist(), graphs["deviceId"].tolist(), strict=True))
        """Launches of CUDA graphs of which only the whole is recorded, by (``globalPid``, device)."""
        launch = np.array([bool(_KERNEL_LAUNCH.search(name)) for name in self._names], np.bool_)[self._call_name]
        launch &= (calls.correlation > 0) & ~np.isin(calls.process, rows.process)
        self.silent = Counter(calls.process[launch].tolist())
        """Kernel launches of each process (``globalPid``) that launched some and has no device row at all."""

    def of_process(self, process: int) -> Notes:
        """Notes on lost launches, and on the profiler's messages that these do not disprove."""
        notes = Notes()
        mine = self._calls.process == process
        calls = {
            "name": self._call_name[mine],
            "correlation": self._calls.correlation[mine],
            "start_ns": self._calls.start_ns[mine],
        }
        activities = {"correlation": self._rows.correlation[self._rows.process == process]}
        lost = lost_rows(calls, activities, self._names, left_out=0)
        if lost:
            notes.add(lost, rows_missing=True)
        nothing_lost = not lost and bool(np.isin(activities["correlation"], calls["correlation"]).any())
        said = (m.text for m in self._messages if m.process == process or not process_id(m.process))
        for text in dict.fromkeys(said):
            only_ranges = _OF_RANGES.search(text) and not _OF_DEVICES.search(text)
            disproved = _PERHAPS.search(text) and nothing_lost
            notes.add(f"Nsight Systems says: {text}", rows_missing=not only_ranges and not disproved)
        return notes


def _messages(database: Database) -> Iterator[Message]:
    for _, process, text in database.rows(DIAGNOSTICS, with_one_of(severity=(_WARNING, _ERROR))):
        if is_about_loss(text or ""):
            yield Message(" ".join(text.split()), process)


def is_about_loss(text: str) -> bool:
    """Whether a message of the profiler says that events of devices or ranges are, or may be, missing."""
    return bool(_LOSS.search(text)) and not _OF_NEITHER.search(text)
