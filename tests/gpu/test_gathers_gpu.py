"""Every gather on GPUs: units compute with what the optimizer wrote, whichever rank or stream is late."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_runtime import CopyEngineGather, MixedPrecision, ZeroCtaGather, context_of, copy_engine
from fsdp_runtime.selection import resolve_gather

from .conftest import GATHERS, SHARED, WORLD
from .exits import ORDERS
from .models import Stack, Watched, make, whole

STEPS = 5
LATE_CYCLES = 20_000_000  # about 10 ms

OnAll = Callable[[object], list[Any]]


def _be_late(model: Stack, late: str) -> None:
    """Before each forward the owner's optimizer is late, or in its middle the reader's gathers are."""
    if late == "owner":
        torch.cuda._sleep(LATE_CYCLES)
    context = context_of(model)
    if late == "reader" and context is not None:
        with torch.cuda.stream(context.all_gather_stream):
            torch.cuda._sleep(LATE_CYCLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("late", ["nobody", "owner", "reader"])
@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
@pytest.mark.parametrize("gather", GATHERS)
def test_units_compute_with_what_the_optimizer_just_wrote(
    mesh: DeviceMesh, on_all: OnAll, gather: str, schedule: str, late: str, dtype: torch.dtype
) -> None:
    model = make(mesh, gather=gather, schedule=schedule, mixed_precision=MixedPrecision(compute_dtype=dtype))
    x = torch.randn(8, 512, device="cuda")
    written = []
    for step in range(STEPS):
        if mesh.get_local_rank() == step % WORLD:
            _be_late(model, late)
        with torch.no_grad():
            shards = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
            for shard in shards:  # on the caller's stream, as an optimizer does: no host waits in between
                shard.add_(1)
            model(x)
            written.append([shard.clone() for shard in shards])
    torch.cuda.synchronize()
    for step in range(STEPS):
        told = on_all([local.cpu() for local in written[step]])
        expected = [torch.cat(parts).to("cuda", dtype) for parts in zip(*told, strict=True)][1:]  # the root's is first
        for layer, weight, bias in zip(model.layers, expected[::2], expected[1::2], strict=True):
            assert isinstance(layer, Watched)
            assert torch.equal(layer.seen[step], torch.cat([weight.reshape(-1), bias])), f"step {step}"


def _train_alike(reference: Stack, model: Stack, rank: int) -> None:
    """Steps on the same batches, ``model`` on the rank's part of each; every rank is late once in a while."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (reference, model)]
    for step in range(STEPS):
        batch = torch.randn(8 * WORLD, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        if rank == step % WORLD:
            torch.cuda._sleep(LATE_CYCLES)
        reference(batch).square().mean().backward()
        model(batch.chunk(WORLD)[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
@pytest.mark.parametrize("gather", GATHERS)
def test_training_is_that_of_the_unsharded_model(mesh: DeviceMesh, on_all: OnAll, gather: str, schedule: str) -> None:
    torch.manual_seed(0)
    reference = Stack().to("cuda")
    model = make(mesh, gather=gather, schedule=schedule)
    _train_alike(reference, model, mesh.get_local_rank())
    for expected, actual in zip(reference.parameters(), whole(list(model.parameters()), on_all), strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=1e-5 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("gather", [] if SHARED else GATHERS)
@pytest.mark.parametrize("replicas", [n for n in range(1, WORLD + 1) if WORLD % n == 0])
def test_replicas_train_as_the_unsharded_model(mesh: DeviceMesh, on_all: OnAll, gather: str, replicas: int) -> None:
    shards = WORLD // replicas
    torch.manual_seed(0)
    reference = Stack().to("cuda")
    model = make(init_device_mesh("cuda", (replicas, shards)), gather=gather)
    _train_alike(reference, model, mesh.get_local_rank())
    of_ranks = on_all([parameter.to_local().detach().cpu() for parameter in model.parameters()])  # type: ignore[attr-defined]
    for expected, parts in zip(reference.parameters(), zip(*of_ranks, strict=True), strict=True):
        whole_of_each = torch.stack([torch.cat(parts[i : i + shards]) for i in range(0, WORLD, shards)]).to("cuda")
        wanted = expected.detach().expand_as(whole_of_each)
        torch.testing.assert_close(whole_of_each, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("gather", GATHERS)
def test_the_steady_state_allocates_and_registers_nothing(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, gather: str
) -> None:
    model = make(mesh, gather=gather)
    x = torch.randn(8, 512, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    mechanism = context_of(model).groups[0].mechanism  # type: ignore[union-attr]
    calls: list[str] = []
    symmetric_empty = copy_engine.symmetric_empty
    monkeypatch.setattr(copy_engine, "symmetric_empty", lambda *a: (calls.append("allocate"), symmetric_empty(*a))[1])
    segments = mechanism._pool.snapshot() if isinstance(mechanism, ZeroCtaGather) else []
    registered = set(mechanism._registered) if isinstance(mechanism, ZeroCtaGather) else set()
    if not SHARED:  # gloo waits on the host
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert calls == []
    if isinstance(mechanism, ZeroCtaGather):
        assert len(mechanism._pool.snapshot()) == len(segments)
        assert set(mechanism._registered) == registered


@pytest.mark.parametrize("gather", GATHERS)
def test_units_share_a_gather_that_goes_with_the_last_of_them(mesh: DeviceMesh, gather: str) -> None:
    model = make(mesh, gather=gather)
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    mechanisms = {id(group.mechanism) for group in context_of(model).groups}  # type: ignore[union-attr]
    assert len(mechanisms) == 1
    gone = weakref.ref(context_of(model).groups[0].mechanism)  # type: ignore[union-attr]
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("gather", GATHERS)
def test_models_come_and_go_while_the_device_still_works_on_them(mesh: DeviceMesh, gather: str) -> None:
    outputs, communicators = [], set()
    x = torch.ones(8, 512, device="cuda")
    for turn in range(6):
        model = make(mesh, gather=gather)
        model(x).sum().backward()  # allocates and registers, so it waits for the device
        mechanism = context_of(model).groups[0].mechanism  # type: ignore[union-attr]
        if isinstance(mechanism, ZeroCtaGather):
            communicators.add(mechanism._group)
        gone = weakref.ref(mechanism)
        if mesh.get_local_rank() == turn % WORLD:
            torch.cuda._sleep(10 * LATE_CYCLES)
        output = model(x)
        output.sum().backward()
        outputs.append(output.detach())
        del model, output, mechanism
        gc.collect()
        assert gone() is None
        other = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
        assert int(other[-1]) == 1
        del other
        torch.cuda.empty_cache()
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])
    assert len(communicators) == (gather == "zero_cta")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start(gather: str, order: str, port: int) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(tests.parent), environment.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_DISABLE_ADDR2LINE": "1",
    }
    command = [sys.executable, "-m", "gpu.exits", gather, order]
    return subprocess.Popen(
        command, cwd=tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("gather", [name for name in GATHERS if name != "process_group"])
def test_a_process_ends_well_whatever_it_ends_first(mesh: DeviceMesh, on_all: OnAll, gather: str) -> None:
    """Ranks of jobs of their own, all orders at the same time."""
    ports = on_all([_free_port() for _ in ORDERS])[0]
    started = {order: _start(gather, order, port) for order, port in zip(ORDERS, ports, strict=True)}
    ends: dict[str, int | str] = {}
    end_of_patience = time.monotonic() + 75
    for order, process in started.items():
        try:
            printed, _ = process.communicate(timeout=max(1, end_of_patience - time.monotonic()))
            ends[order] = f"{process.returncode}\n{printed}" if process.returncode else 0
        except subprocess.TimeoutExpired:
            process.kill()
            ends[order] = f"did not end\n{process.communicate()[0]}"
    for order, end in ends.items():
        if end != 0:
            print(f"--- {gather}, {order}: {end}")
    assert ends == dict.fromkeys(ORDERS, 0)


def test_auto_is_the_copy_engine_where_ranks_have_gpus_of_their_own(mesh: DeviceMesh) -> None:
    from fsdp_runtime.mesh import ShardMesh

    chosen = resolve_gather("auto", ShardMesh.of(mesh, None))
    assert isinstance(chosen, CopyEngineGather) == (WORLD > 1 and not SHARED)
