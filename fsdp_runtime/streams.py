"""Which stream is current, and whether a CUDA graph captures it: what the runtime asks, at the least host time.

Streams are those of ``torch.get_device_module``: real ones on an accelerator, names on a CPU, where each operation is
over when its call returns.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .errors import FsdpError


class CurrentStream:
    """Called, it says which stream of a device is current.

    ``torch.cuda.current_stream`` makes a new object at each call, and every hook asks. So CUDA is asked for the
    stream's address, at a fraction of the host time, and a stream that was seen before is the object made then.
    """

    def __init__(self, device: torch.device) -> None:
        self._ask: Callable[[], Any] = torch.get_device_module(device).current_stream
        self._address: Callable[[], int] | None = None
        self._seen: dict[int, Any] = {}
        if device.type == "cuda":
            self._ask = partial(self._ask, device)
            self._address = partial(torch._C._cuda_getCurrentRawStream, device.index)

    def __call__(self) -> Any:
        if self._address is None:
            return self._ask()
        address = self._address()
        stream = self._seen.get(address)
        if stream is None:
            stream = self._seen[address] = self._ask()
        return stream


class Switched:
    """A context in which ``stream`` is the current one, and then ``caller`` again, which is so now.

    ``torch.cuda.stream`` does it, too, but asks first what is current, and where: several times the host time.
    """

    __slots__ = ("_caller", "_set", "_stream")

    def __init__(self, device: Any, stream: Any, caller: Any) -> None:
        """device: the module that knows the streams, ``torch.cuda`` or ``torch.cpu``."""
        self._stream, self._caller = stream, caller
        self._set = getattr(device, "set_stream", None)  # torch.cpu has none

    def __enter__(self) -> None:
        if self._set is not None:
            self._set(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._set is not None:
            self._set(self._caller)


class CaptureRules:
    """Refuses what a CUDA graph cannot hold, before anything of it is issued."""

    def __init__(self, device: Any, obstacle: str | None) -> None:
        """device: as above. obstacle: why no forward can be captured, if so."""
        self._is_capturing = getattr(device, "is_current_stream_capturing", lambda: False)
        self._obstacle = obstacle
        self._forward_captured = False

    def begin_forward(self) -> None:
        """Raises FsdpError in a capture if there is an obstacle."""
        captured = self._is_capturing()
        if captured and self._obstacle is not None:
            raise FsdpError(f"{self._obstacle}; capture a model that was sharded with gather='process_group'")
        if torch.is_grad_enabled():
            self._forward_captured = captured

    def begin_backward(self) -> None:
        """Raises FsdpError if only one of forward and backward is captured."""
        if self._is_capturing() != self._forward_captured:
            raise FsdpError(
                "only one of a forward and its backward is captured by a CUDA graph, but units that the forward leaves "
                "unsharded for the backward are so in the graph's memory only; capture both in one graph"
            )


def warn_if_serialised(device: torch.device) -> None:
    """Says so where the streams of this process cannot run side by side."""
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one hardware queue: a gather that is issued behind a "
            "matmul starts behind it, and little overlaps; unset the variable",
            stacklevel=2,
        )
