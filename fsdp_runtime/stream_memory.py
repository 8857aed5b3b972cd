"""Writes and waits for 32-bit words in stream order, without a kernel: the CUDA driver's stream memory operations.

The one idea: a kernel, however small, needs an SM, and a matmul that fills the device leaves none until its tail. The
device's front end does these itself, so a signal between ranks takes microseconds whatever computes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from .errors import FsdpError

_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType
_WAIT_GEQ, _WRITE_DEFAULT = 0, 0  # flags; a write by default comes after all that the stream has written before
_MOST = 256
"""Operations that one call of the driver takes."""


class _Operation(ctypes.Structure):
    """``CUstreamBatchMemOpParams``: six 64-bit words, read as the operation in the first says."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def available() -> bool:
    """Whether the driver has stream memory operations."""
    return _driver() is not None


def write_and_wait(stream: Any, writes: Sequence[tuple[int, int]], waits: Sequence[tuple[int, int]]) -> None:
    """On ``stream``: writes every (address, value), after all earlier work; then waits for every (address, value).

    A wait ends when the word, as a cyclic counter, is at least the value: 0 comes after 2**32 - 1. Addresses are of
    this device or of a peer's memory that is mapped here. Raises FsdpError if the driver refuses.
    """
    operations = [_Operation(_WRITE_VALUE_32, address, value, _WRITE_DEFAULT, 0, 0) for address, value in writes]
    operations += [_Operation(_WAIT_VALUE_32, address, value, _WAIT_GEQ, 0, 0) for address, value in waits]
    driver = _driver()
    if driver is None:
        raise FsdpError("the CUDA driver offers no stream memory operations (cuStreamBatchMemOp)")
    for start in range(0, len(operations), _MOST):
        batch = operations[start : start + _MOST]
        array = (_Operation * len(batch))(*batch)
        status = driver.cuStreamBatchMemOp_v2(ctypes.c_void_p(stream.cuda_stream), len(batch), array, 0)
        if status != 0:
            raise FsdpError(f"cuStreamBatchMemOp: the CUDA driver answered error {status} to {len(batch)} operations")


@functools.cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuStreamBatchMemOp_v2") else None
