"""Knows the grammars of range labels: the only place that does.

The idea: every FSDP says in the name of a range what happens inside; a grammar is one regular expression whose named
groups ``op``, ``unit`` and ``phase`` are read into the same three facts, so adding a runtime is adding a row.
Sources: PyTorch FSDP2 (``torch/distributed/fsdp/_fully_shard``, ``record_function`` names), Megatron-FSDP v2 (NVTX),
DeepSpeed (NVTX: ``deepspeed/utils/nvtx.py`` and the functions in ``deepspeed/runtime`` that it decorates),
ProcessGroupNCCL and gloo (``nccl:*``, ``gloo:*``), NCCL's own NVTX domain, fsdp_runtime/labels.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from overlap_probe.kernels import kind_of

ROOT = "<root>"
"""Name of the root unit, whatever a grammar calls it."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a range's name says; None where it says nothing of it."""

    op: str | None = None
    """The range is a call of this collective."""
    unit: str | None = None
    phase: str | None = None


def _named(match: re.Match[str]) -> Label:
    """The groups as they stand: an empty unit is the root, a phase is any text with `backward` or `forward` in it."""
    groups = match.groupdict()
    op, unit, phase = groups.get("op"), groups.get("unit"), groups.get("phase") or ""
    return Label(
        op=kind_of(op) if op else None,
        unit=(unit or ROOT) if "unit" in groups else None,
        phase="backward" if "backward" in phase.lower() else "forward" if "forward" in phase.lower() else None,
    )


def _fsdp2(match: re.Match[str]) -> Label:
    """``FSDP::EVENT (UNIT)``: the event says op and phase; no parentheses is the root."""
    event, unit = match["event"], match["unit"] or ROOT
    phase = "backward" if "backward" in event else "forward" if "forward" in event else None
    if event.endswith("_prefetch"):  # what is prefetched says so itself, in a label inside
        return Label(phase=phase)
    op = {"all_gather": "all_gather", "post_backward_reduce": "reduce_scatter"}.get(event)
    return Label(op, unit, phase)


def _zero3(match: re.Match[str]) -> Label:
    """The qualified name of a Python function; no such name holds a unit."""
    op, engine, hook = match["op"], match["engine"], match["hook"]
    return Label(kind_of(op) if op else None, None, "backward" if hook else engine)


GRAMMARS: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], Label]], ...] = (
    ("FSDP2", re.compile(r"FSDP::(?P<event>\w+)(?: for .*| \((?P<unit>.*)\))?", re.DOTALL), _fsdp2),
    (
        "fsdp_runtime",
        re.compile(
            r"fsdp_runtime::(?:(?P<op>all_gather|reduce_scatter|all_reduce)|\w+)"
            r" (?P<phase>forward|backward) \((?P<unit>.*)\)",
            re.DOTALL,
        ),
        _named,
    ),
    ("Megatron-FSDP v2", re.compile(r"MFSDP (?:<root>|(?P<unit>.+)) (?P<phase>forward|backward)", re.DOTALL), _named),
    (
        "DeepSpeed ZeRO-3",
        # A gather says nothing of its phase. The forward's lie inside the engine's forward; the backward's inside the
        # hooks that the autograd engine runs, on a thread of its own. A forward that checkpointing runs again has none.
        re.compile(
            r"(?:Init\.\w+\.<locals>\.)?(?P<op>all_?gather|reduce_scatter)_(?:coalesced|fn)"
            r"|DeepSpeed\w*Engine\.(?P<engine>forward|backward)"
            r"|(?P<hook>\w+\.(?:\w+\.|<locals>\.)*<locals>\."
            r"(?:_run_(?:before|after)_backward_function|reduce_partition_and_remove_grads)"
            r"|DeepSpeedZeroOptimizer_Stage3\.(?:backward|__reduce_and_partition_ipg_grads|__avg_scatter\w*_grads"
            r"|independent_gradient_partition_epilogue))"
        ),
        _zero3,
    ),
    ("ProcessGroupNCCL", re.compile(r"nccl:(?P<op>\w+)(?: \d+(?:->|<-)\d+)?"), _named),
    (
        "NCCL",
        re.compile(r"nccl(?P<op>AllGather|ReduceScatter|AllReduce|AlltoAll|Broadcast|Reduce|Send|Recv)\w*"),
        _named,
    ),
)
"""Name of the grammar, the whole label, and how its match is read. The first that matches the whole label counts."""


class LabelReader:
    """Reads labels by the grammars above and by a user's own (``--unit-label``), which come first."""

    def __init__(self, own: Iterable[re.Pattern[str]] = ()) -> None:
        self._grammars = [(pattern, _own) for pattern in own] + [(p, read) for _, p, read in GRAMMARS]
        self._known: dict[str, Label | None] = {}

    def read(self, name: str) -> Label | None:
        """What the name says, or None if no grammar knows it."""
        if name not in self._known:
            matches = ((read, pattern.fullmatch(name)) for pattern, read in self._grammars)
            self._known[name] = next((read(m) for read, m in matches if m), None)
        return self._known[name]


def _own(match: re.Match[str]) -> Label:
    """A user's grammar: groups by name, or the first group is the unit."""
    if match.re.groupindex or not match.re.groups:
        return _named(match)
    return Label(unit=match[1] or ROOT)
