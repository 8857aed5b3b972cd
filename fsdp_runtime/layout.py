"""Where each parameter lies in a unit's flat buffers. Pure arithmetic; everything else rests on it.

Three buffers, one set of offsets. With ``world`` ranks every parameter is padded to ``world * rows`` equal rows, so
that its shard on a rank is the rows that ``torch.chunk`` and DTensor's ``Shard(0)`` would give that rank (fewer, or
none, on the last ranks when the rows do not divide).

- *sharded* ``[shard_numel]``: this rank's rows of every parameter, one after the other.
- *unsharded* ``[world * shard_numel]``, **parameter-major**: all shards of parameter 0, then all of parameter 1 ... The
  shards of one parameter are adjacent, so the unsharded parameter is a plain view: nothing is copied out after the
  gather, and each rank's own place in the buffer exists before it, so a gather can be in place. The price is that a
  gather is one piece a parameter (issued as one grouped call). Rank-major, as in FSDP2, is one piece but needs a
  copy-out; a buffer cut into equal flat pieces needs neither but gives shards that ``Shard(0)`` cannot describe.
- *packed gradient* ``[world, shard_numel]``, **rank-major**: gradients must be copied into one buffer anyway, so the
  copy does the layout, and one plain reduce-scatter leaves a flat shard laid out as *sharded* is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

ALIGNMENT = 64
"""Every shard starts at a multiple of this many elements: vectorised kernels and matmuls need aligned parameters."""


@dataclass(frozen=True)
class Piece:
    """One parameter's place.

    shape: of the whole parameter. rows: of one shard, padding included. offset: of the shard in the sharded buffer, in
    elements. numel: elements of one shard, padding included.
    """

    shape: torch.Size
    rows: int
    offset: int
    numel: int

    def own_rows(self, rank: int) -> slice:
        """The rows of the parameter that ``rank`` holds; empty if there are not enough."""
        start = min(rank * self.rows, self.shape[0])
        return slice(start, min(start + self.rows, self.shape[0]))

    def local(self, sharded: torch.Tensor, rank: int) -> torch.Tensor:
        """``[own rows, ...]``: what DTensor calls the local tensor. It shares the memory of a sharded buffer.

        Not as a view but with a storage of its own, which begins at the shard: saving or copying a tensor takes its
        whole storage along, and a DTensor whose local tensor does not begin its storage cannot be deep-copied.
        """
        rows = self.own_rows(rank)
        shape = (rows.stop - rows.start, *self.shape[1:])
        return _own_storage(sharded.narrow(0, self.offset, math.prod(shape)).view(shape))

    def like(self, local: torch.Tensor, sharded: torch.Tensor) -> torch.Tensor:
        """The same of another sharded buffer, ``local`` being that of one: with less to compute."""
        view = sharded.as_strided(local.shape, local.stride(), self.offset)
        return view if view.nbytes == sharded.nbytes else _own_storage(view)


@dataclass(frozen=True)
class Layout:
    """The places of all parameters of a unit."""

    world: int
    pieces: tuple[Piece, ...]
    shard_numel: int

    @classmethod
    def of(cls, shapes: Iterable[torch.Size], world: int) -> Layout:
        """Lays out parameters of these shapes, each at least 1-D, over ``world`` ranks."""
        pieces = []
        offset = 0
        for shape in shapes:
            rows = -(-shape[0] // world)
            numel = rows * math.prod(shape[1:])
            pieces.append(Piece(shape, rows, offset, numel))
            offset += -(-numel // ALIGNMENT) * ALIGNMENT
        return cls(world, tuple(pieces), offset)

    @property
    def unsharded_numel(self) -> int:
        return self.world * self.shard_numel

    @functools.cached_property
    def has_no_padding(self) -> bool:
        return sum(piece.shape.numel() for piece in self.pieces) == self.unsharded_numel

    @functools.cached_property
    def _gathered(self) -> tuple[tuple[int, int], ...]:
        """Offset and numel, in the sharded buffer, of what is gathered as one piece: a parameter that has elements. For
        one rank both buffers are the same, so everything is."""
        pieces = ((0, self.shard_numel),) if self.world == 1 else ((p.offset, p.numel) for p in self.pieces)
        return tuple((offset, numel) for offset, numel in pieces if numel)

    def shards(self, sharded: torch.Tensor) -> list[torch.Tensor]:
        """``[n]`` each: the pieces that a gather takes from a sharded buffer."""
        return [sharded.narrow(0, offset, numel) for offset, numel in self._gathered]

    def places(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """``[world * n]`` each: where a gather puts the shards of these pieces, which are adjacent, rank 0's first."""
        return [unsharded.narrow(0, self.world * offset, self.world * numel) for offset, numel in self._gathered]

    def parameter(self, unsharded: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The whole parameter as a view of an unsharded buffer's storage, with a version counter of its own.

        Autograd compares version counters to find out that a saved tensor was overwritten. A gather rewrites the
        same values into the buffer; were the counter shared, every re-gather would look like an in-place change.
        """
        strides = torch.empty(piece.shape, device="meta").stride()
        view = torch.empty(0, dtype=unsharded.dtype, device=unsharded.device)
        return view.set_(unsharded.untyped_storage(), self.world * piece.offset, piece.shape, strides)

    def pack(self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[world * shard_numel]``: the gradients, rank-major and cast; a missing one and all padding are zero.

        May share the memory of a gradient. Else it is a concatenation of ``[world, n]`` columns, which on a GPU is one
        kernel for all of them (unless it casts), where copies into their strided places would be one for each.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if not self.has_no_padding or len(present) < len(gradients):
            columns = self._padded(gradients, dtype, device)
        elif len(present) > 1:
            columns = [g.reshape(self.world, piece.numel) for piece, g in zip(self.pieces, present, strict=True)]
        else:
            return present[0].to(dtype).reshape(-1)  # laid out already
        packed = torch.empty(self.world, self.shard_numel, dtype=dtype, device=device)
        return torch.cat(columns, dim=1, out=packed).view(-1)

    def _padded(
        self, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """The columns of ``pack``: each gradient, filled up with zeros, and the gap behind its shards."""
        ends = [*[piece.offset for piece in self.pieces[1:]], self.shard_numel]
        gaps = [self.world * (end - piece.offset - piece.numel) for piece, end in zip(self.pieces, ends, strict=True)]
        missing = [
            self.world * piece.numel - (0 if gradient is None else gradient.numel())
            for piece, gradient in zip(self.pieces, gradients, strict=True)
        ]
        zeros = torch.zeros(max(*gaps, *missing), dtype=dtype, device=device)
        columns: list[torch.Tensor] = []
        for gradient, gap, fill in zip(gradients, gaps, missing, strict=True):
            parts = [] if gradient is None else [gradient.reshape(-1)]
            if fill or not parts:
                parts.append(zeros[:fill])
            columns += [parts[0] if len(parts) == 1 else torch.cat(parts), zeros[:gap]]
        return [column.view(self.world, column.numel() // self.world) for column in columns]


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    return view if view.is_meta else from_dlpack(to_dlpack(view))
