"""Tests that need GPUs, one process a rank:

    python -m torch.distributed.run --nproc-per-node 2 -m pytest tests/gpu

With fewer GPUs than ranks, ranks share one (NCCL refuses that, so gloo is the process group): then the protocol of
``copy_engine`` is tested and the rest is not collected. Elsewhere nothing here is collected, and the summary says so.

A process that aborts says why on stderr, from C++, which pytest captures and then has no time to show. So, to find out:

    TORCH_SHOW_CPP_STACKTRACES=1 TORCH_DISABLE_ADDR2LINE=1 NCCL_DEBUG=WARN PYTHONFAULTHANDLER=1 \\
        python -m torch.distributed.run --nproc-per-node 2 --log-dir logs --redirects 3 -m pytest --capture=no tests/gpu
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD = int(os.environ.get("WORLD_SIZE", "0"))
SHARED = torch.cuda.device_count() < WORLD
"""Whether ranks share a GPU."""

GATHERS = ["copy_engine"] if SHARED else ["process_group", "zero_cta", "copy_engine"]

TEST_S = 90
"""After so many seconds a test shows where every thread is, and the process ends: a rank that failed leaves the others
waiting."""

LEFT_OUT = (
    "no CUDA device"
    if not torch.cuda.is_available()
    else "not started by torch.distributed.run, one process a rank"
    if WORLD == 0
    else None
)
collect_ignore_glob = ["test_*.py"] if LEFT_OUT else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LEFT_OUT:
        terminalreporter.write_line(f"tests/gpu: left out, {LEFT_OUT}")


@pytest.fixture(autouse=True)
def _ends_in_time() -> Iterator[None]:
    faulthandler.dump_traceback_later(TEST_S, exit=True)
    yield
    torch.cuda.synchronize()  # the test's models are gone: a fault that this caused is this test's
    faulthandler.cancel_dump_traceback_later()


def join() -> DeviceMesh:
    """All ranks, each with its GPU the current one."""
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    if SHARED:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", index))
    return init_device_mesh("cuda", (WORLD,))


@pytest.fixture(scope="session")
def mesh() -> Iterator[DeviceMesh]:
    yield join()
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def on_all(mesh: DeviceMesh) -> Callable[[object], list[Any]]:
    """What every rank says."""

    def gather(own: object) -> list[Any]:
        said: list[Any] = [None] * mesh.size()
        dist.all_gather_object(said, own)
        return said

    return gather
