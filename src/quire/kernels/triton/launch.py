"""What the launches of all Triton kernels share."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton import knobs

# The interpreter computes products of bfloat16 tiles wrongly (triton 3.6 and 3.9): kernels cast to float32 there.
IS_INTERPRETED: bool = knobs.runtime.interpret

next_power_of_2 = triton.next_power_of_2
ceil_div = triton.cdiv


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether tiles of 64 rows and more multiply with wgmma there."""
    return not IS_INTERPRETED and torch.cuda.get_device_capability(device)[0] == 9
