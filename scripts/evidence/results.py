"""One JSON file a case, and the table of all.

The floor of a forward is its first gather plus the longer of (matmuls, remaining gathers): nothing that gathers so can
do better. It is given for each gather's own speed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .cases import ALL, BATCHES, GATHERS, Case
from .models import UNITS


def known(folder: Path, case: Case) -> bool:
    return _path(folder, case).exists()


def write(folder: Path, case: Case, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    path = _path(folder, case)
    path.with_suffix(".tmp").write_text(json.dumps({"case": case.name, **result}, indent=1))
    os.replace(path.with_suffix(".tmp"), path)


def of_all_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's times; an error if any rank has one."""
    for key in ("error", "unavailable"):
        said = [rank[key] for rank in ranks if key in rank]
        if said:
            return {key: said[0]}
    slowest: dict[str, Any] = max(ranks, key=lambda rank: rank["device_us"])
    return {**slowest, "device_us_by_rank": [rank["device_us"] for rank in ranks]}


def table(folder: Path, nproc: int) -> str:
    """Microseconds of device time, and ratios: to the floor of the same gather, to the serial run, to FSDP2."""
    found = {case: json.loads(_path(folder, case).read_text()) for case in ALL if known(folder, case)}
    times = {case: result["device_us"] for case, result in found.items() if "device_us" in result}
    alone = {gather: times.get(Case("gather", "fsdp_runtime", gather)) for gather in GATHERS}
    lines = [f"{nproc} ranks; device time in us, median of 20, slowest rank"]
    lines.append("gathers alone: " + ", ".join(f"{gather} {_number(time)}" for gather, time in alone.items()))
    for batch in BATCHES:
        gemms = times.get(Case("gemm", "torch", batch=batch))
        lines += [
            "",
            f"forward of {UNITS} x Linear 4096, M={batch}; matmuls alone {_number(gemms)}",
            f"{'runtime':15}{'gather':15}{'schedule':10}{'time':>7}{'host':>7}{'/floor':>8}{'/serial':>8}{'/FSDP2':>8}",
        ]
        of_fsdp2 = [t for c, t in times.items() if c.kind == "linear" and c.runtime == "fsdp2" and c.batch == batch]
        for case in (c for c in times if c.kind == "linear" and c.batch == batch):
            serial = times.get(Case("linear", "fsdp_runtime", case.gather, "serial", batch))
            ratios = (_floor(alone[case.gather], gemms), serial, min(of_fsdp2, default=None))
            lines.append(_row(case, times[case], found[case]["host_us"], ratios))
    lines += ["", "training step of the Llama-shaped model (host and device)"]
    of_fsdp2 = [t for c, t in times.items() if c.kind == "llama" and c.runtime == "fsdp2"]
    for case in (c for c in times if c.kind == "llama"):
        lines.append(_row(case, times[case], found[case]["host_us"], (None, None, min(of_fsdp2, default=None))))
    lines.append("")
    lines += [f"{case.name}: {r.get('error') or r['unavailable']}" for case, r in found.items() if case not in times]
    unreached = [case.name for case in ALL if case not in found]
    if unreached:
        lines.append(f"not reached: {', '.join(unreached)}")
    return "\n".join(lines) + "\n"


def _floor(gathers: float | None, gemms: float | None) -> float | None:
    if gathers is None or gemms is None:
        return None
    first = gathers / UNITS
    return first + max(gemms, gathers - first)


def _row(case: Case, time: float, host: float, bases: tuple[float | None, ...]) -> str:
    ratios = "".join(f"{time / base:8.3f}" if base else f"{'-':>8}" for base in bases)
    return f"{case.runtime:15}{case.gather:15}{case.schedule:10}{time:7.0f}{host:7.0f}{ratios}"


def _number(time: float | None) -> str:
    return "-" if time is None else f"{time:.0f}"


def _path(folder: Path, case: Case) -> Path:
    return folder / "cases" / f"{case.name}.json"
