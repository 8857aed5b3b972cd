"""The few numbers of a run that another run is compared with, and the small file that keeps them.

The idea: a sample is what a check sees in one window: one scope's totals. Whatever a run comes from (its traces, a
result, a file committed months ago), it is compared through its samples, so that all comparisons mean the same.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from overlap_probe.errors import OverlapProbeError, TraceError
from overlap_probe.options import Options
from overlap_probe.ranks import RESULT, analyze_run, trace_files
from overlap_probe.render import is_result, read_result, write_text
from overlap_probe.render.summary import rank_labels
from overlap_probe.results import PHASES, Analysis, Collective, RunAnalysis, Totals, Window
from overlap_probe.starvation import too_busy, value_at_best

SCHEMA = 1
"""Version of the file's layout; a file of another version is refused."""

COMPARED = ("workload", "arguments", "world_size", "hosts", "versions", "devices", "backend")
"""What of a run's record should be the same for a comparison to mean something."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One scope in one window. ``overlaps`` is of ``expected`` where there is one, else of all; times are ns."""

    window: str
    overlaps: int
    expected: int | None
    time_ns: int
    hidden_ns: int
    exposed_ns: int
    stalled_ns: int
    net_hidden_ns: int | None = None
    slowdown_ns: int | None = None
    at_best: Sample | None = None
    """The same, had the collectives been hidden that missed for want of a core (`starvation`); None: there are none."""
    too_busy: str = ""
    """Why the sample may be any between the two."""


@dataclass(frozen=True, slots=True)
class UnitSample:
    """What the collectives of one unit, phase and kind cost in one window, and why."""

    window: str
    exposed_ns: int
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankSamples:
    """The samples of one rank."""

    label: str
    """Its short name, as in every report."""
    rank: int | None
    scopes: dict[str, tuple[Sample, ...]]
    """By scope as a check names it (``forward.all_gather``), those that occur only."""
    incomplete: tuple[str, ...] = ()
    """Why no comparison with this rank may pass."""
    units: dict[str, tuple[UnitSample, ...]] = field(default_factory=dict)
    """By collective and unit; not kept in a baseline file."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A run, as it is compared."""

    ranks: tuple[RankSamples, ...]
    problems: tuple[str, ...] = ()
    """Why no comparison with this run may pass."""
    made: dict[str, Any] = field(default_factory=dict)
    """How it was made, as far as is known: the keys of COMPARED."""
    fail_on: tuple[str, ...] = ()
    """What a baseline file asks of those that are compared with it."""


def at_best(rank: RankSamples) -> RankSamples:
    """The rank as it may have been on a machine with a core for every thread: units are as they are."""
    best = {scope: tuple(sample.at_best or sample for sample in some) for scope, some in rank.scopes.items()}
    return replace(rank, scopes=best)


def samples_of(run: RunAnalysis) -> Samples:
    """The samples of every rank, of the windows that checks look at."""
    ranks = tuple(_rank(label, rank) for label, rank in zip(rank_labels(run), run.ranks, strict=True))
    return Samples(ranks, run.problems, {key: run.record[key] for key in COMPARED if key in run.record})


def _rank(label: str, analysis: Analysis) -> RankSamples:
    scopes: dict[str, list[Sample]] = defaultdict(list)
    units: dict[str, list[UnitSample]] = defaultdict(list)
    for window in analysis.steps.values():
        for scope, collectives, totals, expected, found in _scopes(window):
            if totals.count:
                sample = _sample(window.name, totals, expected, found)
                scopes[scope].append(_with_best(sample, totals, collectives))
        for name, collectives in _by_unit(window).items():
            causes = dict.fromkeys(c.cause for c in collectives if c.cause)
            units[name].append(UnitSample(window.name, sum(c.exposed_ns for c in collectives), tuple(causes)))
    return RankSamples(
        label=label,
        rank=analysis.rank,
        scopes={scope: tuple(some) for scope, some in scopes.items()},
        incomplete=analysis.incomplete,
        units={name: tuple(some) for name, some in units.items()},
    )


def _scopes(window: Window) -> Iterator[tuple[str, list[Collective], Totals, int | None, int]]:
    """Scope, collectives, totals, expected and found overlaps: all that a check can name."""

    def some(op: str, phase: str | None = None) -> list[Collective]:
        return [c for c in window.collectives if c.op == op and phase in (None, c.phase)]

    for name in PHASES:
        phase = getattr(window, name)
        gathers, reduces = some("all_gather", name), some("reduce_scatter", name)
        yield f"{name}.all_gather", gathers, phase.all_gather, phase.expected, phase.found
        yield f"{name}.reduce_scatter", reduces, phase.reduce_scatter, phase.reduce_expected, phase.reduce_found
    for op, totals in window.by_op.items():
        yield op, some(op), totals, None, 0
    yield "communication", list(window.collectives), window.communication, None, 0


