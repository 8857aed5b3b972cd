"""The cases: plain names, by part, in the order of how much they tell, so that a run that ends early has told most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

UNITS = 8
"""Linear units of the work."""
GATHERS = ("process_group", "zero_cta", "copy_engine")
SCHEDULES = ("serial", "implicit", "prefetch")
BATCHES = (4096, 2048, 8192)
BATCH = BATCHES[0]
"""The one that training steps and the sweep are measured at."""


@dataclass(frozen=True)
class Case:
    """kind: ``linear`` (forward of 8 units), ``gemm`` or ``gather`` (one half of it alone), ``linear_step`` (a training
    step of the same units), ``llama`` (a training step of another model).

    depth: units gathered ahead by ``prefetch``. target_length: as in ``fsdp_runtime.fully_shard``. replicas: the outer
    dimension of the mesh; more than 1 is HSDP.
    """

    kind: str
    runtime: str
    gather: str = "-"
    schedule: str = "-"
    batch: int = 0
    depth: int = 1
    target_length: int = 1
    replicas: int = 1

    @property
    def name(self) -> str:
        parts = [self.kind, self.runtime, self.gather, self.schedule]
        parts += [f"depth{self.depth}"] * (self.depth != 1) + [f"target{self.target_length}"] * (
            self.target_length != 1
        )
        parts += [f"hsdp{self.replicas}"] * (self.replicas != 1) + [str(self.batch)] * (self.batch != 0)
        return "_".join(part for part in parts if part != "-")


def _step() -> list[Case]:
    cases = [Case("linear_step", "torch", batch=BATCH)]
    cases += [Case("linear_step", "fsdp_runtime", "copy_engine", s, BATCH) for s in ("prefetch", "implicit")]
    cases += [Case("linear_step", "fsdp2", "process_group", s, BATCH) for s in ("implicit", "prefetch")]
    cases.append(Case("linear_step", "fsdp_runtime", "process_group", "prefetch", BATCH))
    cases.append(Case("linear_step", "megatron_fsdp2", "process_group", "prefetch", BATCH))
    cases.append(Case("linear_step", "fsdp_runtime", "zero_cta", "prefetch", BATCH))
    return cases


def _llama() -> list[Case]:
    cases = [Case("llama", "fsdp_runtime", gather, "prefetch") for gather in ("copy_engine", "process_group")]
    cases += [Case("llama", "fsdp2", "process_group", s) for s in ("prefetch", "implicit")]
    return [*cases, Case("llama", "fsdp_runtime", "zero_cta", "prefetch")]


def _sweep() -> list[Case]:
    cases = [Case("gemm", "torch", batch=BATCH)]
    for gather in ("copy_engine", "process_group"):
        cases += [Case("linear", "fsdp_runtime", gather, "implicit", BATCH, 1, target) for target in range(4)]
        cases += [Case("linear", "fsdp_runtime", gather, "prefetch", BATCH, depth) for depth in (1, 2, 3)]
    return cases


def _forward() -> list[Case]:
    cases = [Case("gather", "fsdp_runtime", gather) for gather in GATHERS]
    for batch in BATCHES:
        cases.append(Case("gemm", "torch", batch=batch))
        cases += [Case("linear", "fsdp_runtime", g, s, batch) for s in reversed(SCHEDULES) for g in GATHERS]
        cases += [Case("linear", "fsdp2", "process_group", s, batch) for s in ("implicit", "prefetch")]
        cases.append(Case("linear", "megatron_fsdp2", "process_group", "prefetch", batch))
    return cases


def _hsdp() -> list[Case]:
    cases = [Case("gemm", "torch", batch=BATCH)]
    cases += [Case("gather", "fsdp_runtime", g, replicas=2) for g in ("copy_engine", "process_group")]
    for kind in ("linear", "linear_step"):
        cases += [
            Case(kind, "fsdp_runtime", g, "prefetch", BATCH, replicas=2) for g in ("copy_engine", "process_group")
        ]
        cases.append(Case(kind, "fsdp2", "process_group", "prefetch", BATCH, replicas=2))
    return cases


PARTS = {"step": _step(), "llama": _llama(), "sweep": _sweep(), "hsdp": _hsdp(), "forward": _forward()}
"""A case may be in several parts; it is measured once."""


def cases_of(parts: Sequence[str], world: int) -> list[Case]:
    """The cases of some parts for so many ranks, in order, each once. HSDP needs 2 replicas of 2 shards."""
    cases = dict.fromkeys(case for part in parts for case in PARTS.get(part, []))
    return [case for case in cases if case.replicas == 1 or (world >= 2 * case.replicas and not world % case.replicas)]
