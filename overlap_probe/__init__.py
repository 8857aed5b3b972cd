"""Finds out whether FSDP's all-gathers hide behind GEMMs, how much of them does, and why the rest does not.

The pipeline: path -> `read_trace` -> Trace -> `analyze` -> Analysis -> `evaluate` -> Verdict -> `write_report`.
`analyze_run` does the first two for every rank of a run and joins them; `capture` makes the traces.
"""

from overlap_probe.capture import capture
from overlap_probe.checks import Check, evaluate, parse_check
from overlap_probe.errors import CheckSyntaxError, LaunchError, OverlapProbeError, TraceError
from overlap_probe.options import Options
from overlap_probe.overlap import analyze
from overlap_probe.ranks import analyze_run
from overlap_probe.readers import read_trace, read_traces
from overlap_probe.render import write_report
from overlap_probe.results import Analysis, Collective, Finding, RunAnalysis, Totals, Verdict, Window
from overlap_probe.tables import Trace

__all__ = [
    "Analysis",
    "Check",
    "CheckSyntaxError",
    "Collective",
    "Finding",
    "LaunchError",
    "Options",
    "OverlapProbeError",
    "RunAnalysis",
    "Totals",
    "Trace",
    "TraceError",
    "Verdict",
    "Window",
    "analyze",
    "analyze_run",
    "capture",
    "evaluate",
    "parse_check",
    "read_trace",
    "read_traces",
    "write_report",
]
__version__ = "0.1.0"
