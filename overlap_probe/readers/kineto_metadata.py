"""Reads what a Kineto trace says about itself beside its events: rank, process groups, devices.

The idea: these keys were added one after another and are all optional, so each is taken if it has the right shape and
otherwise it is as if it were not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_probe.run_queue import METADATA_KEY
from overlap_probe.tables import Device, Waits

_RANK_IN_NAME = re.compile(r"(?<![a-z])(?<!local[_-])(?<!local)rank[_\-. ]?(\d+)(?!\d)", re.IGNORECASE)


def rank_of(metadata: dict[str, Any], path: Path) -> int | None:
    """The rank that the trace says, else the one that the file's name says (``rank0``, ``rank-0``, ``rank_0``)."""
    rank = _number(_dict(metadata.get("distributedInfo")).get("rank"))
    if rank is not None:
        return rank
    in_name = {int(digits) for digits in _RANK_IN_NAME.findall(path.name)}
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
            except ValueError:
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
    """What a capture of ours wrote of the threads' waits for a core (`run_queue`), as it stands; empty without it."""
    said = _dict(metadata.get(METADATA_KEY))
    process = _number(said.get("process"))
    waits = {
        thread: [list(wait) for wait in some if _is_wait(wait)]
        for thread, some in _dict(said.get("waits")).items()
        if thread.isdecimal() and isinstance(some, list)
    }
    return {"process": process, "waits": waits} if process is not None else {}


def waits_of(metadata: dict[str, Any], threads: Mapping[tuple[Any, Any], int]) -> Waits:
    """The waits of the threads of the trace, by their codes, on the trace's own clock; those of others are left out."""
    said = recorded_waits(metadata)
    base_ns = _number(metadata.get("baseTimeNanoseconds")) or 0
    rows = [
        (start - base_ns, end - base_ns, threads[key], waited)
        for thread, some in said.get("waits", {}).items()
        if (key := (said["process"], int(thread))) in threads
        for start, end, waited in some
    ]
    start_ns, end_ns, thread_code, waited_ns = zip(*rows, strict=True) if rows else ((), (), (), ())
    waits: Waits = Waits.from_columns(
        len(rows), start_ns=start_ns, end_ns=end_ns, thread=thread_code, waited_ns=waited_ns
    )
    return waits


def _is_wait(value: Any) -> bool:
    """Start, end and the time waited between them."""
    if not isinstance(value, list) or len(value) != 3 or any(_number(number) is None for number in value):
        return False
    start, end, waited = value
    return bool(start + waited <= end < 1 << 63)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
