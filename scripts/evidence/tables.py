"""The table of all that was measured, one section a question. Nothing is computed here but ratios.

The floor of a forward is its first gather plus the longer of (matmuls, remaining gathers): nothing that gathers so can
do better. It is given for each gather's own speed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import analysis, profilers, results
from .cases import BATCH, BATCHES, GATHERS, PARTS, UNITS, Case, cases_of

Results = Mapping[Case, dict[str, Any]]


def table(folder: Path, nproc: int, parts: Sequence[str]) -> str:
    """All sections that have something to say, then what failed and what of ``parts`` was not reached."""
    found = results.read(folder, cases_of(list(PARTS), nproc))
    timed = {case: result for case, result in found.items() if "device_us" in result}
    analysed = analysis.read(folder)
    blocks = [
        [f"{nproc} ranks; device time in us, median of 20, slowest rank; memory in MiB, the rank that needs most"],
        step_section(timed, 1),
        llama_section(timed, analysed),
        sweep_section(timed, analysed),
        *(forward_section(timed, batch, 1) for batch in BATCHES),
        forward_section(timed, BATCH, 2),
        step_section(timed, 2),
        analysis_section(analysed),
        profilers_section(folder / "profilers"),
        verdicts_section(folder / "verdicts" / "verdicts.json"),
    ]
    ends = _why_not(found)
    unreached = [case.name for case in cases_of(parts, nproc) if case not in found or found[case].get("begun")]
    if unreached:
        ends.append(f"not reached: {', '.join(unreached)}")
    return "\n\n".join("\n".join(block) for block in [*blocks, ends] if block) + "\n"


def floor(gathers: float | None, gemms: float | None) -> float | None:
    """The least time of a forward; None if a part of it is not known. gathers: all of its gathers, alone."""
    if gathers is None or gemms is None:
        return None
    first = gathers / UNITS
    return first + max(gemms, gathers - first)


def forward_section(timed: Results, batch: int, replicas: int) -> list[str]:
    """Ratios to the floor of the same gather, to the serial run of it, and to FSDP2."""
    times = _times(timed)
    cases = _of(timed, "linear", batch, replicas)
    if not cases:
        return []
    alone = {gather: times.get(Case("gather", "fsdp_runtime", gather, replicas=replicas)) for gather in GATHERS}
    gemms = times.get(Case("gemm", "torch", batch=batch))
    fsdp2 = _best(cases, "fsdp2")
    parts = ", ".join(f"{what} {_number(time)}" for what, time in {"matmuls": gemms, **alone}.items())
    lines = [
        f"forward of {UNITS} x Linear 4096, M={batch}{_hsdp(replicas)}; alone: {parts}",
        _head("time", "host", "/floor", "/serial", "/FSDP2"),
    ]
    for case, result in cases.items():
        serial = times.get(Case("linear", "fsdp_runtime", case.gather, "serial", batch, replicas=replicas))
        least = floor(alone[case.gather], gemms)
        lines.append(
            _name(case)
            + _cells(case_us := result["device_us"], result["host_us"])
            + _ratios((case_us, least), (case_us, serial), (case_us, fsdp2))
        )
    return lines


def step_section(timed: Results, replicas: int) -> list[str]:
    """A whole training step: device time, as it runs unaided, host time a unit, memory, and how much faster than the
    best of FSDP2."""
    cases = _of(timed, "linear_step", BATCH, replicas)
    if not cases:
        return []
    lines = [
        f"training step of {UNITS} x Linear 4096, M={BATCH}{_hsdp(replicas)}: forward, backward, SGD;",
        "unaided: the device does not sleep before it; peak: beyond resting; device: all that the case took",
        _head("time", "unaided", "host/u", "peak", "reserved", "device", "faster"),
    ]
    fsdp2 = _best(cases, "fsdp2")
    for case, r in cases.items():
        cells = _cells(r["device_us"], r.get("unaided_us"), r["host_us"] / UNITS, *_memory(r))
        lines.append(_name(case) + cells + _ratios((fsdp2, r["device_us"])))
    return lines


def llama_section(timed: Results, analysed: Mapping[str, Any]) -> list[str]:
    cases = {case: r for case, r in timed.items() if case.kind == "llama"}
    if not cases:
        return []
    lines = [
        "training step of the Llama-shaped model (host and device)",
        _head("time", "host/u", "peak", "reserved", "device", "faster", "fw hid", "bw hid"),
    ]
    fsdp2 = _best(cases, "fsdp2")
    for case, r in cases.items():
        hidden = [
            _percent(analysed.get(case.name, {}).get(phase, {}).get("hidden")) for phase in ("forward", "backward")
        ]
        cells = _cells(r["device_us"], r["host_us"] / r["units"], *_memory(r))
        lines.append(_name(case) + cells + _ratios((fsdp2, r["device_us"])) + "".join(f"{h:>9}" for h in hidden))
    return lines


def sweep_section(timed: Results, analysed: Mapping[str, Any]) -> list[str]:
    """What room for more unsharded units buys. peak: in units, beyond what the unsharded model's forward takes."""
    plain = timed.get(Case("gemm", "torch", batch=BATCH), {})
    swept = [case for case in PARTS["sweep"] if case.kind == "linear" and case in timed]
    if not any(case.depth != 1 or case.target_length != 1 for case in swept):
        return []
    lines = [
        f"forward, M={BATCH}, by target_length and depth; exposed: us of its gathers; peak: in units",
        f"{'gather':15}{'schedule':10}{'target':>7}{'depth':>7}{'time':>9}{'exposed':>9}{'hidden':>9}{'peak':>9}",
    ]
    for case in swept:
        r, said = timed[case], analysed.get(case.name, {}).get("forward", {})
        units = None
        if "peak_bytes" in r and "peak_bytes" in plain:
            units = (r["peak_bytes"] - plain["peak_bytes"]) / plain["unit_bytes"]
        depth = str(case.depth) if case.schedule == "prefetch" else "-"
        lines.append(
            f"{case.gather:15}{case.schedule:10}{case.target_length:7}{depth:>7}"
            f"{_number(r['device_us']):>9}{_number(said.get('exposed_us')):>9}{_percent(said.get('hidden')):>9}"
            f"{'-' if units is None else f'{units:.2f}':>9}"
        )
    return lines


