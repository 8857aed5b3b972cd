"""Writes a run and its verdict as the JSON of the design's section 4, and reads it back.

The idea: the file is the seam between measuring and showing. Its keys are the fields of the records in ``results``,
apart from three shapes that the design fixes (``quality``, a window's operations as keys, a phase's own keys), so that
reading back gives equal records, and everything shown can be shown again without a trace.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

import msgspec

from overlap_probe.errors import TraceError
from overlap_probe.results import OPS, Analysis, Phase, RunAnalysis, Verdict, Window

SCHEMA = 1
"""Version of the layout; a file of another version is refused."""


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """The JSON text, ASCII only (a lone surrogate is an escape) and without NaN or Infinity."""
    return json.dumps(to_dict(run, verdict), indent=1, allow_nan=False) + "\n"


def to_dict(run: RunAnalysis, verdict: Verdict | None = None) -> dict[str, Any]:
    """The run as plain dicts, lists, texts and ints: design, section 4, and the keys ``run`` and ``problems``."""
    return {
        "schema": SCHEMA,
        "run": _plain(run.record),
        "problems": list(run.problems),
        "traces": [_trace(analysis) for analysis in run.ranks],
        "verdict": None
        if verdict is None
        else {"status": verdict.status, "findings": [_plain(_fields(f)) for f in verdict.findings]},
    }


def _trace(analysis: Analysis) -> dict[str, Any]:
    known = {"process": analysis.process, "device": analysis.device, "device_name": analysis.device_name}
    return {
        "path": analysis.path,
        "format": analysis.format,
        "rank": analysis.rank,
        "world_size": analysis.world_size,
        **{key: value for key, value in known.items() if value is not None},
        "quality": {
            "status": analysis.quality,
            "notes": list(analysis.notes),
            "incomplete": list(analysis.incomplete),
        },
        "windows": {name: _window(window) for name, window in analysis.windows.items()},
    }


def _window(window: Window) -> dict[str, Any]:
    backward = window.backward
    return {
        "communication": _fields(window.communication),
        **{op: _fields(totals) for op, totals in window.by_op.items()},
        "compute_ns": window.compute_ns,
        "gemm_ns": window.gemm_ns,
        "forward": _phase(window.forward),
        "backward": _phase(backward)
        | {"reduce_expected": backward.reduce_expected, "reduce_found": backward.reduce_found},
        "collectives": [_fields(c) | {"streams": list(c.streams)} for c in window.collectives],
        **({"what_if": {phase: _fields(x) for phase, x in window.what_if.items()}} if window.what_if else {}),
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "all_gather": _fields(phase.all_gather),
        "reduce_scatter": _fields(phase.reduce_scatter),
        "children": phase.children,
        "expected": phase.expected,
        "found": phase.found,
    }


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _plain(value: Any) -> Any:
    """A free-form value as JSON can hold it: a number that JSON has no word for is null, anything unknown its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return value.as_posix() if isinstance(value, PurePath) else str(value)


def is_result(path: str | Path) -> bool:
    """Whether a file begins as `render` begins one: then it is a result, and no trace."""
    try:
        with open(path, "rb") as file:
            return re.match(rb'\s*\{\s*"schema"\s*:\s*\d+\s*,\s*"run"', file.read(200)) is not None
    except OSError:
        return False


def read_result(path: str | Path) -> tuple[RunAnalysis, Verdict | None]:
    """The run and verdict of a JSON file that `render` wrote.

    Raises TraceError if the file cannot be read, is not JSON, or is not a result of this schema.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not JSON ({error})"
        raise TraceError(path, reason, "give a result that `overlap_probe analyze --json` wrote") from error
    return from_dict(data, path)


def from_dict(data: Any, path: str | Path = "result") -> tuple[RunAnalysis, Verdict | None]:
    """The run and verdict that `to_dict` made this of; only what a picture shows is not in it.

    Keys beyond the design's may be missing. Raises TraceError, naming ``path`` and the place in it, where the layout is
    not that of the design's section 4.
    """
    if not isinstance(data, dict) or "traces" not in data:
        raise TraceError(path, "not a result of overlap_probe", "give a file that `overlap_probe analyze --json` wrote")
    if data.get("schema") != SCHEMA:
        problem = f"schema {data.get('schema')!r}, this version reads {SCHEMA}"
        raise TraceError(path, problem, "analyse the traces again with this version")
    try:
        run = RunAnalysis(
            ranks=tuple(_read_trace(trace) for trace in data["traces"]),
            problems=msgspec.convert(data.get("problems", []), tuple[str, ...]),
            record=msgspec.convert(data.get("run", {}), dict[str, Any]),
        )
        return run, msgspec.convert(data.get("verdict"), Verdict | None)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
        problem = f"not a result of schema {SCHEMA}: {reason}"
        raise TraceError(path, problem, "analyse the traces again with this version") from error


def _read_trace(trace: dict[str, Any]) -> Analysis:
    quality = trace["quality"]
    flat = {key: value for key, value in trace.items() if key not in ("quality", "windows")}
    windows = {name: _read_window(name, window) for name, window in trace["windows"].items()}
    if "whole" not in windows:
        raise KeyError("whole")
    notes = {"notes": quality["notes"], "incomplete": quality.get("incomplete", [])}
    return msgspec.convert({**flat, **notes, "windows": windows}, Analysis)


def _read_window(name: str, window: dict[str, Any]) -> Window:
    flat = {
        **window,
        "name": name,
        "communication": _read_totals(window["communication"]),
        "by_op": {op: _read_totals(window[op]) for op in OPS if op in window},
        "forward": _read_phase(window["forward"]),
        "backward": _read_phase(window["backward"]),
        "collectives": [_COLLECTIVE_EXTRAS | collective for collective in window["collectives"]],
    }
    return msgspec.convert(flat, Window)


_COLLECTIVE_EXTRAS = {"overlapped": False, "pass_index": 0, "name": "", "streams": ()}
"""Keys of a collective that the design does not ask for, as they are read where they are missing."""


def _read_phase(phase: dict[str, Any]) -> dict[str, Any]:
    return phase | {op: _read_totals(phase[op]) for op in ("all_gather", "reduce_scatter")}


def _read_totals(totals: dict[str, Any]) -> dict[str, Any]:
    slowdown = totals["slowdown_ns"]
    return {"net_hidden_ns": None if slowdown is None else totals["hidden_ns"] - slowdown, **totals}
