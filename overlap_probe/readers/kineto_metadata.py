"""Reads what a Kineto trace says about itself beside its events: rank, process groups, devices.

The idea: these keys were added one after another and are all optional, so each is taken if it has the right shape and
otherwise it is as if it were not there.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_probe.run_queue import METADATA_KEY
from overlap_probe.tables import Device, Waits

_NUMBER = re.compile(r"\s*\d{1,19}\s*", re.ASCII)
_LARGEST = 2**63 - 1
_MOST_OVERLAPPING = 3
"""Of one thread's waits at one moment: `run_queue` sees a wait only when it ends, and dates it back to before the last
look, at most to the one before that, whose time it may have noted late."""

_RANK_IN_NAME = re.compile(r"(?<![a-z])(?<!local[_-])(?<!local)rank[_\-. ]?(\d+)(?!\d)", re.IGNORECASE)


def rank_of(metadata: dict[str, Any], path: Path) -> int | None:
    """The rank that the trace says, else the one that the file's name says (``rank0``, ``rank-0``, ``rank_0``)."""
    rank = _number(_dict(metadata.get("distributedInfo")).get("rank"))
    if rank is not None:
        return rank
    in_name = {_number(digits) for digits in _RANK_IN_NAME.findall(path.name)}
    return in_name.pop() if len(in_name) == 1 else None


def world_size_of(metadata: dict[str, Any]) -> int | None:
    return _number(_dict(metadata.get("distributedInfo")).get("world_size"))


def groups_of(metadata: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group, by its name."""
    groups: dict[str, tuple[int, ...]] = {}
    config = _dict(metadata.get("distributedInfo")).get("pg_config")
    for entry in config if isinstance(config, list) else []:
        ranks = _dict(entry).get("ranks")
        if isinstance(ranks, str):
            try:
                ranks = json.loads(ranks)
            except (ValueError, RecursionError):
                continue
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks) and "pg_name" in entry:
            groups[str(entry["pg_name"])] = tuple(ranks)
    return groups


def device_of(metadata: dict[str, Any], index: int | None) -> Device:
    """What the trace says about the device with that index."""
    devices = metadata.get("deviceProperties")
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and index is not None and _number(device.get("id")) == index:
            name = device.get("name")
            return Device(
                name=name if isinstance(name, str) else None,
                sms=_number(device.get("numSms")),
                registers_per_sm=_number(device.get("regsPerMultiprocessor")),
                shared_bytes_per_sm=_number(
                    device.get("sharedMemPerMultiprocessor", device.get("maxSharedMemoryPerMultiProcessor"))
                ),
                threads_per_sm=_number(device.get("maxThreadsPerMultiprocessor")),
            )
    return Device()


def recorded_waits(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a capture of ours wrote of the threads' waits for a core (`run_queue`), where it has the right shape.

    ``process``, and in ``waits`` by the thread's number a list of [start, end, waited], ns; empty without a process.
    """
    said = _dict(metadata.get(METADATA_KEY))
    process = _number(said.get("process"))
    waits = {
        thread: [list(wait) for wait in some if _is_wait(wait)]
        for thread, some in _dict(said.get("waits")).items()
        if _number(thread) is not None and isinstance(some, list)
    }
    return {"process": process, "waits": waits} if process is not None else {}


def waits_of(
    metadata: dict[str, Any], threads: Mapping[tuple[Any, Any], int], first_ns: int, last_ns: int
) -> tuple[Waits, tuple[str, ...]]:
    """The waits of the threads of the trace, by their codes, on the trace's own clock; those of others are left out.

    So is, with a note, what is no wait, and what cannot be one in a trace that lasts from ``first_ns`` to ``last_ns``:
    waits would excuse a failure (`starvation`).
    """
    said = recorded_waits(metadata)
    base_ns = _number(metadata.get("baseTimeNanoseconds")) or 0
    rows: list[tuple[int, int, int, int]] = []
    contradictory = 0
    for thread, some in said.get("waits", {}).items():
        if (code := threads.get((said["process"], _number(thread)))) is not None:
            waits = [(start - base_ns, end - base_ns, waited) for start, end, waited in some]
            possible = _possible(waits, first_ns, last_ns)
            contradictory += len(waits) - len(possible)
            rows += [(*wait, code) for wait in possible]
    start_ns, end_ns, waited_ns, thread_code = zip(*rows, strict=True) if rows else ((), (), (), ())
    table: Waits = Waits.from_columns(
        len(rows), start_ns=start_ns, end_ns=end_ns, thread=thread_code, waited_ns=waited_ns
    )
    malformed = _waits_written(metadata.get(METADATA_KEY)) - sum(map(len, said.get("waits", {}).values()))
    counted = {
        "are not [start, end, waited] in ns of a thread": malformed,
        "contradict each other or the trace": contradictory,
    }
    return table, tuple(
        f"recorded waits for a core that {why} are left out: {count}" for why, count in counted.items() if count
    )


def _waits_written(said: Any) -> int:
    """How many waits there should be; whatever is no list stands for one."""
    if said is None:
        return 0
    waits = _dict(said).get("waits")
    return sum(len(some) if isinstance(some, list) else 1 for some in waits.values()) if isinstance(waits, dict) else 1


def _possible(waits: Sequence[tuple[int, int, int]], first_ns: int, last_ns: int) -> list[tuple[int, int, int]]:
    """Those of a thread's waits, in order of time, that can be true of it beside each other and beside the trace.

    It is recorded from within the trace, so none is all before, all after or all around it.
    """
    possible: list[tuple[int, int, int]] = []
    ends = deque([-_LARGEST] * _MOST_OVERLAPPING, _MOST_OVERLAPPING)
    for start, end, waited in sorted(waits, key=lambda wait: (wait[1], wait[0])):
        outside = end <= first_ns or start >= last_ns or (start <= first_ns and end >= last_ns)
        if not outside and start >= ends[0]:
            possible.append((start, end, waited))
            ends.append(end)
    return possible


def _is_wait(value: Any) -> bool:
    """Start, end and the time waited between them."""
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(number, int) for number in value):
        return False
    if any(_number(number) is None for number in value):
        return False
    start, end, waited = value
    return bool(start + waited <= end)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    """A number of 63 bits that is not negative, or the text of one."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None
