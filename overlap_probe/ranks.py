"""Joins the ranks of a run: which traces belong to it, and how long each rank waited for the others.

The idea: a collective cannot end before its last rank has come, so the rank that spent the least time in it spent only
the transfer, and whatever another rank spent beyond that it waited. Clocks of different hosts disagree, but all ranks
leave a collective together, so clocks are aligned on the ends of collectives (`peers`), never on raw times.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from overlap_probe.causes import needs_cause
from overlap_probe.errors import TraceError
from overlap_probe.intervals import covered_between
from overlap_probe.options import Options
from overlap_probe.overlap import Measured, measure
from overlap_probe.peers import clock_offsets, same_calls
from overlap_probe.readers import read_traces
from overlap_probe.render import is_result
from overlap_probe.results import Analysis, Collective, RunAnalysis, WhatIf
from overlap_probe.units import duration
from overlap_probe.waits import SMALL_QUEUE_NS
from overlap_probe.what_if import what_if

TRACE_ENDINGS = (".json", ".json.gz", ".sqlite", ".nsys-rep")
RESULT = "result.json"
"""Name of a run's result in its folder."""

NOT_TRACES = frozenset({RESULT, "baseline.json"})
"""Names of our own results, which lie beside the traces in a run folder."""

PathLike = str | Path


def analyze_run(paths: PathLike | Sequence[PathLike], options: Options | None = None) -> RunAnalysis:
    """Every rank of a run, joined.

    ``paths`` is a trace, a folder with one trace a rank, or several of either. A folder that lacks ranks of its world,
    or has a second file of a rank, which may be an old one, is a problem of the run, on which no check may pass; files
    named one by one are judged as they are.

    Raises TraceError if a trace cannot be read, a folder has none, or a path is empty.
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    if "" in several:
        raise TraceError("''", "is no path", "name a trace or a folder, and see whether a variable is not set")
    measured: list[Measured] = []
    problems: list[str] = []
    seen: set[str] = set()
    found: set[str] = set()
    for path in several:
        files = trace_files(Path(path))
        real = {os.path.realpath(file) for file in files}
        if twice := seen & real:
            raise TraceError(Path(min(twice)).name, "is named twice", "name each trace once")
        seen |= real
        traces = [trace for file in files for trace in read_traces(file)]
        measured += [measure(trace, options) for trace in traces]
        if Path(path).is_dir():
            found |= {trace.path for trace in traces}
            problems += _missing_ranks(Path(path), measured[-len(traces) :])
    measured.sort(key=lambda m: (m.trace.rank is None, m.trace.rank or 0))
    measured, doubles = _note_doubles(measured, found)
    problems += doubles
    ranks = join(measured)
    analyses = [m.analysis() for m in ranks]
    if options and options.what_if:
        analyses = [_with_what_if(a, answers) for a, answers in zip(analyses, what_if(ranks), strict=True)]
    return RunAnalysis(tuple(analyses), tuple(problems))


def _with_what_if(analysis: Analysis, answers: Mapping[tuple[str, str], WhatIf]) -> Analysis:
    """The analysis with each window's answers, by phase."""
    windows = {
        name: replace(window, what_if={phase: answer for (of, phase), answer in answers.items() if of == name})
        for name, window in analysis.windows.items()
    }
    return replace(analysis, windows=windows)


def trace_files(path: Path) -> list[Path]:
    """The traces that a path stands for: itself, or those of a folder, in order of name."""
    if not path.is_dir():
        return [path]
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file() and file.name.endswith(TRACE_ENDINGS) and file.name[0] != "." and not _is_ours(file)
    )
    if not files:
        raise TraceError(path, "no trace in this folder", f"expected files that end in {', '.join(TRACE_ENDINGS)}")
    return files


def _is_ours(file: Path) -> bool:
    """Whether a file is a result, a baseline or another output of this package, under whatever name it was written."""
    if file.name in NOT_TRACES or is_result(file):
        return True
    try:
        with file.open("rb") as content:
            return b'"kind": "overlap_probe ' in content.read(60)
    except OSError:  # reading it as a trace will say why
        return False


def _missing_ranks(folder: Path, measured: Sequence[Measured]) -> list[str]:
    ranks = {m.trace.rank for m in measured if m.trace.rank is not None}
    size = max([m.trace.world_size or 0 for m in measured] + [rank + 1 for rank in ranks])
    missing = sorted(set(range(size)) - ranks)
    if not missing:
        return []
    return [f"{folder.name}: no trace of rank {', '.join(map(str, missing))} of {size}; every rank must hold"]


