"""Checks of the arguments of ops, before an address is used: devices of tensors, shapes, dtypes and strides.

They raise TypeError for a dtype and ValueError for everything else. They are no assertions, so they also work under
`python -O`. The values in tensors (slots, positions, ids, parameters) are checked for CPU tensors only, in
csrc/bindings_*.cpp and reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import gpu


def check_places(**tensors: Tensor | None) -> None:
    """Check that all tensors are in the memory of one device, the device of the first tensor."""
    for x in tensors.values():
        if x is not None and not x.is_cpu:
            break
    else:
        return  # this is the fast way on a CPU, because comparing devices takes longer
    device = None
    for name, x in tensors.items():
        if x is None:
            continue
        if device is None:
            first, device = name, x.device
            if device.type == "meta" and not gpu.serves(device):
                raise ValueError(f"{first} is on meta, expected a device with memory")
        elif x.device != device:
            raise ValueError(f"{name} is on {x.device}, expected {device}, where {first} is")


def check_shape(name: str, x: Tensor, *expected: int) -> None:
    """Check that a tensor has these dimensions."""
    if x.shape != expected:
        raise ValueError(f"{name} is {list(x.shape)}, expected {list(expected)}")


def check_filled(name: str, x: Tensor, dimensions: str) -> None:
    """Check the number of dimensions: one for each letter of `dimensions`. All except the first must be above 0."""
    shape = x.shape
    if len(shape) != len(dimensions) or (0 in shape and 0 in shape[1:]):
        raise ValueError(
            f"{name} is {list(x.shape)}, expected [{', '.join(dimensions)}], none but {dimensions[0]} of 0"
        )


def check_dtype(name: str, x: Tensor, *legal: torch.dtype) -> None:
    """Check that a tensor has one of these dtypes."""
    if x.dtype not in legal:
        raise TypeError(f"{name} is {x.dtype}, expected {' or '.join(map(str, legal))}")


def check_strides(cache: LayerCache) -> None:
    """Check that K and V have equal strides, and their scales too. Some kernels take one stride for both."""
    pairs = {"cache": (cache.k_BGPE, cache.v_BGPE), "scales": (cache.k_scales_BGP, cache.v_scales_BGP)}
    for name, (k, v) in pairs.items():
        if k is not None and v is not None and k.stride() != v.stride():
            raise ValueError(f"v_{name} has strides {v.stride()}, expected {k.stride()} like k_{name}")
    scales_BGP = cache.k_scales_BGP
    if scales_BGP is not None and scales_BGP.stride()[1:] != (scales_BGP.shape[2], 1):
        raise ValueError(f"the scales have strides {scales_BGP.stride()}, expected contiguous blocks")


def check_last_stride(**tensors: Tensor | None) -> None:
    """Check that the last dimension of each tensor is contiguous; the others may be strided."""
    for name, x in tensors.items():
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}, expected the last to be 1")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Check that each tensor is contiguous."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}, expected contiguous {list(x.shape)}")
