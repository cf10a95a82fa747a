"""Adapters of random numbers, for any model, without files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.lora.adapter import Delta
from quire.lora.facts import AdapterFacts
from quire.lora.slots import AdapterSlots, PackedAdapter
from quire.models.decoder import Decoder

VOCABULARY = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class RandomDelta(Delta):
    def dense(self) -> Tensor:
        """What is added to the weight [N, K], float32."""
        return self.scale * (self.b_NR.float() @ self.a_RK.float())


def every_linear(name: str) -> bool:
    return name not in VOCABULARY


def random_deltas(
    model: Decoder, dtype: torch.dtype, *, seed: int, rank: int, wants: Callable[[str], bool] = every_linear
) -> dict[str, RandomDelta]:
    """Of every weight whose name is wanted; the ranks differ, up to `rank`."""
    random = torch.Generator().manual_seed(seed)
    deltas: dict[str, RandomDelta] = {}
    for place in model.adaptable():
        for name, num_columns in place.parts:
            own = 1 + (rank - 1) * (1 + len(deltas) % 3) // 3
            a_RK = torch.randn(own, place.in_features, generator=random) / place.in_features**0.5
            b_NR = torch.randn(num_columns, own, generator=random) / own**0.5
            if wants(name):
                spread = 4.0 if place.looks_up else 1.0  # a column of A is short
                deltas[name] = RandomDelta(a_RK.to(dtype), b_NR.to(dtype), spread)
    return deltas


def packed(slots: AdapterSlots, digest: str, deltas: dict[str, RandomDelta]) -> PackedAdapter:
    rank = max(len(delta.a_RK) for delta in deltas.values())
    return slots.pack(AdapterFacts(digest, rank, 0, len(deltas)), deltas.items())
