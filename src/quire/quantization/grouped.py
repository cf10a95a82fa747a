"""Integer weights in groups along K, from quantized checkpoints or made while loading.

Dimensions: T tokens, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.hf_config.layer_format import LayerFormat
from quire.kernels.grouped import grouped_linear, grouped_rows, pack_grouped, pack_grouped_bands, quantize_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.lora import RowAdapters
from quire.logs import get_logger
from quire.quantization.scheme import LinearLayer, check_finite, plain_weight

logger = get_logger(__name__)


@cache
def _say_once(message: str) -> None:
    """Log a warning only once, because often it holds for hundreds of layers."""
    logger.warning(message)


class Grouped:
    """The common part of all schemes with an integer weight in groups, after the weight is packed."""

    def apply(
        self,
        layer: LinearLayer,
        x_TK: Tensor,
        out_dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        return grouped_linear(x_TK, layer.weight, layer.bias, out_dtype, out, adapters)

    def rows(self, layer: LinearLayer, rows_T: Tensor) -> Tensor:
        return grouped_rows(layer.weight, rows_T, layer.dtype)

    def weight_bytes(self, layer: LinearLayer) -> int:
        return int(layer.weight.nbytes)


class QuantizedOnLoad(Grouped):
    """Weights arrive in floating point and are rounded to the nearest codes of the format."""

    def __init__(self, weight_format: GroupedFormat) -> None:
        self._format = weight_format

    def create_weights(self, layer: LinearLayer) -> None:
        layer.tensors["weight"] = plain_weight(layer)

    def finalize(self, layer: LinearLayer) -> None:
        weight_NK = layer.tensors.pop("weight")
        bits, group_size = self._format.bits, self._format.group_size_of(layer.in_features)
        bands = (quantize_grouped(band_NK, bits, group_size) for band_NK in weight_NK.row_bands())
        layer.weight = pack_grouped_bands(bands, layer.out_features, layer.weight_memory)


class Layout(Protocol):
    """The tensors in which one kind of checkpoint stores a grouped weight.

    `group_size` is the group size in memory: the whole row if the format has no groups.
    """

    def create_weights(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> None:
        """Fill `layer.tensors`, and `layer.checked_tensors` with tensors that the format determines."""
        ...

    def unpack(self, layer: LinearLayer, source: LayerFormat, group_size: int) -> GroupedWeight:
        """The weight from `layer.tensors`, with scales in float32.

        Raises WeightsError for values that the format does not allow.
        """
        ...


class GroupedCheckpoint(Grouped):
    """Weights arrive in integers."""

    def __init__(self, layout: Layout, source: LayerFormat, held: GroupedFormat) -> None:
        self._layout, self._source, self._held = layout, source, held

    def create_weights(self, layer: LinearLayer) -> None:
        self._layout.create_weights(layer, self._source, self._held.group_size_of(layer.in_features))

    def finalize(self, layer: LinearLayer) -> None:
        weight = self._layout.unpack(layer, self._source, self._held.group_size_of(layer.in_features))
        layer.tensors.clear()
        check_finite(weight.scales_NG)
        layer.weight = pack_grouped(self._with_held_scales(weight), layer.weight_memory)

    def _with_held_scales(self, weight: GroupedWeight) -> GroupedWeight:
        """The weight with float16 scales if the plan says so and they are exact, which is nearly always true."""
        half_NG = weight.scales_NG.half()
        if self._held.scales == "float16" and torch.equal(half_NG.float(), weight.scales_NG):
            return replace(weight, scales_NG=half_NG)
        if self._held.scales == "float16":
            _say_once("layers have scales that float16 cannot hold: they stay in float32 and take more memory")
        return replace(weight, scales_NG=weight.scales_NG.clone())
