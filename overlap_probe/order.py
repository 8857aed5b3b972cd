"""Tells phases by autograd and units by order, where no label tells either.

The idea: a compiled graph (SimpleFSDP, compiled FSDP2) has no labels, but it makes the same calls at every step, so the
n-th all-gather of a pass is one and the same in all windows and on all ranks, and ``#n`` is a name for it: no module's
path, and counted for each kind and phase by itself. It is given only where the trace shows the order to be repeated: at
least two passes, all of them with the same calls of the same sizes. What ran inside autograd's engine is backward, what
ran inside a compiled forward is forward; unless that, or labels, tell it of every call, the window is the pass.

``auto`` counts no such unit. It expects one overlap less than the root has children, and an order tells neither: a
graph gathers each parameter by itself, or several in a bucket, and the root's among them; a weight and its bias are
needed by the same GEMM. So one less than the calls may be more than a perfect schedule reaches, and what it does reach
cannot be seen. A wrong expectation is worse than asking for a number (design, section 5: no units for ``auto``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from overlap_probe import kernels
from overlap_probe.collectives import Classified, launches
from overlap_probe.nesting import Nesting
from overlap_probe.results import OPS
from overlap_probe.tables import I64, NO_TIME, Trace

ORDERED = ("all_gather", "reduce_scatter")
"""Kinds of collective that units are known by."""

_Kind: TypeAlias = tuple[str, str]
"""Kind of collective and phase."""


def tell_by_order(trace: Trace, classified: Classified, window_of: I64) -> tuple[Classified, tuple[str, ...]]:
    """The same collectives with phases and units, and notes on what could not be told of a compiled graph.

    ``window_of`` is the window of each activity, -1 for none. Nothing changes where labels name units of all-gathers or
    reduce-scatters. Where labels name phases, a call without one (DeepSpeed gathers in its optimizer step) has no unit.
    """
    calls = _in_order_of_issue(trace, classified)
    if not calls or any(classified.units[n] is not None for n in calls):
        return classified, ()
    phases, units, notes = list(classified.phases), list(classified.units), []
    compiled = False
    if labelled := [n for n in calls if phases[n] != "unknown"]:
        calls = labelled
    else:
        said = _phases_by_autograd(trace, classified.first[calls])
        compiled, unplaced = "forward" in said, said.count("unknown")
        if unplaced:
            where = "launched in neither a compiled forward nor a backward of autograd, so no phase is known"
            notes.append(f"{unplaced} of {len(calls)} all-gathers and reduce-scatters were {where}")
        else:
            for n, phase in zip(calls, said, strict=True):
                phases[n] = phase
    for (op, phase), passes in _passes(classified, phases, calls, window_of).items():
        sequences = {tuple(_size(trace, classified, n) for n in one) for one in passes}
        if len(sequences) > 1:
            few, many = min(map(len, passes)), max(map(len, passes))
            what = f"between {few} and {many} calls" if few < many else f"{few} calls, but of other sizes or order,"
            name = op if phase == "unknown" else f"{phase}.{op}"
            notes.append(f"{name}: {what} in a pass, so no unit is known by its place")
        elif len(passes) > 1:
            for one in passes:
                for place, n in enumerate(one, 1):
                    units[n] = f"#{place}"
    told = replace(
        classified,
        phases=tuple(phases),
        units=tuple(units),
        occasions=tuple(range(classified.count)),  # the same place again is another pass
        by_order=True,
    )
    return told, tuple(notes) if compiled else ()


def _in_order_of_issue(trace: Trace, classified: Classified) -> list[int]:
    """The collectives that units are known by, in the order in which the host launched them."""
    launch, start = trace.activities.launch_ns[classified.first], trace.activities.start_ns[classified.first]
    order = np.argsort(np.where(launch == NO_TIME, start, launch), kind="stable")
    return [n for n in order.tolist() if OPS[classified.op[n]] in ORDERED]


def _phases_by_autograd(trace: Trace, rows: I64) -> list[str]:
    """Phase of each activity by the operations around its launch; backward wins: it may run a forward again."""
    operations = trace.operations
    by_name = {code: kernels.phase_of_operation(trace.names[code]) for code in np.unique(operations.name).tolist()}
    telling = np.flatnonzero(np.isin(operations.name, [code for code, phase in by_name.items() if phase]))
    kept = operations.take(telling)
    nesting = Nesting(kept.start_ns, kept.end_ns, kept.thread)
    phases = [str(by_name[code]) for code in kept.name.tolist()]
    for row, parent in enumerate(nesting.parent.tolist()):  # operations are in the order of (start, -end)
        if parent >= 0 and phases[parent] == "backward":
            phases[row] = "backward"
    around = nesting.innermost(*launches(trace, rows))
    return [phases[row] if row >= 0 else "unknown" for row in around.tolist()]


def _passes(
    classified: Classified, phases: Sequence[str], calls: Sequence[int], window_of: I64
) -> dict[_Kind, list[list[int]]]:
    """The calls of each kind, cut where the phase or the window changes; of windows' own only, if there are any."""
    windows = {n: int(window_of[classified.first[n]]) for n in calls}
    if any(window >= 0 for window in windows.values()):
        calls = [n for n in calls if windows[n] >= 0]
    passes: dict[_Kind, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    number, before = 0, None
    for n in calls:
        here = (windows[n], phases[n])
        number, before = number + (here != before), here
        passes[OPS[classified.op[n]], phases[n]][number].append(n)
    return {kind: list(by_number.values()) for kind, by_number in passes.items()}


def _size(trace: Trace, classified: Classified, n: int) -> tuple[int, int]:
    """What a call says of its size: bytes, and the code of its shapes."""
    operation = trace.activities.operation[classified.first[n]]
    if operation < 0:
        return -1, -1
    return int(trace.operations.bytes[operation]), int(trace.operations.shapes[operation])
