"""Codes of a quantized KV cache in plain torch: the definition of correct for csrc/kernels/kv_codes.h.

float8 codes have no scale. int8 codes have one scale per row: the largest magnitude of the row / 127.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CODE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SMALLEST_ROW = 1e-30  # rows of smaller numbers get codes 0, because 127 / largest could overflow


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Codes of float32 rows, rounded to nearest, and for int8 the scale of each row (float32).

    A number above the range of a float8 becomes its largest number. Infinities stay infinite in e5m2 and become NaN in
    e4m3. A row of int8 that is not finite gets the scale NaN.
    """
    if dtype != torch.int8:
        limit = torch.finfo(dtype).max
        unbounded = x if dtype == torch.float8_e5m2 else torch.full_like(x, math.nan)
        return torch.where(x.isfinite(), x.clamp(-limit, limit), unbounded).to(dtype), None
    largest = x.abs().amax(-1, keepdim=True)
    is_finite = x.isfinite().all(-1, keepdim=True)
    is_used = is_finite & (largest >= _SMALLEST_ROW)
    # Both operands are tensors. For number / tensor, torch multiplies by the reciprocal, which rounds twice.
    inverse = torch.where(is_used, torch.tensor(127.0) / largest, 0)
    codes = torch.where(is_finite, x * inverse, 0).round().to(torch.int8)
    scales = torch.where(is_finite, torch.where(is_used, largest / 127, 0), math.nan)
    return codes, scales.squeeze(-1)


def decode(codes: Tensor, scales: Tensor | None) -> Tensor:
    """The numbers of codes, float32. Without scales, it also takes tensors that hold no codes."""
    return codes.float() if scales is None else codes.float() * scales.unsqueeze(-1)
