"""How many bytes a weight takes in each integer format: the arithmetic that planning and loading share.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass

_PANEL_WIDTH = 64  # kPanelWidth of csrc/include/quire/kernels/gemm.h
_ROW_UNIT = 64  # kAmxKUnit there


@dataclass(frozen=True)
class GroupedFormat:
    """Integer codes with one float32 scale per group of elements along K.

    Args:
        bits: of a code, 8 or 4.
        group_size: elements that share a scale; None: the whole row.
    """

    bits: int
    group_size: int | None

    def group_size_of(self, K: int) -> int:
        """Elements per group of a weight with K in-features."""
        return self.group_size or -(-K // _ROW_UNIT) * _ROW_UNIT

    def num_bytes(self, N: int, K: int) -> int:
        """Bytes of a packed weight [N, K], padding and scales included."""
        group_size = self.group_size_of(K)
        num_groups = -(-K // group_size)
        num_rows = -(-N // _PANEL_WIDTH) * _PANEL_WIDTH
        return num_rows * num_groups * (4 + group_size * self.bits // 8)


@dataclass(frozen=True)
class OnLoadFormat:
    """What `--quantization` makes of a checkpoint in floating point while it loads."""

    linear: GroupedFormat  # of the layers
    output: GroupedFormat  # of the output projection, and of embeddings tied to it
    description: str


ON_LOAD: dict[str, OnLoadFormat] = {
    "int8": OnLoadFormat(GroupedFormat(8, None), GroupedFormat(8, None), "8-bit weights, a scale per output channel"),
    "int4": OnLoadFormat(
        GroupedFormat(4, 128),
        GroupedFormat(8, None),
        "4-bit weights in groups of 128; the output projection in 8 bits, as it costs the most quality",
    ),
}
