"""The cases: plain names, in the order of how much they tell, so that a run that ends early has told most."""

from __future__ import annotations

from dataclasses import dataclass

GATHERS = ("process_group", "zero_cta", "copy_engine")
SCHEDULES = ("serial", "implicit", "prefetch")
BATCHES = (4096, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """kind: ``linear`` (forward of 8 units), ``gemm`` or ``gather`` (one half of it alone), ``llama`` (training
    step)."""

    kind: str
    runtime: str
    gather: str = "-"
    schedule: str = "-"
    batch: int = 0

    @property
    def name(self) -> str:
        parts = (self.kind, self.runtime, self.gather, self.schedule, str(self.batch) if self.batch else "-")
        return "_".join(part for part in parts if part != "-")


def _all() -> tuple[Case, ...]:
    cases = [Case("gather", "fsdp_runtime", gather) for gather in GATHERS]
    for batch in BATCHES:
        cases.append(Case("gemm", "torch", batch=batch))
        cases += [Case("linear", "fsdp_runtime", g, s, batch) for s in reversed(SCHEDULES) for g in GATHERS]
        cases += [Case("linear", "fsdp2", "process_group", s, batch) for s in ("implicit", "prefetch")]
        cases.append(Case("linear", "megatron_fsdp2", "process_group", "prefetch", batch))
    cases += [Case("llama", "fsdp_runtime", gather, "prefetch") for gather in GATHERS]
    cases += [Case("llama", "fsdp2", "process_group", s) for s in ("implicit", "prefetch")]
    return tuple(cases)


ALL = _all()
