"""FP8 weights (e4m3), from quantized checkpoints or made while loading. Activations stay in floating point.

A checkpoint has weight [N, K] in float8_e4m3fn and scales to multiply the weights by: one per tensor, per output
channel, or per block of rows and columns (`weight_scale_inv`, which is no inverse despite its name). In memory there is
always one scale per output channel and group along K, so that shards with different scales are fused exactly.
Dimensions: T tokens, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.formats.weight_format import Fp8Format
from quire.hf_config.layer_format import LayerFormat
from quire.kernels.fp8 import Rows, fp8_linear, fp8_rows, pack_fp8, pack_fp8_bands, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.lora import RowAdapters
from quire.quantization.scheme import FLOATS, CheckedTensor, LinearLayer, ShardedTensor, check_finite, plain_weight


class _Fp8:
    """The part that both schemes share after the weight is packed."""

    def apply(
        self,
        layer: LinearLayer,
        x_TK: Rows,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return fp8_linear(x_TK, layer.weight, layer.bias, out_dtype, out, adapters)

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        return fp8_rows(layer.weight, rows_T, layer.dtype)

    def weight_bytes(self, layer: LinearLayer) -> int:
        return int(layer.weight.nbytes)


class Fp8OnLoad(_Fp8):
    """Weights arrive in floating point and are rounded to the nearest codes, with a scale per output channel."""

    def create_weights(self, layer: LinearLayer) -> None:
        layer.tensors["weight"] = plain_weight(layer)

    def finalize(self, layer: LinearLayer) -> None:
        bands = layer.tensors.pop("weight").row_bands()
        layer.weight = pack_fp8_bands(map(quantize_fp8, bands), layer.out_features, layer.weight_memory)


class Fp8Checkpoint(_Fp8):
    """Weights arrive as codes and scales."""

    def __init__(self, source: LayerFormat, held: Fp8Format) -> None:
        self._source, self._held = source, held

    def create_weights(self, layer: LinearLayer) -> None:
        K, sizes = layer.in_features, [size for _, size in layer.shards]
        codes = torch.float8_e4m3fn
        layer.tensors["weight"] = ShardedTensor([(size, K) for size in sizes], codes, 0, (codes,))
        if self._source.block is None:
            layer.tensors[self._source.scale_name] = _ChannelScales(sizes)
        else:
            layer.tensors[self._source.scale_name] = _BlockScales(sizes, K, self._source.block)
        # Scales of activations are not used: activations stay in floating point.
        scalars: tuple[tuple[int, ...], ...] = tuple((1,) for _ in sizes)
        layer.checked_tensors["input_scale"] = CheckedTensor(scalars, FLOATS, lambda _: None, also=((),))

    def finalize(self, layer: LinearLayer) -> None:
        codes, scales = layer.tensors["weight"], layer.tensors[self._source.scale_name]
        layer.tensors.clear()
        check_finite(scales.whole)
        if (scales.whole < 0).any():
            raise WeightsError("a scale is negative")
        group_size = self._held.group_size_of(layer.in_features)
        layer.weight = pack_fp8(Fp8Weight(codes.whole, scales.whole, group_size), layer.weight_memory)
        if not layer.weight.is_packed:
            layer.weight = pack_fp8(Fp8Weight(codes.owned, scales.owned, group_size))


class _ChannelScales(ShardedTensor):
    """Scales [N, 1]. A shard brings one per output channel or one for all, each in several shapes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__([(size, 1) for size in sizes], torch.float32)

    def shapes(self, shard: int) -> tuple[tuple[int, ...], ...]:
        size = self.pieces[shard][0]
        return (size, 1), (size,), (), (1,), (1, 1)

    def load(self, shard: int, piece: Tensor) -> None:
        super().load(shard, piece.reshape(-1, 1).expand(self.pieces[shard]))


class _BlockScales(ShardedTensor):
    """Scales [N, G]. A shard brings one per block. Its first block begins at its first row."""

    def __init__(self, sizes: list[int], K: int, block: tuple[int, int]) -> None:
        self._block_rows, block_columns = block
        super().__init__([(size, -(-K // block_columns)) for size in sizes], torch.float32)

    def shapes(self, shard: int) -> tuple[tuple[int, ...], ...]:
        size, num_groups = self.pieces[shard]
        return ((-(-size // self._block_rows), num_groups),)

    def load(self, shard: int, piece: Tensor) -> None:
        super().load(shard, piece.repeat_interleave(self._block_rows, 0)[: self.pieces[shard][0]])
