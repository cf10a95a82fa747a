"""A weight of short codes in groups along K. Every integer format, and MXFP4, takes this form before it is packed.

Dimensions: N out-features, K in-features, G groups of group_size along K (the last may be cut), S super-groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.formats.weight_format import MAX_GROUP_SIZE, MAX_SUPER_ELEMENTS, GroupedFormat
from quire.kernels.guards import check_dtype, check_filled, check_places, check_shape

# The values of MXFP4's codes (OCP Microscaling Formats 1.0). Negative zero becomes 0, as integers have one zero.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """A weight of codes in one of three forms. Scale, zero and minimum are those of the group of k:

    - weight[n, k] = scale * (code - zero)
    - weight[n, k] = scale * code - minimum
    - weight[n, k] = scale * E2M1[code], for MXFP4, with a scale 2^(s - 127) for each 32 elements (OCP Microscaling
      Formats 1.0)

    Scales and minima are numbers. Or all of them are int8 factors of one number per super-group, as in GGUF's K-quants.
    Both ways are exact in float32. A super-group has at most MAX_SUPER_ELEMENTS elements.

    Attributes:
        codes_NK: uint8, below 2^bits; rows may be strided.
        bits: 2 to 6 or 8.
        group_size: the number of elements along K that share a scale: a multiple of 16, at most MAX_GROUP_SIZE. With 3
            and 5 bits it is 16 or a multiple of 32, and the size of a super-group is a multiple of 32 elements.
        scales_NG: float32 or float16; or int8 factors of `super_scales_NS`; or, for MXFP4, the s above as uint8, where
            255 means NaN.
        zeros_NG: uint8, the codes of the value 0; None: 2^(bits - 1), unless there are minima.
        minima_NG: float32 or float16, or int8 factors of `super_minima_NS`. A weight with minima has no zeros.
        super_scales_NS: float16.
        super_minima_NS: float16.
        super_size: the number of groups in a super-group.
        order_K: int64; column k of the codes belongs to in-feature order[k] (GPTQ's act-order). None: it belongs to k.

    Raises:
        ValueError, TypeError: the tensors do not fit each other, or a number is out of its range.
    """

    codes_NK: Tensor
    bits: int
    group_size: int
    scales_NG: Tensor
    zeros_NG: Tensor | None = None
    minima_NG: Tensor | None = None
    super_scales_NS: Tensor | None = None
    super_minima_NS: Tensor | None = None
    super_size: int = 1
    order_K: Tensor | None = None

    def __post_init__(self) -> None:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        check_places(**tensors)
        check_filled("codes_NK", self.codes_NK, "NK")
        check_dtype("codes_NK", self.codes_NK, torch.uint8)
        check_groups(self.bits, self.group_size)
        N, K = self.shape
        G, elements = -(-K // self.group_size), self.super_size * self.group_size
        _require(self.super_size >= 1, f"super_size is {self.super_size}, expected 1 or more")
        for name, x in tensors.items():
            if name.endswith("_NG"):
                check_shape(name, x, N, G)
            elif name.endswith("_NS"):
                check_shape(name, x, N, -(-G // self.super_size))
                check_dtype(name, x, torch.float16)
        for name in ("scales_NG", "minima_NG"):
            if name in tensors:
                powers = (torch.uint8,) if name == "scales_NG" else ()
                check_dtype(name, tensors[name], torch.float32, torch.float16, torch.int8, *powers)
        for factors_NG, x_NS in ((self.scales_NG, self.super_scales_NS), (self.minima_NG, self.super_minima_NS)):
            is_factors = factors_NG is not None and factors_NG.dtype == torch.int8
            _require(is_factors == (x_NS is not None), "int8 factors without numbers per super-group, or the reverse")
        if self.zeros_NG is not None:
            check_dtype("zeros_NG", self.zeros_NG, torch.uint8)
            _require(self.minima_NG is None, "zeros_NG and minima_NG are given, expected one of them")
        if self.super_scales_NS is not None:
            expected = f"expected at most {MAX_SUPER_ELEMENTS}"
            _require(elements <= MAX_SUPER_ELEMENTS, f"a super-group has {elements} elements, {expected}")
            has_whole_planes = self.bits not in (3, 5) or self.super_size == 1 or elements % 32 == 0
            _require(
                has_whole_planes, f"a super-group of {self.bits} bits has {elements} elements, expected 32 times n"
            )
            _require(self.zeros_NG is None, "zeros_NG beside factors, expected none")
            has_factors = (self.minima_NG is None) == (self.super_minima_NS is None)
            _require(has_factors, "minima_NG beside factors, expected int8 with super_minima_NS")
        else:
            is_plain = self.super_minima_NS is None and self.super_size == 1
            _require(
                is_plain, f"super_size is {self.super_size} without super_scales_NS, expected 1 and no super_minima_NS"
            )
        if self.has_floats:
            is_mxfp4 = (self.bits, self.group_size, self.zeros_NG, self.minima_NG) == (4, 32, None, None)
            got = f"{self.bits} bits in groups of {self.group_size}"
            _require(is_mxfp4, f"{got} with scales of 8 bits, expected MXFP4: 4 bits in groups of 32, no offsets")
        if self.order_K is not None:
            check_shape("order_K", self.order_K, K)
            check_dtype("order_K", self.order_K, torch.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        N, K = self.codes_NK.shape
        return N, K

    @property
    def has_floats(self) -> bool:
        """Whether it is MXFP4."""
        return self.scales_NG.dtype == torch.uint8

    @property
    def float_scales(self) -> Tensor:
        """The scales in float32, [N, G]. int8 factors become float32 factors."""
        return (self.scales_NG.view(torch.float8_e8m0fnu) if self.has_floats else self.scales_NG).float()

    @property
    def format(self) -> GroupedFormat:
        """The format of its packed form."""
        offsets_NG = self.zeros_NG if self.minima_NG is None else self.minima_NG
        return GroupedFormat(
            bits=self.bits,
            group_size=self.group_size,
            scales="e8m0" if self.has_floats else _name(self.scales_NG),
            offsets=None if offsets_NG is None else _name(offsets_NG),
            super_size=self.super_size,
            is_ordered=self.order_K is not None,
        )

    @property
    def input_group_size(self) -> int:
        """The number of elements of an input row that share a scale: a group or, with factors, a super-group."""
        return self.group_size * self.super_size

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))

    @staticmethod
    def joined(bands: Sequence[GroupedWeight]) -> GroupedWeight:
        """The weight with the rows of all bands. The columns of all bands have one order."""
        if len(bands) == 1:
            return bands[0]
        of_rows: dict[str, Any] = {
            name: torch.cat([getattr(band, name) for band in bands])
            for name, x in vars(bands[0]).items()
            if isinstance(x, Tensor) and name != "order_K"
        }
        return replace(bands[0], **of_rows)

    def rows(self, rows_T: Tensor) -> GroupedWeight:
        """The weight of some out-features. rows_T: int64, each in [0, N)."""
        of_rows: dict[str, Any] = {
            name: x[rows_T] for name, x in vars(self).items() if isinstance(x, Tensor) and name != "order_K"
        }
        return replace(self, **of_rows)


def check_groups(bits: int, group_size: int) -> None:
    """Raise ValueError for illegal bits or groups: see GroupedWeight."""
    _require(bits in (2, 3, 4, 5, 6, 8), f"bits are {bits}, expected 2 to 6 or 8")
    is_multiple = group_size % 16 == 0 and 16 <= group_size <= MAX_GROUP_SIZE
    _require(is_multiple, f"group_size is {group_size}, expected a multiple of 16 up to {MAX_GROUP_SIZE}")
    has_whole_planes = bits not in (3, 5) or group_size == 16 or group_size % 32 == 0
    _require(has_whole_planes, f"group_size is {group_size}, expected 16 or a multiple of 32 with {bits} bits")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _name(numbers: Tensor) -> str:
    return str(numbers.dtype).removeprefix("torch.")
