"""The exception that every misuse of the runtime raises."""

from __future__ import annotations


class FsdpError(RuntimeError):
    """The runtime was asked for something that it cannot do.

    The message names the unit or parameter, says what is wrong with it and what to do instead.
    """
