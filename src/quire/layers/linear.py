"""Linear layers whose weight may be fused from several tensors of the checkpoint.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.formats.stored_linear import StoredLinear
from quire.kernels import cpu, gpu
from quire.kernels.fp8 import PackedFp8, Rows, quantizes_activations
from quire.kernels.lora import LoraTable, RowAdapters
from quire.kernels.weight_memory import WEIGHTS, Memory
from quire.layer_spec.shapes import LinearShape
from quire.layers.rope import halves_from_pairs
from quire.layers.weight_slot import Extent, WeightSlot, WeightSlots
from quire.quantization.scheme import CheckedTensor, LinearLayer, QuantScheme, ShardedTensor
from quire.quantization.select import select_scheme


class Linear:
    """A linear layer, y = x W^T + b. It packs its weight when the last of its tensors has arrived.

    Args:
        shape: sizes, and names in the checkpoint.
        dtype: the dtype of weight, input and output.
        scheme: stores the weight and multiplies by it.
    """

    held = ("weight", "bias")

    def __init__(self, shape: LinearShape, *, dtype: torch.dtype, scheme: QuantScheme) -> None:
        self.in_features, self.out_features = shape.in_features, shape.out_features
        self.shards, self.is_adaptable = shape.shards, shape.is_adaptable
        self._paired_heads = shape.paired_heads or (0,) * len(shape.shards)
        self.dtype = dtype
        self.scheme = scheme
        self.tensors: dict[str, ShardedTensor] = {}
        self.checked_tensors: dict[str, CheckedTensor] = {}
        self.weight: Any = None
        self.weight_memory: Memory = WEIGHTS
        self.bias: Tensor | None = None
        self.lora: LoraTable | None = None  # the table of adapters; None: adapters may not change this layer
        scheme.create_weights(self)
        bias_shapes = [(num_outputs,) for _, num_outputs in shape.shards]
        self._bias_tensor = ShardedTensor(bias_shapes, dtype) if shape.bias else None
        self._share = shape.share
        # Describes the checkpoint's tensors; it never holds anything.
        self._whole = None if shape.share is None else Linear(shape.whole(), dtype=dtype, scheme=scheme)
        self._apply: Callable[..., Tensor] = scheme.apply

    def __call__(
        self,
        x_TK: Rows,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        adapter_slots_T: Tensor | None = None,
    ) -> Tensor:
        """The product, with the additions of the rows' adapters.

        Args:
            x_TK: may be quantized already if `quantizes` is true for it.
            out: takes the result, on a CPU.
            adapter_slots_T: int32, see kernels.lora; None: no row has an adapter.
        """
        if adapter_slots_T is None or self.lora is None:
            return self._apply(self, x_TK, out_dtype, out)
        return self._apply(self, x_TK, out_dtype, out, RowAdapters(self.lora, adapter_slots_T))

    def quantizes(self, x: Tensor) -> bool:
        """Whether the layer quantizes rows of x to FP8 before it multiplies. Only x's row count and device matter."""
        if self.lora is not None:  # the table reads the rows too
            return False
        weight = self.weight
        return isinstance(weight, PackedFp8) and gpu.takes(x) and quantizes_activations(x, weight, x.dtype)

    def observe(self, watch: Callable[[Tensor], None]) -> None:
        """Show every input to `watch` before the product, for calibration."""
        apply = self._apply

        def watched(
            layer: LinearLayer,
            x_TK: Rows,
            out_dtype: torch.dtype | None = None,
            out: Tensor | None = None,
            adapters: RowAdapters | None = None,
        ) -> Tensor:
            assert isinstance(x_TK, Tensor), "rows that are quantized already"
            watch(x_TK)
            return apply(layer, x_TK, out_dtype, out, adapters)

        self._apply = watched

    def slots(self) -> WeightSlots:
        """The slots of the checkpoint's tensors, named `<shard>.<tensor>`. A slot takes this rank's part of its
        tensor.
        """
        named = dict(self.tensors)
        if self._bias_tensor is not None:
            named["bias"] = self._bias_tensor
        if self._whole is not None:
            for name, slot in self._whole.slots():
                shard, _, suffix = name.rpartition(".")
                if suffix in named:
                    shapes = (slot.shape, *slot.other_shapes)
                    own = partial(self._load_share, named[suffix], shard, shapes)
                    slot = replace(slot, load=own, extent=self._extent(named[suffix], shard, shapes))
                yield name, slot
            return
        for index, (shard, _) in enumerate(self.shards):
            for suffix, tensor in named.items():
                load = self._loader(tensor, index)
                yield f"{shard}.{suffix}", _slot(tensor, index, load)
            for suffix, checked in self.checked_tensors.items():
                load = checked.loader(f"{shard}.{suffix}")
                yield f"{shard}.{suffix}", _slot(checked, index, load, is_required=False)

    def _loader(self, tensor: ShardedTensor, shard: int) -> Callable[[Tensor], None]:
        num_heads, num_rows = self._paired_heads[shard], self.shards[shard][1]

        def load(piece: Tensor) -> None:
            if num_heads and len(piece) != num_rows:
                raise WeightsError(
                    "its rows are not the layer's outputs, so heads that rotate in pairs cannot be reordered",
                    fix="Use the unquantized checkpoint of the model with --quantization",
                )
            tensor.load(shard, halves_from_pairs(piece, num_heads) if num_heads else piece)
            self._finish_if_complete()

        return load

    def _load_share(self, tensor: ShardedTensor, name: str, shapes: tuple[tuple[int, ...], ...], whole: Tensor) -> None:
        """Take views of this rank's rows from a tensor of the checkpoint. The tensor has one of these shapes."""
        assert self._share is not None
        form = shapes.index(tuple(whole.shape))
        for index, (shard, _) in enumerate(self.shards):
            if shard != name:
                continue
            part, first, num_rows = whole, self._share.own_rows(index).start, self._share.tensor_rows[index]
            for dim, (size, whole_size) in enumerate(zip(tensor.shapes(index)[form], whole.shape, strict=True)):
                if size != whole_size:  # rows, or words or blocks of several rows
                    part = part.narrow(dim, first * whole_size // num_rows, size)
            self._loader(tensor, index)(part)

    def _extent(self, tensor: ShardedTensor, name: str, shapes: tuple[tuple[int, ...], ...]) -> Extent | None:
        """The part of a tensor that `_load_share` reads; None: it reads all of the tensor."""
        assert self._share is not None
        own: list[range] = []
        columns: list[range] = []
        for index in (index for index, (shard, _) in enumerate(self.shards) if shard == name):
            first, num_rows = self._share.own_rows(index).start, self._share.tensor_rows[index]
            forms = list(zip(tensor.shapes(index), shapes, strict=True))
            (part, *_), (whole, *others) = tensor.shapes(index), shapes
            if not others and len(whole) == 2 and part[0] == whole[0] and part[1] != whole[1]:
                begin = first * whole[1] // num_rows  # words of outputs lie side by side
                columns.append(range(begin, begin + part[1]))
                continue
            if (
                any(part[1:] != whole[1:] or part == whole for part, whole in forms)
                or len({w[0] for _, w in forms}) > 1
            ):
                return None
            ((size, *_), (whole_size, *_)) = forms[0]
            begin = first * whole_size // num_rows
            own.append(range(begin, begin + size))
        if not columns:
            return Extent(shapes[0][0], tuple(own))
        num_rows, num_columns = shapes[0]
        columns.sort(key=lambda each: each.start)
        return None if own else Extent(num_rows, (range(num_rows),), num_columns, tuple(columns))

    def _finish_if_complete(self) -> None:
        bias = self._bias_tensor
        if not all(tensor.is_complete for tensor in self.tensors.values()) or not (bias is None or bias.is_complete):
            return
        if bias is not None:
            self.bias = bias.owned
        arrived = [*self.tensors.values(), *([bias] if bias is not None else [])]
        self.scheme.finalize(self)
        for tensor in arrived:  # the slots live as long as the model and would keep the checkpoint in memory
            tensor.clear()

    @property
    def own_rows(self) -> tuple[range, ...] | None:
        """For each shard, the rows of its tensor that this rank has; None: it has all rows."""
        share = self._share
        return None if share is None else tuple(share.own_rows(index) for index in range(len(self.shards)))

    @property
    def parts(self) -> tuple[Linear, ...]:
        """Only this layer; SplitLinear has several."""
        return (self,)

    def weight_bytes(self) -> int:
        """The bytes of the loaded weight."""
        return self.scheme.weight_bytes(self) + (0 if self.bias is None else self.bias.nbytes)


def _slot(
    tensor: ShardedTensor | CheckedTensor, shard: int, load: Callable[[Tensor], None], is_required: bool = True
) -> WeightSlot:
    shape, *other_shapes = tensor.shapes(shard)
    return WeightSlot(shape, load, tensor.accepts, is_required, tuple(other_shapes))


class SplitLinear:
    """A linear layer of several parts that are stored differently. Their outputs lie side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x_TK: Rows, *, adapter_slots_T: Tensor | None = None) -> Tensor:
        if not isinstance(x_TK, Tensor) or not cpu.takes(x_TK):
            return torch.cat([part(x_TK, adapter_slots_T=adapter_slots_T) for part in self.parts], dim=1)
        # Only kernels run here, so a decode step can be recorded.
        out_TN, columns = self._outputs(x_TK)
        for part, columns_TN in zip(self.parts, columns, strict=True):
            part(x_TK, out=columns_TN, adapter_slots_T=adapter_slots_T)
        return out_TN

    def without_first(self, x_TK: Rows) -> Tensor:
        """The outputs of all parts, but those of the first part are any numbers."""
        if not isinstance(x_TK, Tensor) or not cpu.takes(x_TK):
            others = [part(x_TK) for part in self.parts[1:]]
            any_TN = others[0].new_empty(others[0].shape[0], self.parts[0].out_features)
            return torch.cat([any_TN, *others], dim=1)
        out_TN, columns = self._outputs(x_TK)
        for part, columns_TN in zip(self.parts[1:], columns[1:], strict=True):
            part(x_TK, out=columns_TN)
        return out_TN

    def _outputs(self, x_TK: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory for the output, and the columns of each part in it."""
        sizes = [part.out_features for part in self.parts]
        out_TN = torch.empty((x_TK.shape[0], sum(sizes)), dtype=x_TK.dtype, device=x_TK.device)
        return out_TN, out_TN.split_with_sizes(sizes, 1)

    def quantizes(self, x: Tensor) -> bool:
        """Whether all parts quantize: see Linear."""
        return all(part.quantizes(x) for part in self.parts)

    def slots(self) -> WeightSlots:
        for part in self.parts:
            yield from part.slots()


Projection = Linear | SplitLinear


def make_linear(stored: Sequence[StoredLinear], dtype: torch.dtype) -> Projection:
    """A layer from ModelConfig.stored's answer, which has one entry or one per shard."""
    parts = [Linear(s.shape, dtype=dtype, scheme=select_scheme(s)) for s in stored]
    return parts[0] if len(parts) == 1 else SplitLinear(parts)