def analysis_section(analysed: Mapping[str, Any]) -> list[str]:
    """What the traces say: overlaps, how much is hidden, waiting and moving, causes of what is exposed."""
    rows = [
        (case, phase, said) for case, phases in analysed.items() for phase, said in phases.items() if phase != "error"
    ]
    if not rows:
        return []
    lines = [
        "what the traces say: gathers, overlaps found of expected, over all ranks and steps; us a step, the worst rank",
        f"{'case':62}{'phase':9}{'gathers':>8}{'found':>9}{'hidden':>8}{'exposed':>9}{'wait':>7}{'transfer':>9}"
        f"{'reduces':>9}{'hidden':>8}  causes",
    ]
    causes: Counter[str] = Counter()
    for case, phase, r in rows:
        causes.update(r["causes"])
        reduces = f"{r['reduces_found']}/{r['reduces_expected']}" if r["reduces"] else "-"
        why = ", ".join(f"{n} {cause}" for cause, n in r["causes"].items()) or "-"
        lines.append(
            f"{case:62}{phase:9}{r['gathers']:8}{r['found']:>5}/{r['expected']:<3}{_percent(r['hidden']):>8}"
            f"{r['exposed_us']:9.0f}{r['wait_us']:7.0f}{r['transfer_us']:9.0f}{reduces:>9}"
            f"{_percent(r['reduces_hidden']):>8}  {why}"
        )
    total, unknown = sum(causes.values()), causes["unknown"]
    share = f", 1 in {total / unknown:.0f}" if unknown else ""
    lines.append(f"exposed gathers with a cause: {total}; unknown: {unknown}{share}")
    lines.append("causes of all: " + ", ".join(f"{n} {cause}" for cause, n in causes.most_common()))
    return lines + [f"{case}: {phases['error']}" for case, phases in analysed.items() if "error" in phases]


