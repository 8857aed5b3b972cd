"""Records the same run with torch.profiler and with Nsight Systems, and compares what each says of every rank.

The idea: both recorders watch the same GPU, so what is counted must be equal, and what is timed nearly: each is another
run of the same work, and each recorder slows the host in its own way. Steps of one recording differ by a third in what
they hide, and now and then in how many overlaps they have, so it takes many of them until medians can be compared.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .results import write_json
from .verdicts import environment, run_once

RECORDERS: dict[str, tuple[str, ...]] = {"torch": ("--profiler", "torch"), "nsys": ("--profiler", "nsys")}
STEPS = ("--steps", "20")
SMALL = ("--dim", "1024", "--batch", "4096", "--steps", "2")
"""For a database that is small enough to be kept as a test's input."""

CLOSE = 0.1
"""Hidden time may differ by so much."""

RUN_S = 110
"""Nsight Systems also has to write, convert and export."""


def collect(folder: Path, nproc: int, arguments: Sequence[str], end: float) -> None:
    """Makes the runs that are not there yet and ``comparison.json``."""
    made = folder / "comparison.json"
    reason = why_not()
    if reason:
        write_json(made, {"unavailable": reason})
        return
    runs = {name: (*options, *STEPS) for name, options in RECORDERS.items()}
    runs["nsys_small"] = (*RECORDERS["nsys"], *SMALL)
    for name, options in runs.items():
        seconds = min(RUN_S, end - time.monotonic())
        if (folder / name / "result.json").exists():
            continue
        if seconds < 15:
            return
        shutil.rmtree(folder / name, ignore_errors=True)
        run = run_once(folder / name, nproc, (*options, *arguments), seconds)
        if run["exit"] is None and seconds < RUN_S:
            return  # stopped for want of time: says nothing
        results = {n: folder / n / "result.json" for n in RECORDERS}
        if all(path.exists() for path in results.values()):
            write_json(made, compare(*(json.loads(path.read_text()) for path in results.values())))
        elif name in RECORDERS and not results[name].exists():
            write_json(made, {"error": f"the run with {name} left no result (exit {run['exit']}); see its output.txt"})


@functools.cache
def why_not() -> str | None:
    """Why the two cannot be compared here."""
    if shutil.which("nsys") is None:
        return "nsys is not on the PATH"
    command = [sys.executable, "-m", "overlap_probe", "run", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False).stdout
    return None if "--profiler" in said else "this overlap_probe has no --profiler"


def compare(torch: dict[str, Any], nsys: dict[str, Any]) -> dict[str, Any]:
    """Each rank and phase by both: gathers, expected and found of each window in order, median times of the windows.

    Takes two results as JSON. ``agrees``: the windows have equal gathers and expected overlaps, in the median equally
    many that were found, and hidden time within ``CLOSE``. ``others``: windows whose found overlaps are not the median.
    """
    rows = []
    by_rank = [{trace["rank"]: trace for trace in result["traces"]} for result in (torch, nsys)]
    for rank in sorted(by_rank[0].keys() | by_rank[1].keys(), key=str):
        for phase in ("forward", "backward"):
            both = [_phase(ranks.get(rank), phase) for ranks in by_rank]
            counts_equal = _comparable(both[0]["counts"]) == _comparable(both[1]["counts"])
            ratio = _ratio(both[1]["hidden_us"], both[0]["hidden_us"])
            agrees = counts_equal and ratio is not None and abs(ratio - 1) <= CLOSE
            rows.append(
                {
                    "rank": rank,
                    "phase": phase,
                    **dict(zip(RECORDERS, both, strict=True)),
                    "counts_equal": counts_equal,
                    "others": sum(_others(one["counts"]) for one in both),
                    "hidden_ratio": ratio,
                    "agrees": agrees,
                }
            )
    return {"rows": rows, "agrees": bool(rows) and all(row["agrees"] for row in rows)}


def _comparable(counts: list[list[int]]) -> tuple[Any, ...]:
    return [[gathers, expected] for gathers, expected, _ in counts], _median([found for *_, found in counts])


def _others(counts: list[list[int]]) -> int:
    median = _median([found for *_, found in counts])
    return sum(found != median for *_, found in counts)


def databases(folder: Path) -> dict[str, int]:
    """Bytes of the databases that were left, by name from the folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*.sqlite"))}


def _phase(trace: dict[str, Any] | None, name: str) -> dict[str, Any]:
    windows = [w for key, w in (trace or {"windows": {}})["windows"].items() if key != "whole"]
    phases = [window[name] for window in windows]
    gathers = [phase["all_gather"] for phase in phases]
    return {
        "counts": [[g["count"], p["expected"], p["found"]] for g, p in zip(gathers, phases, strict=True)],
        "hidden_us": _median([g["hidden_ns"] / 1e3 for g in gathers]),
        "exposed_us": _median([g["exposed_ns"] / 1e3 for g in gathers]),
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
