"""Token embeddings and the output projection, which may share one weight.

Dimensions: T tokens, R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.weight_slot import WeightSlot, WeightSlots
from quire.quantization.scheme import QuantScheme


class Embedding:
    """A table of its own: row lookup."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.weight_VD = torch.empty(0, dtype=dtype)
        self._shape = (vocab_size, hidden_size)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        return F.embedding(token_ids_T, self.weight_VD)

    def slots(self) -> WeightSlots:
        yield "weight", WeightSlot(self._shape, self._load)

    def _load(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD.to(self.weight_VD.dtype, copy=True)

    def weight_bytes(self) -> int:
        return self.weight_VD.nbytes


class OutputProjection(Linear):
    """hidden -> logits."""

    def __init__(self, hidden_size: int, vocab_size: int, name: str, dtype: torch.dtype, scheme: QuantScheme) -> None:
        super().__init__(hidden_size, ((name, vocab_size),), bias=False, dtype=dtype, scheme=scheme)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V] in float32."""
        return self(hidden_RD, torch.float32)

    def rows(self, token_ids_T: Tensor) -> Tensor:
        """The weights of these tokens, [T, D]."""
        return self.scheme.rows(self, token_ids_T)


class TiedEmbedding:
    """Row lookup in the packed weight of the output projection: the largest matrix of a small model is held once."""

    def __init__(self, output: OutputProjection) -> None:
        self._output = output

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        return self._output.rows(token_ids_T)
