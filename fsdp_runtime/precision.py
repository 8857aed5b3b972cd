"""Mixed precision: the dtype that a unit computes in, and the one that its gradients are reduced in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import FsdpError


@dataclass(frozen=True)
class MixedPrecision:
    """The parameters that the optimizer sees, and the gradients that it is given, keep the dtype that they had.

    compute_dtype: dtype of the gathered parameters, and that floating-point inputs of the unit's forward are cast to;
        None computes in the parameters' own dtype.
    reduce_dtype: dtype in which gradients are accumulated and reduced over ranks; None is the dtype that they were
        computed in.
    """

    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise FsdpError(f"mixed_precision: {name} must be a floating-point dtype, got {dtype}")

    def compute_dtype_of(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """The dtype that parameters of ``parameter_dtype`` are gathered in; integers keep theirs."""
        if self.compute_dtype is None or not parameter_dtype.is_floating_point:
            return parameter_dtype
        return self.compute_dtype

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating-point tensor in the dtype of the computation; every other tensor as it is."""
        if self.compute_dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.compute_dtype)
