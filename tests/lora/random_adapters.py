"""Adapters of random numbers, for any model, without files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.loader.safetensors_headers import TensorEntry
from quire.lora.adapter import AdapterFile, AdapterModule, AdapterPiece
from quire.lora.slots import AdapterSlots, PackedAdapter
from quire.models.decoder import Decoder
from tests.lora.whole_adapters import Delta

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


class _Deltas(AdapterFile):
    """Deltas as if they were read from a file."""

    def __init__(self, digest: str, deltas: dict[str, RandomDelta]) -> None:
        self.digest, self._tensors = digest, dict[TensorEntry, Tensor]()
        self.modules = []
        for name, delta in deltas.items():
            a, b = (
                TensorEntry(f"{name}.{letter}", str(x.dtype).removeprefix("torch."), tuple(x.shape), 0, x.nbytes)
                for letter, x in (("A", delta.a_RK), ("B", delta.b_NR))
            )
            self._tensors |= {a: delta.a_RK, b: delta.b_NR}
            self.modules.append(AdapterModule(name, (a, b), delta.scale))

    def pieces(self, dtype: torch.dtype) -> Iterator[AdapterPiece]:
        for module in self.modules:
            for entry in module.entries:
                yield AdapterPiece(0, self._tensors[entry].reshape(-1).view(torch.uint8), [(entry, module)])


def packed(slots: AdapterSlots, digest: str, deltas: dict[str, RandomDelta]) -> PackedAdapter:
    return slots.pack(_Deltas(digest, deltas))
