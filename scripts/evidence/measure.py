"""Builds one case, checks its result against the unsharded model, times it and keeps a trace of it.

How times are taken is in ``device.py``. A training step is checked by what the model computes after it: every layer's
update changes that by about as much as the output is large, so an update that is missing or stale is seen.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from overlap_probe import capture

from . import device
from .cases import Case
from .models import BYTES_OF_A_UNIT, DIM, TOKENS, VOCABULARY, Llama, linear_stack
from .shard import prepare_optimizer, shard

TRACED = 3
TRACED_LLAMA = 2
"""Its traces are fifteen times as large."""

LEARNING_RATE = 0.01
"""Changes each weight by about its size, see ``LARGEST_ERROR``."""

LARGEST_ERROR = 0.1
"""Of the output after a step, as a share of what the step changed: none for 2 ranks, roundings of bfloat16 for more. A
layer whose update is missing leaves 20 percent and more; gradients that are not averaged, more than 100."""

Result = dict[str, Any]


def measure(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    """``device_us`` and ``host_us``: medians on this rank. Raises AssertionError if the result is wrong."""
    before = device.used_bytes()
    result = _KINDS[case.kind](case, mesh, traces)
    after = device.used_bytes()
    if before is not None and after is not None:
        result["device_bytes"] = after - before
    return result


def _gemm(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    model = linear_stack()
    x = _batch(case, 1)
    with torch.no_grad():
        return device.times(lambda: model(x)) | {"unit_bytes": BYTES_OF_A_UNIT}


def _gather(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    """All gathers of the forward without the matmuls: each layer returns its input."""
    model = linear_stack()
    for layer in model:
        layer.forward = lambda x: x
    sharded = shard(case, model, list(model), mesh, mixed=False)
    x = torch.zeros(1, DIM, device=device.device(), dtype=device.DTYPE)
    with torch.no_grad():
        return device.times(lambda: sharded(x))


def _linear(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    x = _batch(case, 1)
    model = linear_stack()
    with torch.no_grad():
        expected = model(x)
        sharded = shard(case, model, list(model), mesh, mixed=False)
        for _ in range(3):
            torch.testing.assert_close(sharded(x), expected)
        result = device.times(lambda: sharded(x))
        _trace(lambda: sharded(x), traces, result["host_us"])
    return result


def _linear_step(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    """Forward, backward from a fixed gradient of the output, SGD."""
    rank = dist.get_rank()
    inputs = [(_batch(case, 2 * r), _batch(case, 2 * r + 1)) for r in range(dist.get_world_size())]
    before, after = _expected_outputs(inputs, rank)
    x, gradient = inputs[rank]
    del inputs
    model = linear_stack()
    is_sharded = case.runtime != "torch"
    sharded = shard(case, model, list(model), mesh, mixed=False) if is_sharded else model
    optimizer = torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE, foreach=True)
    prepare_optimizer(case, optimizer)

    def step() -> None:
        sharded(x).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    if is_sharded:
        step()
        with torch.no_grad():
            error = device.largest(_size(sharded(x) - after) / _size(after - before))
        assert error < LARGEST_ERROR, f"the output after a step is off by {error:.1%} of what the step changed"
    for group in optimizer.param_groups:
        group["lr"] = 1e-9  # the same work on data that stays the same: a GPU's power depends on it
    del before, after
    release()
    result = device.times(step)
    result["unaided_us"] = device.times(step, ahead=False)["device_us"]
    if is_sharded:
        result["error_of_step"] = error
        _trace(step, traces, result["host_us"])
    return result


def _expected_outputs(inputs: list[tuple[torch.Tensor, torch.Tensor]], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the unsharded model makes of the rank's input before and after a step on everybody's."""
    model = linear_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with torch.no_grad():
        before = model(inputs[rank][0])
    for x, gradient in inputs:
        model(x).backward(gradient / len(inputs))
    optimizer.step()
    with torch.no_grad():
        return before, model(inputs[rank][0])


def _llama(case: Case, mesh: DeviceMesh, traces: Path) -> Result:
    torch.manual_seed(0)
    with device.device():
        model = Llama()
        tokens = torch.randint(0, VOCABULARY, TOKENS)
    with torch.no_grad(), torch.autocast(device.TYPE, torch.bfloat16):
        expected = float(F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()))
    sharded = shard(case, model, list(model.layers), mesh, mixed=True)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4, foreach=True)
    losses = []

    def step() -> None:
        loss = F.cross_entropy(sharded(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()
    assert abs(float(losses[0]) - expected) < 0.02 * expected, f"loss {float(losses[0])}, unsharded {expected}"
    result = device.times(step, ahead=False)
    assert float(losses[-1]) < float(losses[0])
    _trace(step, traces, None, TRACED_LLAMA)
    return {**result, "units": len(model.layers) + 1}


_KINDS: dict[str, Callable[[Case, DeviceMesh, Path], Result]] = {
    "gemm": _gemm,
    "gather": _gather,
    "linear": _linear,
    "linear_step": _linear_step,
    "llama": _llama,
}


def _batch(case: Case, seed: int) -> torch.Tensor:
    """``[batch, DIM]``, the same on every rank."""
    generator = torch.Generator(device.device()).manual_seed(seed)
    rows = case.batch // device.SCALE
    return torch.randn(rows, DIM, device=device.device(), dtype=device.DTYPE, generator=generator)


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.float().norm())


def _trace(work: Callable[[], Any], folder: Path, host_us: float | None, steps: int = TRACED) -> None:
    """host_us: how long the host needs for it, if the device is to sleep meanwhile; None lets it find the device as it
    is."""
    sleep_us = 0.0 if host_us is None else device.ahead_us(2 * host_us)  # the profiler makes the host slower
    dist.barrier()
    with capture(folder, warmup=2, steps=steps) as end_step:
        for _ in range(2 + steps):
            device.sleep(sleep_us)
            work()
            end_step()


def release() -> None:
    """Between cases: nothing of the last model is left on the device."""
    gc.collect()
    device.synchronize()
    if device.TYPE == "cuda":
        torch.cuda.empty_cache()
