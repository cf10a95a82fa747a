"""The up-projection of latent attention. Each head has one matrix for keys and one for values.

The key of a head is `k = W_k c` for latents c, so q.k is `(W_k^T q).c`. Queries are brought into the space of the
latents, attention runs there, and its result goes through W_v (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: absorbed
matrices).

Dimensions: T tokens, H heads, L latents, K elements of a key that do not rotate, V elements of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.formats.stored_linear import StoredLinear
from quire.kernels.head_linear import PackedHeads, head_linear, pack_heads
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.layers.weight_slot import WeightSlots
from quire.quantization.select import select_scheme


class UpProjection:
    """The matrices of all heads. They arrive in the checkpoint's format, and memory holds them in the model's dtype.

    Args:
        stored: the stored form of one weight that has the matrices of keys and values, or one form for each of both.
    """

    held = ("keys", "values")

    def __init__(self, stored: Sequence[StoredLinear], dtype: torch.dtype) -> None:
        self._arriving = [(each.shape, Linear(each.shape, dtype=dtype, scheme=select_scheme(each))) for each in stored]
        for _, layer in self._arriving:
            layer.weight_memory = _passing_memory
        self.keys: PackedHeads | None = None
        self.values: PackedHeads | None = None

    def to_latents(self, q_THK: Tensor, out_THL: Tensor) -> None:
        """Multiply each head's query by the transposed key matrix: q [T, H, K] -> out [T, H, L]."""
        assert self.keys is not None
        head_linear(q_THK, self.keys, out_THL)

    def to_values(self, x_THL: Tensor) -> Tensor:
        """Multiply each head's weighted latents by the value matrix. The result is [T, H, V]."""
        assert self.values is not None
        return head_linear(x_THL, self.values)

    def slots(self) -> WeightSlots:
        for shape, layer in self._arriving:
            for name, slot in layer.slots():
                yield name, replace(slot, load=partial(self._load, shape, layer, slot.load))

    def _load(self, shape: LinearShape, layer: Linear, load: Callable[[Tensor], None], tensor: Tensor) -> None:
        load(tensor)
        if layer.weight is None:
            return
        weight_NK = layer.scheme.rows(layer, torch.arange(layer.out_features, device=tensor.device))
        layer.weight = None
        first, *others = shape.matrices
        if not others:
            packed = pack_heads(weight_NK.view(first.num_heads, first.N, first.K))
            if layer is self._arriving[0][1]:
                self.keys = packed
            else:
                self.values = packed
            return
        keys, (values,) = first, others
        keys_HKL, values_HVL = weight_NK.view(keys.num_heads, -1, values.K).split_with_sizes((keys.K, values.N), 1)
        self.keys, self.values = pack_heads(keys_HKL.mT), pack_heads(values_HVL)

    def weight_bytes(self) -> int:
        return sum(stack.nbytes for stack in (self.keys, self.values) if stack is not None)


def _passing_memory(num_bytes: int) -> Tensor:
    """Memory uint8 [num_bytes] that is freed with its tensor. A region of weights would stay longer."""
    return torch.empty(num_bytes, dtype=torch.uint8)
