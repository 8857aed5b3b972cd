"""What each rank runs: the cases that are left, one after the other, until the time is up.

Rank 0 decides what is next and writes the results, with the slowest rank's times; so all ranks do the same.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from . import results
from .cases import ALL, Case
from .measure import measure, release
from .shard import Unavailable

CASE_S = 25
"""No case is begun with less than so many seconds left."""


def main() -> None:
    folder, end = Path(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    while (case := _next(folder, end)) is not None:
        own = _measured(case, mesh, folder / "traces" / case.name)
        everybody: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        if dist.get_rank() == 0:
            results.write(folder, case, results.of_all_ranks(everybody))
            print(case.name, everybody, flush=True)
        release()
        if any("error" in result for result in everybody):
            break  # a rank that failed may have left the others in a collective: new processes
    dist.barrier()
    dist.destroy_process_group()


def _next(folder: Path, end: float) -> Case | None:
    left = [case for case in ALL if not results.known(folder, case)] if time.monotonic() + CASE_S < end else []
    chosen: list[Case | None] = [left[0] if left else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _measured(case: Case, mesh: Any, traces: Path) -> dict[str, Any]:
    try:
        return measure(case, mesh, traces)
    except Unavailable as error:
        return {"unavailable": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
