"""Reads what the traces of the cases say, with overlap_probe's own analysis of all ranks: no GPU is needed for it.

    python -m scripts.evidence.analysis FOLDER [--seconds S]

Writes ``analysis/CASE.json`` and ``reports/CASE.html`` for each folder in ``FOLDER/traces``; goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overlap_probe import OverlapProbeError, analyze_run, write_report
from overlap_probe.results import PHASES, Collective, Phase, RunAnalysis, Window

from .results import write_json


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    for traces in sorted((options.folder / "traces").glob("*")):
        path = options.folder / "analysis" / f"{traces.name}.json"
        if path.exists():
            continue
        if time.monotonic() > end:
            return 1
        try:
            run = analyze_run(traces)
            write_json(path, phases_of(run))
            page = options.folder / "reports" / f"{traces.name}.html"
            page.parent.mkdir(exist_ok=True)
            write_report(run, page)
        except OverlapProbeError as error:
            write_json(path, {"error": str(error)})
    return 0


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """By case and phase what ``phases_of`` said; an error as it was."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((folder / "analysis").glob("*.json"))}


def phases_of(run: RunAnalysis) -> dict[str, dict[str, Any]]:
    """Each phase that has gathers, over all ranks and step windows.

    ``gathers``, ``expected`` and ``found`` are sums; ``found`` counts overlaps as the checks do. Times are us a window,
    the median over windows of the worst rank; ``wait_us`` and ``transfer_us`` split what the gathers took. ``causes``
    counts every gather that is exposed enough to have one.
    """
    windows = [list(rank.steps.values()) for rank in run.ranks]
    return {phase: _phase(phase, windows) for phase in PHASES if any(_gathers(phase, w) for ws in windows for w in ws)}


def _phase(name: str, ranks: Sequence[Sequence[Window]]) -> dict[str, Any]:
    windows = [window for rank in ranks for window in rank]
    phases = [_phase_of(name, window) for window in windows]
    gathers = [c for window in windows for c in _gathers(name, window)]
    time_ns, reduce_ns = (sum(getattr(p, op).time_ns for p in phases) for op in ("all_gather", "reduce_scatter"))

    def worst_us(what: Callable[[Window], int]) -> float:
        return float(max(statistics.median(what(w) for w in rank) for rank in ranks if rank)) / 1e3

    return {
        "ranks": len(ranks),
        "windows": len(windows),
        "gathers": len(gathers),
        "expected": sum(p.expected or 0 for p in phases),
        "found": sum(p.found for p in phases),
        "hidden": _share(sum(p.all_gather.hidden_ns for p in phases), time_ns),
        "exposed_us": worst_us(lambda w: _phase_of(name, w).all_gather.exposed_ns),
        "wait_us": worst_us(lambda w: sum(c.wait_ns or 0 for c in _gathers(name, w))),
        "transfer_us": worst_us(lambda w: sum(c.transfer_ns or 0 for c in _gathers(name, w))),
        "reduces": sum(p.reduce_scatter.count for p in phases),
        "reduces_expected": sum(p.reduce_expected or 0 for p in phases),
        "reduces_found": sum(p.reduce_found for p in phases),
        "reduces_hidden": _share(sum(p.reduce_scatter.hidden_ns for p in phases), reduce_ns),
        "mechanisms": dict(Counter(c.mechanism for c in gathers)),
        "causes": dict(Counter(c.cause for c in gathers if c.cause).most_common()),
    }


def _phase_of(name: str, window: Window) -> Phase:
    return window.forward if name == "forward" else window.backward


def _gathers(phase: str, window: Window) -> list[Collective]:
    return [c for c in window.collectives if c.op == "all_gather" and c.phase == phase]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


if __name__ == "__main__":
    sys.exit(main())
