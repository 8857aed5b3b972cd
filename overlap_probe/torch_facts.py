"""What torch says of this machine: one JSON object on stdout, printed by a process of its own.

The idea: a driver that hangs or a library that crashes must not take the doctor along, so it asks in another process.
A question is answered by doing it (a kernel is recorded, memory is allocated): what a build claims need not work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Ask all questions. A question that raises is answered with the reason."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip,
        "backends": [name for name in ("gloo", "nccl") if dist.is_available() and _has_backend(name)],
        "gpus": [],
        "far_peers": [],
        "records_cpu": _reason(lambda: _record("cpu")),
        "records_gpu": None,
        "nccl": None,
        "symmetric_memory": None,
    }
    if gpus:
        facts["gpus"] = [torch.cuda.get_device_name(gpu) for gpu in range(gpus)]
        facts["far_peers"] = [
            [a, b] for a in range(gpus) for b in range(gpus) if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
        facts["records_gpu"] = _reason(lambda: _record("cuda"))
        facts["symmetric_memory"] = _reason(_allocate_symmetric)
        if "nccl" in facts["backends"]:
            facts["nccl"] = list(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    print(json.dumps(facts))


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_gloo_available() if name == "gloo" else dist.is_nccl_available()


def _reason(attempt: Callable[[], None]) -> str:
    """Why an attempt fails; empty if it works."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _record(device: str) -> None:
    """Record a matrix product as `capture` does."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    x = torch.ones(64, 64, device=device)
    with profile(activities=activities) as recorded:
        x @ x
        if device == "cuda":
            torch.cuda.synchronize()
    events = recorded.events() or []
    if not any(str(event.device_type).lower().endswith(device) for event in events):
        raise RuntimeError(f"the profiler recorded {len(events)} events, and none of them on the {device}")


def _allocate_symmetric() -> None:
    """Allocate memory that other processes could read."""
    import torch
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.empty(1024, dtype=torch.uint8, device=torch.device("cuda", 0))


if __name__ == "__main__":
    main()
