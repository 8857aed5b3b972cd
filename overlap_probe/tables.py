"""The tables that a Trace consists of, validated once at the reader's edge.

The idea: a reader resolves everything that is peculiar to its format (which call launched a kernel, on which host
thread, on behalf of which operation) and hands over plain columns; no code after it knows which profiler was used.
All columns are numpy arrays of equal length; texts are codes into ``Trace.names``. Times are integer nanoseconds of one
clock (int64), intervals are half-open. A number that the trace does not have is ``NO_TIME`` (times) or -1 (all others).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

NO_TIME = np.iinfo(np.int64).min
"""Stands for a time that the trace does not record."""

KERNEL, MEMCPY, MEMSET, OPERATOR, CPU_COLLECTIVE = range(5)
"""Values of ``Activities.kind``; the last two stand for device work on a CPU-only timeline (design, section 3)."""

I64: TypeAlias = npt.NDArray[np.int64]
I32: TypeAlias = npt.NDArray[np.int32]
I8: TypeAlias = npt.NDArray[np.int8]
Bool: TypeAlias = npt.NDArray[np.bool_]

_DTYPES: dict[str, type[np.generic]] = {"I64": np.int64, "I32": np.int32, "I8": np.int8}


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length; ``len`` is the number of rows."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def validate(self) -> None:
        """Raise ValueError unless every column has its dtype, one dimension and the same length."""
        for column in fields(self):
            values, want = getattr(self, column.name), _DTYPES[str(column.type)]
            if values.dtype != want or values.ndim != 1 or len(values) != len(self):
                found = f"{values.dtype}{values.shape}"
                raise ValueError(f"{type(self).__name__}.{column.name}: {found}, wanted {want.__name__}[{len(self)}]")

    def take(self, rows: npt.NDArray[Any]) -> Any:
        """The same table with only the rows that an index array or a mask selects, in that order."""
        return replace(self, **{c.name: getattr(self, c.name)[rows] for c in fields(self)})

    @classmethod
    def from_columns(cls, rows: int, **columns: Any) -> Any:
        """A table of ``rows`` rows; columns that are not given are filled with NO_TIME (``*_ns``) or -1."""
        known = {c.name: _DTYPES[str(c.type)] for c in fields(cls)}
        if unknown := set(columns) - set(known):
            raise ValueError(f"{cls.__name__} has no column {sorted(unknown)}")
        made: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in known.items():
            absent = NO_TIME if name.endswith("_ns") else -1
            made[name] = np.asarray(columns[name], dtype) if name in columns else np.full(rows, absent, dtype)
        return cls(**made)


@dataclass(frozen=True, slots=True)
class Activities(Table):
    """What ran on the device: a row a kernel, copy or memset, sorted by (start_ns, end_ns)."""

    start_ns: I64
    end_ns: I64
    name: I32
    """Code of the name into ``Trace.names``."""
    kind: I8
    """KERNEL, MEMCPY, MEMSET, OPERATOR or CPU_COLLECTIVE."""
    stream: I64
    launch_ns: I64
    """Start of the host call that launched it (by correlation, never by the call's name)."""
    returned_ns: I64
    """End of that call: until then the host is still at it."""
    launch_thread: I32
    """Code of the host thread of that call (the operation's, where no call is known); the key of Ranges.thread."""
    operation: I32
    """Row in Operations of the operation that launched it (same External id); -1 where none is known."""
    collective: I32
    """Code of the ``Collective name`` that the row's own args carry."""
    blocks: I64
    """Thread blocks in the grid (product of its dimensions)."""
    threads: I32
    """Threads in a block."""
    registers: I32
    """Registers a thread."""
    shared_bytes: I64
    """Shared memory a block, bytes."""
    bytes: I64
    """Bytes that a copy or memset moves."""
    source: I32
    """Device that a copy reads; -1 for the host or unknown."""
    target: I32
    """Device that a copy writes; -1 for the host or unknown."""


@dataclass(frozen=True, slots=True)
class Operations(Table):
    """Host operations (``aten::mm``, ``record_param_comms``, ...), in the order of (start_ns, -end_ns)."""

    start_ns: I64
    end_ns: I64
    name: I32
    thread: I32
    collective: I32
    """Code of the args' ``Collective name``."""
    group: I32
    """Code of ``Process Group Name``."""
    sequence: I64
    """Position of the call in its process group (args ``Seq``)."""
    shapes: I32
    """Code of the text of the input shapes (args ``Input Dims``)."""
    bytes: I64
    """Output bytes of a collective call, where its args say element count and dtype."""


@dataclass(frozen=True, slots=True)
class Ranges(Table):
    """Named host ranges (record_function, NVTX), in the order of (start_ns, -end_ns).

    A range whose end the trace does not have ends at the last time of the trace.
    """

    start_ns: I64
    end_ns: I64
    name: I32
    thread: I32


@dataclass(frozen=True, slots=True)
class Waits(Table):
    """When host threads were ready to run and had no core, where the capture recorded that (`run_queue`)."""

    start_ns: I64
    end_ns: I64
    thread: I32
    """As in Ranges."""
    waited_ns: I64
    """How long, somewhere between start and end."""


@dataclass(frozen=True, slots=True)
class SmSamples(Table):
    """How busy the device's SMs were, where the profiler sampled that; sorted by time."""

    time_ns: I64
    percent: I64
    """Share of the SMs that had work."""


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of the device: its name and number of SMs (None where the trace does not say)."""

    name: str | None = None
    sms: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
    threads_per_sm: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's timeline: one process on one device.

    ``notes`` say, in plain words, what makes the numbers less than certain (dropped rows, repaired JSON, ...);
    a trace with notes is of quality ``degraded``. ``incomplete`` are those of the notes after which no check may pass:
    device rows are missing from the timeline.
    """

    path: str
    format: str
    """``kineto`` or ``nsys``."""
    names: tuple[str, ...]
    activities: Activities
    operations: Operations
    ranges: Ranges
    rank: int | None = None
    world_size: int | None = None
    device: Device = field(default_factory=Device)
    process: int | None = None
    """Process id, only where a file holds several processes or devices."""
    device_index: int | None = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each process group, by its name."""
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    waits: Waits = field(default_factory=lambda: Waits.from_columns(0))
    sm_samples: SmSamples = field(default_factory=lambda: SmSamples.from_columns(0))

    def validate(self) -> None:
        """Raise ValueError where a column is malformed, a code points nowhere, or an activity ends before it starts."""
        for table in (self.activities, self.operations, self.ranges):
            table.validate()
            if len(table) and (table.end_ns < table.start_ns).any():
                raise ValueError(f"{type(table).__name__}: a row ends before it starts")
            if len(table) and not (table.name.min() >= 0 and table.name.max() < len(self.names)):
                raise ValueError(f"{type(table).__name__}.name: a code outside of Trace.names")
        self.waits.validate()
        self.sm_samples.validate()
        if (np.diff(self.sm_samples.time_ns) < 0).any():
            raise ValueError("SmSamples: not sorted by time_ns")
        if len(self.activities) and self.activities.operation.max() >= len(self.operations):
            raise ValueError("Activities.operation: a row outside of Operations")
        if (np.diff(self.activities.start_ns) < 0).any():
            raise ValueError("Activities: not sorted by start_ns")
