"""Linear layers whose weight may be fused from several tensors of the checkpoint.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.layers.weight_slot import WeightSlot, WeightSlots
from quire.quantization.scheme import QuantScheme, ShardedTensor


class Linear:
    """y = x W^T + b. Packs itself as soon as the last of its tensors has arrived.

    Args:
        in_features: K.
        shards: (name in the checkpoint, rows) in the order of the output columns, as (("q_proj", 64), ("k_proj", 16)).
        bias: every shard has one.
        dtype: of weight, input and output.
        scheme: how the weight is stored and applied.
    """

    def __init__(
        self,
        in_features: int,
        shards: tuple[tuple[str, int], ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        scheme: QuantScheme,
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(rows for _, rows in shards)
        self.shards = shards
        self.dtype = dtype
        self.scheme = scheme
        self.tensors: dict[str, ShardedTensor] = {}
        self.weight: Any = None
        self.bias: Tensor | None = None
        scheme.create_weights(self)
        self._bias_tensor = ShardedTensor((self.out_features,), dtype) if bias else None
        self._apply = scheme.apply

    def __call__(self, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._apply(self, x_TK, out_dtype)

    def slots(self) -> WeightSlots:
        """Where the tensors of the checkpoint go, named `<shard>.<tensor>`."""
        named = dict(self.tensors)
        if self._bias_tensor is not None:
            named["bias"] = self._bias_tensor
        for suffix, tensor in named.items():
            offset = 0
            rows_per_output = tensor.shape[0] / self.out_features
            for shard, num_outputs in self.shards:
                num_rows = int(num_outputs * rows_per_output)
                yield f"{shard}.{suffix}", WeightSlot((num_rows, *tensor.shape[1:]), self._loader(tensor, offset))
                offset += num_rows

    def _loader(self, tensor: ShardedTensor, offset: int) -> Callable[[Tensor], None]:
        def load(piece: Tensor) -> None:
            tensor.load(offset, piece)
            self._finish_if_complete()

        return load

    def _finish_if_complete(self) -> None:
        bias = self._bias_tensor
        if not all(tensor.is_complete for tensor in self.tensors.values()) or not (bias is None or bias.is_complete):
            return
        if bias is not None:
            assert bias.data is not None
            self.bias = bias.data.clone() if bias.is_borrowed else bias.data
        arrived = [*self.tensors.values(), *([bias] if bias is not None else [])]
        self.scheme.finalize(self)
        for tensor in arrived:  # the slots live as long as the model: without this they hold every weight a second time
            tensor.data = None

    def weight_bytes(self) -> int:
        """Bytes held after loading."""
        return self.scheme.weight_bytes(self) + (0 if self.bias is None else self.bias.nbytes)
