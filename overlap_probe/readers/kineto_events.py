"""Says what an event of a Kineto trace looks like, and which part each category plays.

The idea: the decoder builds only what the analysis needs, straight into slots, and skips the rest of the text; whatever
does not have these types is not decoded here but salvaged (``repair.py``) into the same objects.

Times are microseconds. A float64 holds them to the nanosecond only below 2**43 (its steps there are 2**-10 us, less
than the 0.001 that is written), so ``Event`` refuses larger ones and ``ExactEvent`` keeps the decimal text.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw, field

from overlap_probe.readers.repair import clean

ACTIVITY, CALL, OPERATION, RANGE = range(4)
"""Parts that an event can play: device activity, call of the runtime or driver, host operation, named host range."""

_PARTS = {
    "kernel": ACTIVITY,
    "concurrent_kernel": ACTIVITY,
    "gpu_memcpy": ACTIVITY,
    "memcpy": ACTIVITY,
    "gpu_memset": ACTIVITY,
    "memset": ACTIVITY,
    "cpu_op": OPERATION,
    "operator": OPERATION,
    "user_annotation": RANGE,
}

Microseconds: TypeAlias = Annotated[float, Meta(gt=-(2.0**43), lt=2.0**43)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Args(msgspec.Struct, gc=False, frozen=True):
    """Those ``args`` of an event that the analysis needs; -1, 0 (for identifiers) or "" where they are absent."""

    external_id: Int64 = field(name="External id", default=0)
    device: Int32 = -1
    stream: Int64 = -1
    correlation: Int64 = 0
    registers: Int32 = field(name="registers per thread", default=-1)
    shared_bytes: Int64 = field(name="shared memory", default=-1)
    grid: tuple[Int32, ...] = ()
    block: tuple[Int32, ...] = ()
    bytes: Int64 = -1
    from_device: Int32 = field(name="fromDevice", default=-1)
    in_device: Int32 = field(name="inDevice", default=-1)
    to_device: Int32 = field(name="toDevice", default=-1)
    collective: str = field(name="Collective name", default="")
    group: str = field(name="Process Group Name", default="")
    sequence: Int64 = field(name="Seq", default=-1)
    elements: Int64 = field(name="Out msg nelems", default=-1)
    dtype: str = ""
    shapes: Raw = field(name="Input Dims", default=Raw())
    older_external_id: Int64 = field(name="external id", default=0)


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event; ``ts`` and ``dur`` are microseconds below 2**43, NaN where they are absent.

    The phase (``ph``) is not needed: of the categories that play a part only complete events exist.
    """

    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Microseconds = math.nan
    dur: Microseconds = math.nan
    args: Args = NO_ARGS


class ExactEvent(Event, gc=False):
    """One event whose times are the decimal text: any size, any number of digits, in quotes or not."""

    ts: Decimal = Decimal("NaN")  # type: ignore[assignment]
    dur: Decimal = Decimal("NaN")  # type: ignore[assignment]


def event_of(raw: dict[str, Any]) -> ExactEvent:
    """An event made of a decoded JSON object, leaving out every field whose value cannot be what it should be."""
    args = raw.get("args")
    fields = _fitting(raw, _EVENT_FIELDS)
    if isinstance(args, dict):
        fields["args"] = Args(**_fitting(args, _ARGS_FIELDS))
    return ExactEvent(**fields)


def _fitting(raw: dict[str, Any], known: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    for key in known.keys() & raw.keys():
        name, kind = known[key]
        try:
            if kind is Raw:
                fitting[name] = Raw(msgspec.json.encode(raw[key]))
            else:
                value = msgspec.convert(raw[key], kind, strict=False)
                fitting[name] = clean(value) if isinstance(value, str) else value
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError):
            continue
    return fitting


def part_of(category: str) -> int | None:
    """The part that events of a category play, None for none; categories changed their spelling over the years."""
    spelling = category.strip().lower().replace(" ", "_")
    if spelling.endswith(("runtime", "driver")):  # cuda_runtime, cuda_driver, hip_runtime, xpu_runtime, Runtime, ...
        return CALL
    return _PARTS.get(spelling)


_EVENT_FIELDS = {f.encode_name: (f.name, f.type) for f in msgspec.structs.fields(ExactEvent) if f.name != "args"}
_ARGS_FIELDS = {f.encode_name: (f.name, f.type) for f in msgspec.structs.fields(Args)}
