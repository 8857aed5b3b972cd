"""Measures what a unit costs the host: the time that Python and torch need to issue its work, in each runtime.

The idea: many units that compute next to nothing, so that the device is never what is waited for, and one rank, so
that no peer is. The clock runs around the calls; the device is waited for only between repetitions. All runtimes are
measured in one process, in turns. Without a GPU the group is gloo's, the units are even smaller, as the host
computes, and the clock is the thread's CPU time, as gloo's threads want the same cores: then the ratio is a proxy, and
the times compare with nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .cases import Case
from .results import write_json
from .shard import Unavailable, shard

UNITS, BATCH = 32, 8
GPU_DIM, CPU_DIM = 256, 16
WARMUP, TURN = 2, 5
"""Passes that a runtime makes when it is its turn: not measured, measured."""
RUNTIMES = (
    ("no FSDP", None),
    ("fsdp_runtime process_group", Case("host", "fsdp_runtime", "process_group", "auto")),
    ("fsdp_runtime copy_engine", Case("host", "fsdp_runtime", "copy_engine", "auto")),
    ("fsdp_runtime auto", Case("host", "fsdp_runtime", "auto", "auto")),
    ("FSDP2", Case("host", "fsdp2", "process_group", "implicit")),
    ("Megatron-FSDP v2", Case("host", "megatron_fsdp2", "process_group", "prefetch")),
)
BASE = "FSDP2"
"""What the others are compared with."""

MEASURED = ("no_grad_us", "forward_us", "step_us")
"""A forward under no_grad; the forward of a training step; that with its backward."""

LEAST = "least_step_us"
"""The quickest step: two runtimes of the same code differ less in it than in the median, as noise only adds."""

Passes = Callable[[], tuple[float, float, float]]
"""Runs once what is measured, and says the seconds that the host took for each."""


def main(arguments: list[str]) -> int:
    """``scripts/benchmark --host``: prints a table, and writes it as JSON if asked to."""
    options = _options(arguments)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backend: dict[str, Any] = {"backend": "nccl", "device_id": device} if on_gpu else {"backend": "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(**backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            result = _measure(init_device_mesh(device.type, (1,)), device, options.repeat, options.calls)
        finally:
            dist.destroy_process_group()
    print(_table(result))
    if options.json:
        write_json(options.json, result)
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmark --host", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=_positive, default=25, metavar="N", help="times each is made (%(default)s)")
    parser.add_argument("--calls", action="store_true", help="also list what a unit calls of torch and CUDA, profiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def _measure(mesh: DeviceMesh, device: torch.device, repeat: int, calls: bool) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "backend": "nccl" if on_gpu else "gloo",
        "torch": torch.__version__,
        "units": UNITS,
        "dim": GPU_DIM if on_gpu else CPU_DIM,
        "dtype": "bfloat16" if on_gpu else "float32",
        "repeat": repeat,
        "cases": [],
    }
    profiled: list[tuple[dict[str, Any], Passes]] = []
    for bias in (False, True):
        passes: dict[str, Passes] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name, case in RUNTIMES:
            rows[name] = {"runtime": name, "bias": bias}
            try:
                passes[name] = _passes(case, mesh, device, bias)
                passes[name]()
            except Unavailable as error:
                rows[name]["unavailable"] = str(error)
            except Exception as error:  # a runtime that fails here must not hide what the others cost
                rows[name]["unavailable"] = f"{type(error).__name__}: {error}"
            if "unavailable" in rows[name]:
                passes.pop(name, None)
        for name, measured in _take_turns(passes, repeat).items():
            for key, times in zip(MEASURED, zip(*measured, strict=True), strict=True):
                rows[name][key] = statistics.median(times)
            rows[name][LEAST] = min(step for *_, step in measured)
        profiled += [(rows[name], measure) for name, measure in passes.items()]
        result["cases"] += rows.values()
    if calls:  # last: a profiler that has run leaves CUDA calls slower, by half and more
        for row, measure in profiled:
            row["calls"] = _calls(measure)
    return result


def _passes(case: Case | None, mesh: DeviceMesh, device: torch.device, bias: bool) -> Passes:
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    dim, dtype = (GPU_DIM, torch.bfloat16) if on_gpu else (CPU_DIM, torch.float32)
    layers = [nn.Linear(dim, dim, bias=bias, device=device, dtype=dtype) for _ in range(UNITS)]
    model: nn.Module = nn.Sequential(*layers)
    if case is not None:
        model = shard(case, model, layers, mesh, mixed=False)
    x = torch.randn(BATCH, dim, device=device, dtype=dtype)
    wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
    clock = time.perf_counter if on_gpu else time.thread_time

    def passes() -> tuple[float, float, float]:
        wait()
        with torch.no_grad():
            began = clock()
            model(x)
            without = clock() - began
        wait()
        began = clock()
        loss = model(x).sum()
        forwarded = clock()
        loss.backward()
        ended = clock()
        model.zero_grad()
        return without, forwarded - began, ended - began

    return passes


def _take_turns(passes: dict[str, Passes], repeat: int) -> dict[str, list[tuple[float, ...]]]:
    """Of each runtime all passes, as MEASURED, in us a unit. In turns, so that a machine that gets slower does so for
    all."""
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in passes}
    gc.collect()
    gc.disable()  # a collection is not the runtime's doing, and falls on whichever is measured
    try:
        while any(len(measured) < repeat for measured in seconds.values()):
            for name, measure in passes.items():
                for _ in range(WARMUP):
                    measure()
                seconds[name] += [measure() for _ in range(TURN)]
    finally:
        gc.enable()
    return {name: [tuple(s * 1e6 / UNITS for s in one) for one in measured] for name, measured in seconds.items()}


def _calls(passes: Passes) -> dict[str, tuple[float, float]]:
    """How often a unit calls what the profiler sees of torch, c10d and CUDA in a forward under no_grad and a step, and
    the us that it takes, profiled, without what it calls itself; longest first."""
    with torch.profiler.profile() as profiler:
        passes()
    seen = sorted(profiler.key_averages(), key=lambda call: -call.self_cpu_time_total)
    return {
        call.key: (call.count / UNITS, call.self_cpu_time_total / UNITS)
        for call in seen
        if call.device_type == torch._C._autograd.DeviceType.CPU and call.count >= UNITS
    }


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"host time a unit, us: {result['units']} units of Linear {result['dim']} x {result['dim']} {result['dtype']}, "
        f"1 rank, {result['device']}, {result['backend']}, torch {result['torch']}; medians of {result['repeat']}"
    ]
    if result["device"] == "CPU":
        lines.append("no GPU: CPU time of the thread, with gloo; only the ratio says something, as a proxy")
    for bias in (False, True):
        rows = [row for row in result["cases"] if row["bias"] is bias]
        base = next((row for row in rows if row["runtime"] == BASE and "step_us" in row), None)
        title = "Linear with bias (2 parameters)" if bias else "Linear without bias (1 parameter)"
        lines += ["", f"{title:33} {'no_grad':>8} {'forward':>8} {'+ backward':>10} {'least':>8}   of {BASE}'s"]
        for row in rows:
            if "unavailable" in row:
                lines.append(f"{row['runtime']:33} {row['unavailable'].splitlines()[0][:70]}")
                continue
            line = f"{row['runtime']:33} {row['no_grad_us']:8.1f} {row['forward_us']:8.1f} {row['step_us']:10.1f}"
            line += f" {row[LEAST]:8.1f}"
            if base is not None:
                ratios = (row[key] / base[key] for key in (*MEASURED, LEAST))
                line += "   " + " / ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(line)
        for row in (row for row in rows if "calls" in row):
            lines += ["", f"{row['runtime']}: calls a unit, and us of their own, profiled"]
            lines += [f"{times:6.1f} {us:7.1f}  {name[:90]}" for name, (times, us) in row["calls"].items()]
    return "\n".join(lines)
