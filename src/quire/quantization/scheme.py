"""The contract of a weight format, and the tensors that a linear layer receives from a checkpoint.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class ShardedTensor:
    """A tensor that arrives in pieces along its first dimension (q, k and v of one fused projection).

    Memory is taken when the first piece arrives, so that a model holds few unpacked layers at a time. A piece that is
    the whole is kept as it is, without a copy: `is_borrowed` then says that the memory belongs to whoever brought it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.data: Tensor | None = None
        self.is_borrowed = False
        self._num_missing = shape[0]

    def load(self, offset: int, piece: Tensor) -> None:
        """Take rows [offset, offset + len(piece)); converted to the tensor's dtype."""
        num_rows = piece.shape[0]
        assert piece.shape[1:] == self.shape[1:]
        assert offset + num_rows <= self.shape[0]
        if num_rows == self.shape[0]:
            self.data = piece.to(self.dtype)
            self.is_borrowed = self.data.data_ptr() == piece.data_ptr()
        else:
            if self.data is None:
                self.data = torch.empty(self.shape, dtype=self.dtype, device=piece.device)
            self.data[offset : offset + num_rows] = piece
        self._num_missing -= num_rows

    @property
    def is_complete(self) -> bool:
        return self._num_missing == 0


class LinearLayer(Protocol):
    """What a scheme may read and write of layers.linear.Linear."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    tensors: dict[str, ShardedTensor]  # by the last part of the checkpoint's name; emptied by finalize
    weight: Any  # the scheme's own form, set by finalize
    bias: Tensor | None  # [N]


class QuantScheme(Protocol):
    """One weight format. Stateless: the state is in the layer."""

    def create_weights(self, layer: LinearLayer) -> None:
        """Fill `layer.tensors` with what the checkpoint holds for this layer, the bias aside."""
        ...

    def finalize(self, layer: LinearLayer) -> None:
        """All tensors are there: bring them into the form `apply` reads, set `layer.weight`, release the tensors."""
        ...

    def apply(self, layer: LinearLayer, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight.T + bias -> [T, N] in x's dtype or `out_dtype`."""
        ...

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        """weight[rows_T] -> [T, K] in the layer's dtype: embedding lookup. rows_T int64, each in [0, N)."""
        ...

    def weight_bytes(self, layer: LinearLayer) -> int:
        """Bytes that `layer.weight` takes."""
        ...
