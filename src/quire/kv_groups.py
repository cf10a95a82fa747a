"""Which layers keep keys and values in the same way, and how their blocks lie in pages of one size. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.kv_format import KvFormat
from quire.model_config import ModelConfig

KvKind = Literal["full", "window", "chunked", "latent", "state"]


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """What the cache keeps for one layer."""

    kind: KvKind
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0

    def bytes_per_token(self, kv: KvFormat) -> int:
        """Bytes of one token in one layer, scales included."""
        return self.num_kv_heads * (kv.row_bytes(self.head_dim_k) + kv.row_bytes(self.head_dim_v))


@dataclass(frozen=True)
class KvGroup:
    """Layers of one spec. Their blocks lie in pages, the layers of a page one behind the other.

    Attributes:
        layers: of the model, in order.
        layers_per_page: a block of all layers is `num_tables` pages, and each of these has a block table of its own.
    """

    spec: KvSpec
    layers: tuple[int, ...]
    layers_per_page: int

    @property
    def num_tables(self) -> int:
        return -(-len(self.layers) // self.layers_per_page)

    def tables(self) -> Iterator[tuple[int, ...]]:
        """The layers of each table."""
        for first in range(0, len(self.layers), self.layers_per_page):
            yield self.layers[first : first + self.layers_per_page]


def kv_groups(model: ModelConfig) -> tuple[KvGroup, ...]:
    """The groups of a model's layers."""
    spec = KvSpec(kind="full", num_kv_heads=model.num_kv_heads, head_dim_k=model.head_dim, head_dim_v=model.head_dim)
    return (KvGroup(spec, tuple(range(model.num_layers)), model.num_layers),)


def page_bytes(groups: Sequence[KvGroup], kv: KvFormat, block_size: int) -> int:
    """Bytes of a page: a block of tokens of the layers of one table."""
    return max(block_size * group.layers_per_page * group.spec.bytes_per_token(kv) for group in groups)
