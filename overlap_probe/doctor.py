"""Says what this machine can do for overlaps, and what to do about what it cannot.

The idea: one small function a topic turns what is known of the machine into diagnoses, which say what it means for
`overlap_probe`: a laptop without a GPU has no fault, a profiler that records nothing is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from overlap_probe.machine import Machine, Torch

SEVERITY = ("ok", "note", "warning", "error")
"""Values of a diagnosis's status, the worst last."""

EXIT_CODES = {"ok": 0, "note": 0, "warning": 3, "error": 1}
"""Of the worst status. Warning: something cannot be measured, or is not what it seems. Error: `run` cannot work."""

OLDEST_TORCH = (2, 9)
OLDEST_ZERO_CTA = (2, 28)
"""NCCL whose collectives can do without SMs: copy engines on registered memory."""

SHARED_MEMORY_BYTES = 256 << 20
"""What NCCL may want in /dev/shm; a Docker container has 64 MiB unless told otherwise."""

HARMFUL = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "streams share one queue, so that a gather waits for the GEMM launched before it",
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel, so that nothing overlaps",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for each collective, so that nothing overlaps",
    "NCCL_P2P_DISABLE": "NCCL goes through the host's memory, so that gathers take longer than they need",
}
"""Variables that change the answer when they are 1, and how."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One topic: what was found, and what to do."""

    topic: str
    status: str
    found: str
    advice: str = ""


def diagnose(machine: Machine) -> list[Diagnosis]:
    """Everything that can be said, torch and GPUs first."""
    found = [Diagnosis("python", "ok", machine.python), _torch(machine), *_gpus(machine)]
    if machine.torch is not None:
        found += [diagnosis for topic in _OF_TORCH for diagnosis in topic(machine.torch)]
    return found + [diagnosis for topic in _OF_MACHINE for diagnosis in topic(machine)]


def worst(diagnoses: Sequence[Diagnosis]) -> str:
    """The worst status."""
    return max((d.status for d in diagnoses), key=SEVERITY.index)


def _torch(machine: Machine) -> Diagnosis:
    torch = machine.torch
    if machine.torch_fault:
        return Diagnosis("torch", "error", f"does not start: {machine.torch_fault}", "try python -c 'import torch'")
    if torch is None:
        advice = "analyze, report, assert and diff need none; for run and capture: pip install 'overlap-probe[run]'"
        return Diagnosis("torch", "warning", "not installed", advice)
    found = f"{torch.version}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'CPU build'}"
    if tuple(int(part) for part in torch.version.split(".")[:2]) < OLDEST_TORCH:
        return Diagnosis("torch", "warning", found, f"run and capture want torch {_dotted(OLDEST_TORCH)} or newer")
    return Diagnosis("torch", "ok", found)


def _gpus(machine: Machine) -> Iterator[Diagnosis]:
    gpus = machine.torch.gpus if machine.torch else ()
    if gpus:
        names = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        few = len(gpus) < 2
        advice = "a collective of one rank moves nothing, and two ranks run on the CPU" if few else ""
        yield Diagnosis("GPUs", "note" if few else "ok", names, advice)
    elif machine.torch and machine.has_driver:
        advice = "install torch's CUDA build, look at CUDA_VISIBLE_DEVICES, and at whether the driver is new enough"
        yield Diagnosis("GPUs", "warning", "torch sees none, but there is an NVIDIA driver", advice)
    else:
        advice = "run measures gloo on the CPU: overlap that is real, and says nothing of a GPU"
        yield Diagnosis("GPUs", "note", "none", advice)
    if machine.admin_only_counters:
        advice = "timelines need none; for nsys --gpu-metrics-devices: NVreg_RestrictProfilingToAdminUsers=0"
        yield Diagnosis("GPU counters", "note", "for administrators only", advice)


def _profiler(torch: Torch) -> Iterator[Diagnosis]:
    if torch.records_cpu:
        yield Diagnosis("profiler", "error", f"records nothing on the CPU: {torch.records_cpu}", "reinstall torch")
    elif torch.records_gpu:
        advice = "end what else uses CUPTI (nsys, DCGM, a second profiler), or ask for the permission to profile"
        yield Diagnosis("profiler", "error", f"records nothing on the GPU: {torch.records_gpu}", advice)
    else:
        yield Diagnosis("profiler", "ok", f"records on the {'CPU and GPU' if torch.gpus else 'CPU'}")


