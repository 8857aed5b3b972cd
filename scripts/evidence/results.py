"""What was measured, as files: one JSON file a case. Whole or not at all, so that a run that was stopped can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cases import Case

BEGUN = {"begun": True}
"""The result of a case that is being measured; it stays if that ended the processes."""

WORST = ("peak_bytes", "reserved_bytes", "device_bytes", "unaided_us", "host_us")
"""Of these the largest of all ranks counts, whichever rank was slowest."""


def known(folder: Path, case: Case) -> bool:
    return _path(folder, case).exists()


def read(folder: Path, cases: Sequence[Case]) -> dict[Case, dict[str, Any]]:
    """The results that there are."""
    return {case: json.loads(_path(folder, case).read_text()) for case in cases if known(folder, case)}


def write(folder: Path, case: Case, result: dict[str, Any]) -> None:
    write_json(_path(folder, case), {"case": case.name, **result})


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def settle(folder: Path, cases: Sequence[Case], stopped: bool) -> list[Case]:
    """After their processes ended: the cases that had begun. They were stopped for want of time, and will be measured
    another time; or they took their processes down, and are errors."""
    begun = [case for case, result in read(folder, cases).items() if result.get("begun")]
    for case in begun:
        if stopped:
            _path(folder, case).unlink()
        else:
            write(folder, case, {"error": "its processes ended or hung; see ranks.log"})
    return begun


def of_all_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank's times, and what any rank needed most of; an error if any rank has one."""
    for key in ("error", "unavailable"):
        said = [rank[key] for rank in ranks if key in rank]
        if said:
            return {key: said[0]}
    slowest: dict[str, Any] = max(ranks, key=lambda rank: rank["device_us"])
    most = {key: max(rank[key] for rank in ranks) for key in WORST if key in slowest}
    return {**slowest, **most, "device_us_by_rank": [rank["device_us"] for rank in ranks]}


def _path(folder: Path, case: Case) -> Path:
    return folder / "cases" / f"{case.name}.json"
