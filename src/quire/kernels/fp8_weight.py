"""An FP8 weight: codes in e4m3 (torch.float8_e4m3fn) and float32 scales per group along K and output column.

Dimensions: N out-features, K in-features, G groups of group_size along K (the last may be cut).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.formats.weight_format import K_UNIT
from quire.kernels.guards import check_dtype, check_filled, check_places, check_shape


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 weight: weight[n, k] = scales[n, k // group_size] * codes[n, k].

    With a scale per output channel, the whole row is one group. A scale per tensor is repeated for every row.

    Attributes:
        codes_NK: float8_e4m3fn; rows may be strided.
        scales_NG: float32.
        group_size: the number of elements along K that share a scale, a multiple of K_UNIT.

    Raises:
        ValueError, TypeError: the tensors do not fit each other.
    """

    codes_NK: Tensor
    scales_NG: Tensor
    group_size: int

    def __post_init__(self) -> None:
        check_places(codes=self.codes_NK, scales=self.scales_NG)
        check_filled("codes", self.codes_NK, "NK")
        check_dtype("codes", self.codes_NK, torch.float8_e4m3fn)
        if self.group_size <= 0 or self.group_size % K_UNIT != 0:
            raise ValueError(f"group_size is {self.group_size}, expected a multiple of {K_UNIT} above 0")
        N, K = self.shape
        check_shape("scales", self.scales_NG, N, -(-K // self.group_size))
        check_dtype("scales", self.scales_NG, torch.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.codes_NK.shape
        return N, K

    @property
    def nbytes(self) -> int:
        return self.codes_NK.nbytes + self.scales_NG.nbytes

    @staticmethod
    def joined(bands: Sequence[Fp8Weight]) -> Fp8Weight:
        """The weight with the rows of all bands."""
        if len(bands) == 1:
            return bands[0]
        codes_NK = torch.cat([band.codes_NK.view(torch.uint8) for band in bands]).view(torch.float8_e4m3fn)
        return Fp8Weight(codes_NK, torch.cat([band.scales_NG for band in bands]), bands[0].group_size)

    def rows(self, rows_T: Tensor) -> Fp8Weight:
        """The weight of some out-features. rows_T: int64, each in [0, N)."""
        codes_TK = self.codes_NK.view(torch.uint8)[rows_T].view(torch.float8_e4m3fn)
        return Fp8Weight(codes_TK, self.scales_NG[rows_T], self.group_size)
