"""What each rank runs: the cases that are left, one after the other, until the time is up.

Rank 0 decides what is next and writes the results, with the slowest rank's times; so all ranks do the same. A case that
hangs ends its processes with every thread's stack in the log, and stays marked as begun.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import device, results
from .cases import Case, cases_of
from .measure import measure, release
from .shard import Unavailable

CASE_S = 45
"""A case takes a few seconds; one that takes this long hangs."""
LEAST_S = 8
"""No case is begun with less than so many seconds left."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--until", type=float, required=True, help="on this machine's monotonic clock")
    parser.add_argument("--parts", required=True)
    options = parser.parse_args()
    device.start()
    cases = cases_of(options.parts.split(","), dist.get_world_size())
    meshes: dict[int, DeviceMesh] = {}
    while (case := _next(options.folder, cases, options.until)) is not None:
        began = time.monotonic()
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        own = _measured(case, meshes, options.folder / "traces" / case.name)
        everybody: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        release()
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0:
            result = results.of_all_ranks(everybody) | {"seconds": round(time.monotonic() - began, 1)}
            results.write(options.folder, case, result)
            print(case.name, result, flush=True)
        if any("error" in result for result in everybody):
            break  # a rank that failed may have left the others in a collective: new processes
    dist.barrier()
    dist.destroy_process_group()


def _next(folder: Path, cases: list[Case], until: float) -> Case | None:
    """The same on every rank; rank 0 has marked it as begun."""
    left = [case for case in cases if not results.known(folder, case)] if time.monotonic() + LEAST_S < until else []
    chosen: list[Case | None] = [left[0] if left else None]
    if dist.get_rank() == 0 and left:
        results.write(folder, left[0], results.BEGUN)
    dist.broadcast_object_list(chosen)
    return chosen[0]


def _measured(case: Case, meshes: dict[int, DeviceMesh], traces: Path) -> dict[str, Any]:
    try:
        return measure(case, _mesh(meshes, case.replicas), traces)
    except Unavailable as error:
        return {"unavailable": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _mesh(meshes: dict[int, DeviceMesh], replicas: int) -> DeviceMesh:
    """One for each number of replicas: making one makes communicators."""
    if replicas not in meshes:
        world = dist.get_world_size()
        meshes[replicas] = (
            init_device_mesh(device.TYPE, (world,))
            if replicas == 1
            else init_device_mesh(device.TYPE, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        )
    return meshes[replicas]


if __name__ == "__main__":
    main()
