"""What every op asks of its arguments before an address is taken: where tensors are, their shapes, dtypes and strides.

These are exceptions, so they hold under `python -O`: TypeError for a dtype, ValueError for the rest. What the tensors
hold (slots, positions, ids, parameters) is checked below, for CPU tensors: in csrc/bindings_*.cpp, and the same in
reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import gpu


def check_places(**tensors: Tensor | None) -> None:
    """All are in the memory of one device, that of the first, which has to be there."""
    for x in tensors.values():
        if x is not None and not x.is_cpu:
            break
    else:
        return  # as ever on a CPU: comparing devices takes longer
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
    """It has these dimensions."""
    if x.shape != expected:
        raise ValueError(f"{name} is {list(x.shape)}, expected {list(expected)}")


def check_filled(name: str, x: Tensor, dimensions: str) -> None:
    """It has these dimensions, a letter each, and there is something in every one but the first."""
    shape = x.shape
    if len(shape) != len(dimensions) or (0 in shape and 0 in shape[1:]):
        raise ValueError(
            f"{name} is {list(x.shape)}, expected [{', '.join(dimensions)}], none but {dimensions[0]} of 0"
        )


def check_dtype(name: str, x: Tensor, *legal: torch.dtype) -> None:
    """It has one of these dtypes."""
    if x.dtype not in legal:
        raise TypeError(f"{name} is {x.dtype}, expected {' or '.join(map(str, legal))}")


def check_strides(cache: LayerCache) -> None:
    """K and V lie alike, and so do their scales, contiguous in a block: for kernels that take one stride for both."""
    pairs = {"cache": (cache.k_BGPE, cache.v_BGPE), "scales": (cache.k_scales_BGP, cache.v_scales_BGP)}
    for name, (k, v) in pairs.items():
        if k is not None and v is not None and k.stride() != v.stride():
            raise ValueError(f"v_{name} has strides {v.stride()}, expected {k.stride()}, those of k_{name}")
    scales_BGP = cache.k_scales_BGP
    if scales_BGP is not None and scales_BGP.stride()[1:] != (scales_BGP.shape[2], 1):
        raise ValueError(f"the scales have strides {scales_BGP.stride()}, expected contiguous blocks")


def check_last_stride(**tensors: Tensor | None) -> None:
    """The last dimension of each is contiguous; the others may be strided."""
    for name, x in tensors.items():
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}, expected the last to be 1")


def check_contiguous(**tensors: Tensor | None) -> None:
    """Each is one piece of memory."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name} has strides {x.stride()}, expected contiguous {list(x.shape)}")
