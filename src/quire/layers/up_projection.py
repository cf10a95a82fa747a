"""The up-projection of latent attention, taken apart into a matrix per head for keys and one for values.

Keys of a head are `k = W_k c` for latents c, so q.k is `(W_k^T q).c`: queries go to the space of the latents, attention
runs there, and its result goes through W_v (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: absorbed matrices).
Dimensions: T tokens, H heads, L latents, K elements of a key that do not rotate, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.formats.stored_linear import StoredLinear
from quire.kernels.head_linear import PackedHeads, head_linear, pack_heads
from quire.layers.linear import Linear
from quire.layers.weight_slot import WeightSlots
from quire.quantization.select import select_scheme


class UpProjection:
    """The weight arrives in the checkpoint's format, and is held in the model's dtype.

    Args:
        stored: its shape's `matrices` are (H, L, K) and (H, V, L).
    """

    held = ("keys", "values")

    def __init__(self, stored: StoredLinear, dtype: torch.dtype) -> None:
        self._stacks = stored.shape.matrices
        self._arriving = Linear(stored.shape, dtype=dtype, scheme=select_scheme(stored))
        self._arriving.weight_memory = _passing_memory
        self.keys: PackedHeads | None = None
        self.values: PackedHeads | None = None

    def to_latents(self, q_THK: Tensor, out_THL: Tensor) -> None:
        """The transposed matrices of keys, times each head's query."""
        assert self.keys is not None
        head_linear(q_THK, self.keys, out_THL)

    def to_values(self, x_THL: Tensor) -> Tensor:
        """[T, H, V]: the matrices of values, times each head's weighted latents."""
        assert self.values is not None
        return head_linear(x_THL, self.values)

    def slots(self) -> WeightSlots:
        for name, slot in self._arriving.slots():
            yield name, replace(slot, load=partial(self._load, slot.load))

    def _load(self, load: Callable[[Tensor], None], tensor: Tensor) -> None:
        load(tensor)
        layer = self._arriving
        if layer.weight is None:
            return
        weight_NL = layer.scheme.rows(layer, torch.arange(layer.out_features, device=tensor.device))
        layer.weight = None
        (H, L, K), (_, V, _) = self._stacks
        keys_HKL, values_HVL = weight_NL.view(H, K + V, L).split_with_sizes((K, V), 1)
        self.keys, self.values = pack_heads(keys_HKL.mT), pack_heads(values_HVL)

    def weight_bytes(self) -> int:
        return sum(stack.nbytes for stack in (self.keys, self.values) if stack is not None)


def _passing_memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that is free again with the tensor; regions of weights stay until their last tensor is gone."""
    return torch.empty(num_bytes, dtype=torch.uint8)
