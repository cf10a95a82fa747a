"""Dummy weights: small random numbers for every tensor of a model, the same on every run, without a checkpoint.

They depend only on name and shape, so the order and the other tensors do not matter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch

from quire.models.form import CPU

# One table of random numbers serves all tensors; each begins at its own place. New numbers for every weight would take
# seconds. The length is prime, so that rows of a matrix do not repeat.
_TABLE_LENGTH = 1_048_573


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device = CPU
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor of `dtype` on `device`) for every name.

    Matrices have the variance 1 / columns, so that activations keep their size from layer to layer. Norms are close to
    one and biases close to zero.
    """
    table = torch.rand(_TABLE_LENGTH, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1)  # variance 1/3
    twice = torch.cat((table, table)).to(device)
    for name, shape in shapes.items():
        yield name, _fill(twice, name, shape, dtype)


def _fill(twice: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the table from a place that name and shape choose, repeated if necessary."""
    count = math.prod(shape)
    digest = hashlib.blake2b(repr((name, shape)).encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % _TABLE_LENGTH
    values = twice[start : start + min(count, _TABLE_LENGTH)]
    if len(shape) < 2:
        is_norm = "norm" in name and not name.endswith("bias")
        values = (values * 0.1 + is_norm).to(dtype)
    else:
        values = (values * math.sqrt(3 / max(shape[-1], 1))).to(dtype)
    tensor = torch.empty(count, dtype=dtype, device=twice.device)
    for begin in range(0, count, _TABLE_LENGTH):
        tensor[begin : begin + _TABLE_LENGTH] = values[: count - begin]
    return tensor.view(shape)