def _collectives(torch: Torch) -> Iterator[Diagnosis]:
    name = "nccl" if torch.gpus else "gloo"
    if name not in torch.backends:
        yield Diagnosis(name, "error", "not in this torch, so that ranks cannot talk", "install a torch that has it")
    elif torch.nccl and torch.nccl < OLDEST_ZERO_CTA:
        advice = f"--gather zero_cta needs {_dotted(OLDEST_ZERO_CTA)} or newer"
        yield Diagnosis(name, "note", _dotted(torch.nccl), advice)
    else:
        yield Diagnosis(name, "ok", _dotted(torch.nccl) if torch.nccl else "there")


def _peer_access(torch: Torch) -> Iterator[Diagnosis]:
    if torch.far_peers:
        pairs = ", ".join(f"{a} to {b}" for a, b in torch.far_peers[:4])
        more = f" and {len(torch.far_peers) - 4} more" if len(torch.far_peers) > 4 else ""
        advice = "--gather copy_engine cannot work and NCCL takes a detour: see nvidia-smi topo -p2p r, IOMMU, ACS"
        yield Diagnosis("peer access", "warning", f"none from {pairs}{more}", advice)
    elif len(torch.gpus) > 1:
        yield Diagnosis("peer access", "ok", "every GPU reads every other")


def _symmetric_memory(torch: Torch) -> Iterator[Diagnosis]:
    if torch.symmetric_memory:
        advice = "--gather copy_engine and zero_cta need it; process_group does not"
        yield Diagnosis("symmetric memory", "warning", f"cannot be allocated: {torch.symmetric_memory}", advice)
    elif torch.symmetric_memory is not None:
        yield Diagnosis("symmetric memory", "ok", "can be allocated")


def _environment(machine: Machine) -> Iterator[Diagnosis]:
    has_gpus = machine.torch is not None and bool(machine.torch.gpus)
    for name, effect in HARMFUL.items():
        if machine.environment.get(name) == "1":
            advice = f"unset {name}, unless that is what you want to measure"
            yield Diagnosis(name, "warning" if has_gpus else "note", f"is 1: {effect}", advice)
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in machine.environment:
        yield Diagnosis("CUDA_DEVICE_MAX_CONNECTIONS", "ok", "not set")
    if {"RANK", "WORLD_SIZE"} <= machine.environment.keys():
        found = f"is {machine.environment['RANK']} of {machine.environment['WORLD_SIZE']}"
        advice = "run becomes this rank and starts none: give it -o FOLDER, or unset RANK"
        yield Diagnosis("RANK", "note", found, advice)


def _host(machine: Machine) -> Iterator[Diagnosis]:
    if machine.cores < 2:
        advice = "two ranks take turns on it: get two cores, or expect runs that are inconclusive"
        yield Diagnosis("cores", "warning", "1", advice)
    elif machine.load > machine.cores:
        advice = "host times are those of a busy machine: wait, or ask for K of N windows (--at-least)"
        yield Diagnosis("cores", "note", f"{machine.cores}, for {machine.load:.1f} processes that run", advice)
    else:
        yield Diagnosis("cores", "ok", str(machine.cores))
    if machine.loopback_fault:
        yield Diagnosis("loopback", "error", machine.loopback_fault, "ranks of one host meet there: allow it")
    if machine.shared_memory is not None and machine.shared_memory < SHARED_MEMORY_BYTES:
        has_gpus = machine.torch is not None and bool(machine.torch.gpus)
        advice = "NCCL may not start with so little: docker run --shm-size=1g, or --ipc=host"
        found = f"{machine.shared_memory >> 20} MiB"
        yield Diagnosis("/dev/shm", "warning" if has_gpus else "note", found, advice)


def _nsys(machine: Machine) -> Iterator[Diagnosis]:
    if machine.nsys:
        yield Diagnosis("nsys", "ok", machine.nsys)
    else:
        advice = "needed only for run --profiler nsys; what it exported as SQLite is read without"
        yield Diagnosis("nsys", "note", "not on the PATH", advice)


_OF_TORCH: tuple[Callable[[Torch], Iterator[Diagnosis]], ...] = (
    _profiler,
    _collectives,
    _peer_access,
    _symmetric_memory,
)
_OF_MACHINE: tuple[Callable[[Machine], Iterator[Diagnosis]], ...] = (_environment, _host, _nsys)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
