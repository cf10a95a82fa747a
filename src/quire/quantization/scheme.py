"""The contract of a weight format, and the tensors that a linear layer receives from a checkpoint.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.formats.weight_format import PANEL_WIDTH
from quire.kernels import pages
from quire.kernels.lora import RowAdapters
from quire.kernels.weight_memory import Memory

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ShardedTensor:
    """A tensor that arrives in pieces along one dimension (q, k and v of one fused projection).

    Pieces stay without a copy until the layer is packed, so they may be views of a mapped file.

    Args:
        pieces: their shapes, one per shard.
        dtype: readers get this dtype.
        dim: the pieces lie side by side along this dimension.
        accepts: dtypes a checkpoint may bring.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        dim: int = 0,
        accepts: tuple[torch.dtype, ...] = FLOATS,
    ) -> None:
        self.pieces = tuple(pieces)
        self.dtype = dtype
        self.accepts = accepts
        self._dim = dim
        self._arrived: dict[int, Tensor] = {}

    def shapes(self, shard: int) -> tuple[tuple[int, ...], ...]:
        """The shapes in which a checkpoint may bring the piece of a shard, the usual one first."""
        return (self.pieces[shard],)

    def load(self, shard: int, piece: Tensor) -> None:
        """Take the piece of one shard."""
        assert piece.shape == self.pieces[shard]
        self._arrived[shard] = piece

    def clear(self) -> None:
        """Drop the pieces, and release their pages if they belong to a mapped file."""
        for piece in self._arrived.values():
            pages.release(piece)
        self._arrived.clear()

    @property
    def is_complete(self) -> bool:
        return len(self._arrived) == len(self.pieces)

    @property
    def device(self) -> torch.device:
        """The device of the pieces that have arrived."""
        return next(iter(self._arrived.values())).device

    @property
    def whole(self) -> Tensor:
        """All pieces; they must have arrived. A single piece with the right dtype is not copied."""
        assert self.is_complete
        if len(self.pieces) == 1:
            return self._arrived[0].to(self.dtype)
        sizes = [shape[self._dim] for shape in self.pieces]
        shape = list(self.pieces[0])
        shape[self._dim] = sum(sizes)
        whole = pages.scratch(tuple(shape), self.dtype, self.device)
        for shard, part in enumerate(torch.split(whole, sizes, self._dim)):
            part.copy_(self._arrived[shard])
        return whole

    @property
    def owned(self) -> Tensor:
        """`whole` in its own memory: a kept tensor must not hold the checkpoint's file or scratch memory."""
        whole = self.whole
        # On a GPU the piece is a copy already, and nobody else holds it.
        return whole.clone() if whole.device.type == "cpu" else whole

    def row_bands(self) -> Iterator[Tensor]:
        """The rows of all pieces in order, a band at a time (see pages.row_bands). The pieces must be cut by rows."""
        assert self._dim == 0
        if all(shape[0] % PANEL_WIDTH == 0 for shape in self.pieces[:-1]):
            parts = [self._arrived[shard] for shard in range(len(self.pieces))]
        else:
            parts = [self.whole]
        for part in parts:
            for band in pages.row_bands(part):
                yield band.to(self.dtype)


@dataclass(frozen=True)
class CheckedTensor:
    """A tensor of a checkpoint without new information. It is compared with the expected values and dropped.

    Args:
        pieces: shapes, one per shard.
        accepts: dtypes a checkpoint may bring.
        problem: describes the problem of a piece's values; None: they are right.
        also: other shapes of a piece that are accepted.
    """

    pieces: tuple[tuple[int, ...], ...]
    accepts: tuple[torch.dtype, ...]
    problem: Callable[[Tensor], str | None]
    also: tuple[tuple[int, ...], ...] = ()

    def shapes(self, shard: int) -> tuple[tuple[int, ...], ...]:
        """The shapes in which a checkpoint may bring the piece of a shard, the usual one first."""
        return (self.pieces[shard], *self.also)

    def loader(self, name: str) -> Callable[[Tensor], None]:
        """A function that raises WeightsError about the tensor `name` if its values are wrong."""

        def check(piece: Tensor) -> None:
            if (problem := self.problem(piece)) is not None:
                raise WeightsError(f"{name} {problem}")

        return check


class LinearLayer(Protocol):
    """The part of layers.linear.Linear that a scheme may read and write."""

    in_features: int
    out_features: int
    shards: tuple[tuple[str, int], ...]  # (name, out-features)
    dtype: torch.dtype
    tensors: dict[str, ShardedTensor]  # the key is the last part of the checkpoint's name; finalize empties it
    checked_tensors: dict[str, CheckedTensor]
    weight: Any  # the scheme's own form, set by finalize
    weight_memory: Memory  # the memory of the packed form on a CPU
    bias: Tensor | None  # [N]


class QuantScheme(Protocol):
    """One weight format. A scheme has no state: the state is in the layer."""

    def create_weights(self, layer: LinearLayer) -> None:
        """Fill `layer.tensors` with the checkpoint's tensors for this layer, without the bias."""
        ...

    def finalize(self, layer: LinearLayer) -> None:
        """Turn the complete tensors into the form that `apply` reads, set `layer.weight`, release the tensors.

        Raises WeightsError for values that the format does not allow.
        """
        ...

    def apply(
        self,
        layer: LinearLayer,
        x_TK: Tensor,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """x @ weight.T + bias, plus the additions of adapters: [T, N] in `out_dtype` or x's dtype.

        On a CPU, the result is in `out` if that is given.
        """
        ...

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        """weight[rows_T] -> [T, K] in the layer's dtype: embedding lookup. rows_T int64, each in [0, N)."""
        ...

    def weight_bytes(self, layer: LinearLayer) -> int:
        """Bytes of `layer.weight`."""
        ...


def check_finite(scales: Tensor) -> None:
    """Raise WeightsError if a scale is NaN or infinite."""
    if not scales.isfinite().all():
        raise WeightsError("a scale is not a finite number")


def plain_weight(layer: LinearLayer) -> ShardedTensor:
    """The tensor `weight` [N, K] of a checkpoint in floating point."""
    return ShardedTensor([(num_outputs, layer.in_features) for _, num_outputs in layer.shards], layer.dtype)
