"""Makes small Kineto traces: one launch, its operation and its kernel, and whatever a test puts beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overlap_probe.readers import read_trace
from overlap_probe.tables import Trace

DISTRIBUTED = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}


def event(
    category: str, name: str, ts: Any, dur: Any, *, pid: Any = 100, tid: Any = 100, **args: Any
) -> dict[str, Any]:
    """A complete event; spaces in the names of args are written as underscores (``External_id``)."""
    fields = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    return fields | {"args": {key.replace("_", " "): value for key, value in args.items()}}


def kernel(name: str, ts: Any, dur: Any, *, stream: int = 7, device: int = 0, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, pid=device, tid=stream, stream=stream, device=device, **args)


def launch(ts: Any, correlation: int, name: str = "cudaLaunchKernel", **args: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, ts, 2, correlation=correlation, **args)


def one_launch() -> list[dict[str, Any]]:
    """An operation that launches one kernel inside a range: kernel 20..50 us, launched at 12 us, External id 5."""
    return [
        event("user_annotation", "step0", 0, 60, External_id=4),
        event("cpu_op", "aten::mm", 10, 8, External_id=5),
        launch(12, 77, External_id=5),
        kernel("gemm", 20, 30, correlation=77, External_id=5, grid=[2, 3, 1], block=[128, 1, 1]),
    ]


def text(events: list[Any], **keys: Any) -> str:
    return json.dumps({"schemaVersion": 1, **keys, "traceEvents": events}, indent=1)


def write(folder: Path, content: str | bytes | list[Any], name: str = "trace.json") -> Path:
    """Write a trace (a list stands for its events) and return its path."""
    path = folder / name
    if isinstance(content, list):
        content = text(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: str | bytes | list[Any], name: str = "trace.json") -> Trace:
    return read_trace(write(folder, content, name))


def names_of(trace: Trace, table: str) -> list[str]:
    """Names of the rows of a table, in their order."""
    return [trace.names[code] for code in getattr(trace, table).name]
