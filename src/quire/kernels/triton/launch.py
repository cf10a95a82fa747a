"""What the launches of all Triton kernels share."""

from __future__ import annotations

import triton
from triton import knobs

# The interpreter computes products of bfloat16 tiles wrongly (triton 3.6 and 3.9): kernels cast to float32 there.
IS_INTERPRETED: bool = knobs.runtime.interpret

next_power_of_2 = triton.next_power_of_2
ceil_div = triton.cdiv