def profilers_section(folder: Path) -> list[str]:
    """Counts by both recorders, window by window (gathers/expected/found), and their times."""
    path = folder / "comparison.json"
    if not path.exists():
        return []
    said = json.loads(path.read_text())
    lines = ["the same run recorded by torch.profiler and by Nsight Systems; us, median of the windows"]
    if "rows" not in said:
        return [*lines, said.get("unavailable") or said["error"]]
    lines.append(
        f"{'rank':>4} {'phase':9}{'counts':>8}{'hidden: torch':>15}{'nsys':>9}{'ratio':>7}"
        f"{'exposed: torch':>16}{'nsys':>9}"
    )
    for r in said["rows"]:
        torch, nsys = r["torch"], r["nsys"]
        counts = "equal" if r["counts_equal"] else "differ"
        ratio = "-" if r["hidden_ratio"] is None else f"{r['hidden_ratio']:.3f}"
        lines.append(
            f"{r['rank']!s:>4} {r['phase']:9}{counts:>8}{_number(torch['hidden_us']):>15}"
            f"{_number(nsys['hidden_us']):>9}{ratio:>7}{_number(torch['exposed_us']):>16}{_number(nsys['exposed_us']):>9}"
        )
        if r["others"]:
            lines.append(f"     {r['others']} of the windows found other than the median")
        if not r["counts_equal"]:
            lines.append(f"     torch {torch['counts']}, nsys {nsys['counts']}")
    lines.append("they agree" if said["agrees"] else "they do not agree")
    return lines + [f"{name}: {size / 1e3:.0f} kB" for name, size in profilers.databases(folder).items()]


def verdicts_section(file: Path) -> list[str]:
    if not file.exists():
        return []
    lines = [
        "overlap_probe run, again and again",
        f"{'':10}{'runs':>6}{'as wanted':>11}{'windows held':>14}{'at once':>9}{'seconds each':>14}",
    ]
    for kind, s in json.loads(file.read_text())["summary"].items():
        held, each = f"{s['windows_held']}/{s['windows']}", f"{s['seconds'] / s['runs']:.1f}" if s["runs"] else "-"
        lines.append(f"{kind:10}{s['runs']:6}{s['as_wanted']:11}{held:>14}{s['at_once']:9}{each:>14}")
    return lines


def _why_not(found: Results) -> list[str]:
    """Errors case by case; what is unavailable here, with the cases that wanted it."""
    lines = [f"{case.name}: {r['error']}" for case, r in found.items() if "error" in r]
    wanted: dict[str, list[str]] = {}
    for case, r in found.items():
        if "unavailable" in r:
            wanted.setdefault(r["unavailable"], []).append(case.name)
    return lines + [f"{reason}: {', '.join(names)}" for reason, names in wanted.items()]


def _of(timed: Results, kind: str, batch: int, replicas: int) -> dict[Case, dict[str, Any]]:
    """Without those of the sweep."""
    wanted = (kind, batch, replicas, 1, 1)
    return {
        case: result
        for case, result in timed.items()
        if (case.kind, case.batch, case.replicas, case.depth, case.target_length) == wanted
    }


def _times(timed: Results) -> dict[Case, float]:
    return {case: result["device_us"] for case, result in timed.items()}


def _best(cases: Results, runtime: str) -> float | None:
    return min((r["device_us"] for case, r in cases.items() if case.runtime == runtime), default=None)


def _memory(result: Mapping[str, Any]) -> list[float | None]:
    keys = ("peak_bytes", "reserved_bytes", "device_bytes")
    return [None if result.get(key) is None else result[key] / 2**20 for key in keys]


def _hsdp(replicas: int) -> str:
    return "" if replicas == 1 else f", HSDP with {replicas} replicas"


def _head(*columns: str) -> str:
    return f"{'runtime':15}{'gather':15}{'schedule':10}" + "".join(f"{column:>9}" for column in columns)


def _name(case: Case) -> str:
    return f"{case.runtime:15}{case.gather:15}{case.schedule:10}"


def _cells(*values: float | None) -> str:
    return "".join(f"{_number(value):>9}" for value in values)


def _ratios(*pairs: tuple[float | None, float | None]) -> str:
    return "".join(f"{'-' if a is None or not b else f'{a / b:.3f}':>9}" for a, b in pairs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
