"""The additions of an adapter to a layer, in memory of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lora import DeltaMemory, DeltaShape, PackedDelta, empty_deltas, pack_factors


def pack_delta(a_RK: Tensor, b_NR: Tensor, scale: float, *, looks_up: bool = False) -> PackedDelta:
    """A and B, which have one dtype, in the form of kernels. `looks_up`: of embeddings, K tokens."""
    (R, K), N = a_RK.shape, len(b_NR)
    (delta,) = empty_deltas([DeltaShape(R, K, N, scale, looks_up)], a_RK.dtype, DeltaMemory())
    for x, factor in ((a_RK, delta.a_from(0, a_RK.dtype)), (b_NR, delta.b_from(0, b_NR.dtype))):
        pack_factors(x.contiguous().view(-1).view(torch.uint8), [factor], delta.memory)
    return delta
