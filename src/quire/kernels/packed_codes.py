"""The common part of packed weights with codes and scales, both integers and FP8.

Dimensions: K in-features, N out-features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.grouped_weight import GroupedWeight

W = TypeVar("W", Fp8Weight, GroupedWeight)


@dataclass(frozen=True)
class PackedCodes(Generic[W]):
    """A weight in the form that its product reads. Only the code that has packed it knows the layout.

    Attributes:
        data: the kernels' panel layout, uint8; None: the product computes with `weight`.
    """

    data: Tensor | None
    weight: W | None
    N: int
    K: int

    @property
    def is_packed(self) -> bool:
        return self.data is not None

    @property
    def nbytes(self) -> int:
        if self.data is not None:
            return self.data.nbytes
        assert self.weight is not None
        return self.weight.nbytes

    @property
    def tensor(self) -> Tensor:
        """Any tensor of the weight. It shows the device."""
        if self.data is not None:
            return self.data
        assert self.weight is not None
        return self.weight.codes_NK
