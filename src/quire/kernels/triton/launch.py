"""The common part of all Triton launches."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import knobs

# Triton's interpreter computes wrong products of bfloat16 tiles (3.6 and 3.9), so kernels cast to float32 there.
IS_INTERPRETED: bool = knobs.runtime.interpret

next_power_of_2 = triton.next_power_of_2
ceil_div = triton.cdiv


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether tiles of 64 or more rows use wgmma on this device."""
    return not IS_INTERPRETED and torch.cuda.get_device_capability(device)[0] == 9
