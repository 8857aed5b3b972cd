"""What a user may tell the analysis about a trace, parsed once at the edge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_probe.errors import CheckSyntaxError
from overlap_probe.results import OPS


@dataclass(frozen=True, slots=True)
class Options:
    """How to read a timeline; the default suits PyTorch FSDP2, Megatron-FSDP and fsdp_runtime."""

    rules: tuple[tuple[str, re.Pattern[str]], ...] = ()
    """Kind of collective and what an activity's name must contain to be one, before everything else (``--rule``)."""
    window: re.Pattern[str] | None = None
    """Ranges whose whole name matches are the windows (``--window``)."""
    min_overlap_ns: int = 0
    """A collective overlaps a GEMM if it does so for longer than this (``--min-overlap``)."""
    unit_labels: tuple[re.Pattern[str], ...] = ()
    """A user's label grammars (``--unit-label``): groups unit, phase and op, or the first group is the unit."""
    what_if: bool = False
    """Also replay each pass with one thing different (``--what-if``)."""

    @classmethod
    def parse(
        cls,
        rules: Sequence[str] = (),
        window: str | None = None,
        min_overlap_ns: int = 0,
        unit_labels: Sequence[str] = (),
        what_if: bool = False,
    ) -> Options:
        """From the texts of the command line; raises CheckSyntaxError that names the option."""
        return cls(
            rules=tuple(_rule(text) for text in rules),
            window=None if window is None else _regex("--window", window),
            min_overlap_ns=min_overlap_ns,
            unit_labels=tuple(_regex("--unit-label", text) for text in unit_labels),
            what_if=what_if,
        )


def _rule(text: str) -> tuple[str, re.Pattern[str]]:
    kind, _, pattern = text.partition("=")
    if not pattern or kind not in OPS:
        raise CheckSyntaxError(f"--rule {text!r}: expected KIND=REGEX with KIND one of {', '.join(OPS)}")
    return kind, _regex("--rule", pattern)


def _regex(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckSyntaxError(f"{option} {pattern!r}: not a regular expression: {error}") from error
