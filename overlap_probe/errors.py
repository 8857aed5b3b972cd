"""The exceptions that this package raises; the command line catches them once and prints one line.

The idea: a message always says which file or option, what was wrong, and what to try, so that nothing else has to.
"""

from __future__ import annotations


class OverlapProbeError(Exception):
    """Base of all errors raised on purpose; the command line turns one into exit code 2."""


class TraceError(OverlapProbeError):
    """A timeline cannot be read: not a timeline, cut off, or of a kind that is not known.

    The text reads ``FILE: what was wrong; try ...``.
    """

    def __init__(self, path: object, problem: str, hint: str = "") -> None:
        self.path = str(path)
        self.problem = problem
        self.hint = hint
        super().__init__(f"{self.path}: {problem}" + (f"; {hint}" if hint else ""))


class CheckSyntaxError(OverlapProbeError):
    """A check expression or another option's value does not parse."""


class LaunchError(OverlapProbeError):
    """A launched workload did not end well: a rank died, hung, or could not start."""
