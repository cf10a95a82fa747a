"""The common part of all Triton launches.

A kernel is launched with its arguments by name, like a struct of the CPU kernels. So two pointers or two strides cannot
change places by accident.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton import knobs

# Triton's interpreter computes wrong products of bfloat16 tiles (3.6 and 3.9), so kernels cast to float32 there.
IS_INTERPRETED: bool = knobs.runtime.interpret

next_power_of_2 = triton.next_power_of_2
ceil_div = triton.cdiv


def row_strides(**tensors: Tensor | None) -> dict[str, int]:
    """The arguments `NAME_stride` of a kernel: the elements from one row of each tensor to the next; None: 0."""
    return {f"{name}_stride": 0 if x is None else x.stride(-2) for name, x in tensors.items()}


def strides(dims: str, **tensors: Tensor | None) -> dict[str, int]:
    """The arguments `NAME_stride_DIM` of a kernel, for the first dimensions of each tensor; None: 0.

    Args:
        dims: a letter for each dimension: with "th", the tensor q gives q_stride_t and q_stride_h.
    """
    return {
        f"{name}_stride_{dim}": 0 if x is None else x.stride(at)
        for name, x in tensors.items()
        for at, dim in enumerate(dims)
    }


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether tiles of 64 or more rows use wgmma on this device."""
    return not IS_INTERPRETED and torch.cuda.get_device_capability(device)[0] == 9
