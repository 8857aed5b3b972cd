"""One function for each runtime that is compared: shards the units of a model and then the model."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .cases import Case


class Unavailable(Exception):
    """What a case needs is not installed here."""


def shard(case: Case, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, mixed: bool) -> nn.Module:
    """mixed: float32 parameters, bfloat16 computation. Raises Unavailable."""
    return _RUNTIMES[case.runtime](case, model, units, mesh, mixed)


def _fsdp_runtime(case: Case, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, mixed: bool) -> nn.Module:
    from fsdp_runtime import FsdpError, MixedPrecision, Prefetch, fully_shard

    schedules: dict[str, Any] = {"-": "implicit", "prefetch": Prefetch(case.depth)}
    options: Any = {
        "gather": case.gather,
        "schedule": schedules.get(case.schedule, case.schedule),
        "target_length": case.target_length,
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32) if mixed else None,
    }
    try:
        for unit in units:
            fully_shard(unit, mesh, **options)
        return fully_shard(model, mesh, **options)
    except FsdpError as error:  # a gather that these ranks do not support
        raise Unavailable(str(error)) from error


def _fsdp2(case: Case, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, mixed: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if mixed:
        options["mp_policy"] = policy
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    if case.schedule == "prefetch":
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
            following.set_modules_to_backward_prefetch([unit])  # type: ignore[operator]
    return model


def _megatron_fsdp2(
    case: Case, model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh, mixed: bool
) -> nn.Module:
    try:
        megatron: Any = importlib.import_module("megatron_fsdp.experimental")
    except ImportError as error:
        raise Unavailable(f"megatron_fsdp.experimental: {error}") from error
    flat = [megatron.Flat()]
    placements = megatron.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    # Its default keeps a float32 copy of each parameter, which the others here do not.
    policy = importlib.import_module("megatron_fsdp.mixed_precision").MixedPrecisionPolicy(
        main_params_dtype=next(model.parameters()).dtype
    )
    for unit in (*units, model):
        megatron.fully_shard(unit, mesh, placements, policy)
    return model


def prepare_optimizer(case: Case, optimizer: torch.optim.Optimizer) -> None:
    """What a runtime wants to know of the optimizer that steps its parameters."""
    if case.runtime == "megatron_fsdp2":
        importlib.import_module("megatron_fsdp.experimental").fully_shard_optimizer(optimizer)


_RUNTIMES: dict[str, Callable[[Case, nn.Module, Sequence[nn.Module], DeviceMesh, bool], nn.Module]] = {
    "fsdp_runtime": _fsdp_runtime,
    "fsdp2": _fsdp2,
    "megatron_fsdp2": _megatron_fsdp2,
}
