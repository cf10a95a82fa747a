"""Token embeddings and the output projection, which may share one weight.

Dimensions: T tokens, R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.formats.stored_linear import StoredLinear
from quire.kernels import cpu, gpu
from quire.kernels.lora import LoraTable, add_lora
from quire.kernels.pages import copied
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.layers.weight_slot import Extent, WeightSlot, WeightSlots
from quire.quantization.select import select_scheme


class Lookup(ABC):
    """Looks rows of a table up, and adds what the rows' adapters add. int64 ids [T] -> [T, D]."""

    lora: LoraTable | None = None  # None: no adapter may

    def __call__(self, token_ids_T: Tensor, adapter_slots_T: Tensor | None = None) -> Tensor:
        rows_TD = self._rows(token_ids_T)
        if adapter_slots_T is None or not _adds(self.lora, rows_TD):
            return rows_TD
        assert self.lora is not None
        return add_lora(rows_TD.float(), token_ids_T, adapter_slots_T, self.lora, rows_TD.dtype)

    @abstractmethod
    def _rows(self, token_ids_T: Tensor) -> Tensor:
        """The rows of the base model, [T, D]."""


def _adds(lora: LoraTable | None, x: Tensor) -> bool:
    """Whether additions are computed. Few adapters change embeddings or logits, so they are left out if none does.

    A captured step on a GPU always computes them, because such an adapter may come later.
    """
    return lora is not None and (gpu.takes(x) or not lora.is_empty)


class Embedding(Lookup):
    """Looks rows up in a table of its own.

    Args:
        shape: the shape of the table. Its out-features are tokens; a rank may have only some of them.
    """

    held = ("weight_VD",)

    def __init__(self, shape: LinearShape, dtype: torch.dtype) -> None:
        self.weight_VD = torch.empty(0, dtype=dtype)
        self._shape = (shape.whole().out_features, shape.in_features)
        self._own = range(self._shape[0]) if shape.share is None else shape.share.own_rows(0)

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        return F.embedding(token_ids_T, self.weight_VD)

    def slots(self) -> WeightSlots:
        yield "weight", WeightSlot(self._shape, self._load, extent=Extent(self._shape[0], (self._own,)))

    def _load(self, weight_VD: Tensor) -> None:
        self.weight_VD = copied(weight_VD[self._own.start : self._own.stop], self.weight_VD.dtype)

    def weight_bytes(self) -> int:
        return self.weight_VD.nbytes


class OutputProjection(Linear):
    """The output projection, from hidden states to logits."""

    def __init__(self, stored: StoredLinear, dtype: torch.dtype) -> None:
        super().__init__(stored.shape, dtype=dtype, scheme=select_scheme(stored))
        self._kept_N: Tensor | None = None  # see keep_memory

    def keep_memory(self) -> None:
        """From now on, all logits on a CPU use the same memory: the next logits overwrite them.

        The allocator gives 32 MB or more back to the system. Fresh memory of that size took a tenth of the time of each
        step of 64 rows (benchmarks/NOTES.md).
        """
        self._kept_N = torch.empty(0)

    def logits(self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, out_RV: Tensor | None = None) -> Tensor:
        """Logits [R, V] in float32. `out_RV`: memory for the result, on a CPU; None: new memory."""
        slots_R = adapter_slots_R if _adds(self.lora, hidden_RD) else None
        if out_RV is None and self._kept_N is not None and cpu.takes(hidden_RD):
            out_RV = self.memory(len(hidden_RD), self.out_features)
        return self(hidden_RD, torch.float32, out_RV, slots_R)

    def memory(self, num_rows: int, num_tokens: int) -> Tensor:
        """Memory for logits [num_rows, num_tokens] on a CPU, in float32: see keep_memory."""
        size = num_rows * num_tokens
        if self._kept_N is None:
            return torch.empty((num_rows, num_tokens), dtype=torch.float32)
        if len(self._kept_N) < size:
            self._kept_N = torch.empty(size, dtype=torch.float32)
        return self._kept_N[:size].view(num_rows, num_tokens)

    def rows(self, token_ids_T: Tensor) -> Tensor:
        """The weights of these tokens, [T, D]."""
        return self.scheme.rows(self, token_ids_T)


class PackedEmbedding(Lookup):
    """Looks rows up in the packed weight of the output projection, so that memory holds the largest matrix once."""

    def __init__(self, packed: OutputProjection) -> None:
        self._packed = packed

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        return self._packed.rows(token_ids_T)
