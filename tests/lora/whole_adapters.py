"""Adapters as plain tensors: what AdapterFile reads, without the form of the kernels.

Dimensions: R rank, K in-features, N out-features, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.lora.adapter import open_adapter
from quire.lora.facts import AdapterFacts
from quire.model_config import ModelConfig


@dataclass(frozen=True)
class Delta:
    """s B A, which is added to a weight [N, K]. For the embeddings K is V, N is D, and each token has a column of A."""

    a_RK: Tensor
    b_NR: Tensor
    scale: float


@dataclass(frozen=True)
class Adapter:
    """All deltas of an adapter, by the names of the weights that they change: see AdapterModule."""

    facts: AdapterFacts
    deltas: dict[str, Delta]


def read_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    max_rank: int,
    dtype: torch.dtype,
    target_modules: Collection[str] | None = None,
) -> Adapter:
    """Read an adapter for a model into tensors of `dtype`. See open_adapter and AdapterFile.pieces."""
    with open_adapter(folder, config, max_rank=max_rank, target_modules=target_modules) as file:
        found = {
            entry: piece.tensor(entry).view(entry.shape).to(dtype, copy=True)
            for piece in file.pieces(dtype)
            for entry, _ in piece.entries
        }
        deltas = {
            module.name: Delta(found[module.entries[0]], found[module.entries[1]], module.scale)
            for module in file.modules
        }
        return Adapter(file.facts(dtype), deltas)