def _sample(window: str, totals: Totals, expected: int | None, found: int) -> Sample:
    return Sample(
        window=window,
        overlaps=totals.overlapped_by_gemm if expected is None else found,
        expected=expected,
        time_ns=totals.time_ns,
        hidden_ns=totals.hidden_ns,
        exposed_ns=totals.exposed_ns,
        stalled_ns=totals.stalled_ns,
        net_hidden_ns=totals.net_hidden_ns,
        slowdown_ns=totals.slowdown_ns,
    )


def _with_best(sample: Sample, totals: Totals, collectives: Sequence[Collective]) -> Sample:
    """The sample, and what it would be had the starved collectives been hidden, where some were starved."""
    starved = [c for c in collectives if c.starved_ns is not None]
    if not starved:
        return sample

    def best(metric: str, value: int) -> int:
        return round(value_at_best(metric, "", value, totals, starved))

    net = sample.net_hidden_ns
    hidden = replace(
        sample,
        overlaps=best("overlaps", sample.overlaps),
        hidden_ns=best("hidden", sample.hidden_ns),
        exposed_ns=best("exposed", sample.exposed_ns),
        stalled_ns=best("stalled", sample.stalled_ns),
        net_hidden_ns=None if net is None else best("net_hidden", net),
    )
    return replace(sample, at_best=hidden, too_busy=too_busy(starved))


def _by_unit(window: Window) -> dict[str, list[Collective]]:
    """The collectives by phase, kind and unit; one without a unit stands for itself, by its place among its like."""
    grouped: dict[str, list[Collective]] = defaultdict(list)
    unnamed: dict[str, int] = defaultdict(int)
    for c in window.collectives:
        scope = c.op if c.phase == "unknown" else f"{c.phase}.{c.op}"
        unit = c.unit
        if unit is None:
            unnamed[scope] += 1
            unit = f"number {unnamed[scope]}"
        grouped[f"{scope} of {unit}"].append(c)
    return grouped


def load_samples(path: str | Path, options: Options | None = None) -> Samples:
    """The samples of a baseline file, a result, a trace, or a folder of traces.

    A run's folder is what its result says, unless ``options`` ask for another reading or a trace is newer.

    Raises TraceError if the path cannot be read as any of them.
    """
    file = Path(path)
    if is_baseline(file):
        return read_baseline(file)
    if options in (None, Options()) and (file / RESULT).is_file() and not _outdated(file):
        file /= RESULT
    run = read_result(file)[0] if is_result(file) else analyze_run(file, options)
    return samples_of(run)


def _outdated(folder: Path) -> bool:
    """Whether a trace of the folder is newer than its result."""
    try:
        traces = trace_files(folder)
    except TraceError:  # only the result was kept
        return False
    return any(trace.stat().st_mtime_ns > (folder / RESULT).stat().st_mtime_ns for trace in traces)


def is_baseline(path: str | Path) -> bool:
    """Whether a file begins as `write_baseline` begins one."""
    try:
        with open(path, "rb") as file:
            return b'"overlap_probe baseline"' in file.read(60)
    except OSError:
        return False


def write_baseline(samples: Samples, path: str | Path) -> None:
    """Write a small file that is meant to be committed: whole or not at all, the same text for the same numbers.

    Raises OverlapProbeError where it cannot be written.
    """
    ranks = [{k: v for k, v in rank.items() if k != "units"} for rank in msgspec.to_builtins(samples.ranks)]
    content = {
        "kind": "overlap_probe baseline",
        "schema": SCHEMA,
        "fail_on": samples.fail_on,
        "made": samples.made,
        "problems": samples.problems,
        "ranks": ranks,
    }
    write_text(path, json.dumps(content, indent=1, sort_keys=False) + "\n")


def read_baseline(path: str | Path) -> Samples:
    """The samples of a file that `write_baseline` wrote. Raises TraceError."""
    hint = "save it again with `overlap_probe baseline save`"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise TraceError(path, f"baseline of schema {content['schema']}, this version reads {SCHEMA}", hint)
        return msgspec.convert({k: v for k, v in content.items() if k not in ("kind", "schema")}, Samples)
    except OverlapProbeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise TraceError(path, f"not a baseline: {getattr(error, 'strerror', None) or error}", hint) from error