def _note_doubles(measured: Sequence[Measured], found: Set[str]) -> tuple[list[Measured], list[str]]:
    """Two files of one rank are both kept and both say so; it is a problem if one was ``found`` in a folder."""
    files = defaultdict(list)
    for m in measured:
        files[m.trace.rank].append(m.trace.path)
    result, problems = [], {}
    for m in measured:
        same = files[m.trace.rank]
        if m.trace.rank is not None and len(same) > 1:
            note = f"rank {m.trace.rank} is in {len(same)} traces: {', '.join(Path(file).name for file in same)}"
            m = replace(m, trace=replace(m.trace, notes=(*m.trace.notes, note)))
            if len(set(same)) > 1 and not found.isdisjoint(same):
                problems[m.trace.rank] = f"{note}; remove those that are not of this run, or name the files one by one"
        result.append(m)
    return result, [*problems.values()]


def join(measured: Sequence[Measured]) -> list[Measured]:
    """The same ranks with ``wait_ns`` and ``transfer_ns`` filled in, and the cause ``peer_wait`` where it applies."""
    calls = list(same_calls(measured))
    offset = clock_offsets(calls, len(measured))
    collectives = [list(m.collectives) for m in measured]
    for members in calls:
        shortest = min(m.c.time_ns for m in members)
        for me in members:
            others = [m for m in members if m.rank != me.rank]
            late = max(others, key=lambda m: m.arrival_ns - offset[m.rank])
            ahead = offset[me.rank] - offset[late.rank]
            waited, in_queue = _wait(me.c, shortest, late.arrival_ns + ahead, late.arrived_by_ns + ahead)
            c = replace(me.c, wait_ns=waited, transfer_ns=min(me.c.time_ns, shortest))
            if waited and c.op == "all_gather":
                c = _explain(c, waited, in_queue, measured[me.rank], str(measured[late.rank].identity))
            collectives[me.rank][c.index] = c
    return [replace(m, collectives=tuple(cs)) for m, cs in zip(measured, collectives, strict=True)]


def _wait(c: Collective, shortest_ns: int, late_ns: int, late_by_ns: int) -> tuple[int | None, bool]:
    """How long a rank waited for later ones, and whether that is what its copies waited for in their queue.

    The last of the others came between two moments. Where the rank shows that it waited for something else, its peers
    are the reason only if they may have come right before it started.
    """
    if c.mechanism != "copy_engine":
        return c.time_ns - shortest_ns, False
    if c.queue_ns is None:
        return None, False
    if late_ns > c.start_ns + SMALL_QUEUE_NS:  # it had started without the peer
        return 0, False
    waited = max(0, min(c.queue_ns, late_ns - (c.start_ns - c.queue_ns)))
    came_last = c.waited_for is None or (c.waited_for == "sm" and c.start_ns - late_by_ns <= SMALL_QUEUE_NS)
    return waited, came_last and c.queue_ns > SMALL_QUEUE_NS and 2 * waited > c.queue_ns


def _explain(c: Collective, waited_ns: int, in_queue: bool, measured: Measured, late: str) -> Collective:
    """Its cause and what it waited for, now that the wait for a peer is known."""
    by_copies = c.mechanism == "copy_engine"
    where = "in the queue" if by_copies else "inside the collective"
    transfer = f"the transfer takes {duration(c.transfer_ns)}"
    evidence = f"waited {duration(waited_ns)} {where} for {late}, which came later; {transfer}"
    if in_queue:
        c = replace(c, waited_for="peer", evidence=evidence)
    if not needs_cause(c) or c.cause in ("serial", "first"):
        return c
    if by_copies:  # the compute that ran while it waited would have hidden it
        hidden = min(c.time_ns, _compute_ns(measured, c.start_ns - waited_ns, c.end_ns))
        waiting_is_why = in_queue and 2 * (hidden - c.hidden_ns) > c.exposed_ns
    else:
        waiting_is_why = 2 * (waited_ns - _compute_ns(measured, c.start_ns, c.start_ns + waited_ns)) > c.exposed_ns
    return replace(c, cause="peer_wait", evidence=evidence) if waiting_is_why else c


def _compute_ns(measured: Measured, start_ns: int, end_ns: int) -> int:
    """How long compute ran on a rank between two moments."""
    return covered_between(start_ns, end_ns, measured.timeline.compute)
