"""The content of the cache for one layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.formats.kv_format import KvFormat

KvKind = Literal["full", "window", "chunked", "latent", "state"]


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """The content of the cache for one layer. Layers with equal specs share a group of blocks.

    Attributes:
        kind: `full`: keys and values of all tokens. `window`: of the last `window` tokens. `chunked`: of the position's
            own chunk of `window` tokens. `latent`: one row per token: it is the key, and its beginning is the value.
            `state`: no rows, but `state_bytes` per sequence.
        window: tokens; 0 for other kinds.
        head_dim_k, head_dim_v: elements of a key and of a value of one head.
    """

    kind: KvKind
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    state_bytes: int = 0

    def bytes_per_token(self, kv: KvFormat) -> int:
        """The bytes of one token in one layer, with scales."""
        own_rows = (self.head_dim_k,) if self.kind == "latent" else (self.head_dim_k, self.head_dim_v)
        return self.num_kv_heads * sum(kv.row_bytes(head_dim) for head_dim in own_rows if head_dim)
