"""The kinds of attention that a layer may have. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.layer_spec.cuts import Share
from quire.layer_spec.kv_spec import KvKind, KvSpec
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import LinearShape, NormShape

QkNorm = Literal["none", "head", "full", "unit"]


@dataclass(frozen=True, kw_only=True)
class Full:
    """Attention of heads to all earlier tokens.

    Attributes:
        scale: factor on q.k.
        soft_cap: scores become cap * tanh(score / cap); 0: they do not change.
        rope: the position encoding; None: the layer has none.
        qk_norm: RMS norm of q and k: per head, over the full width of all heads, or per head without weights (unit).
        qkv: its shards are q, k and v, or one shard with all three.
        sinks: whether each head has a learned score without a value, which joins the softmax (gpt-oss).
        sink_share: the share of the scores that a rank has; None: it has all.
        temperature, temperature_floor: they scale queries at late positions: see kernels/layer_rules.py; 0: no scaling.
        clip: elements of q, k and v are clamped to [-clip, clip] before they rotate; 0: they are not clamped.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float
    rope: RopeConfig | None
    qk_norm: QkNorm
    qkv: LinearShape
    output: LinearShape
    sinks: bool = False
    sink_share: Share | None = None
    temperature: float = 0.0
    temperature_floor: float = 1.0
    clip: float = 0.0

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self.qkv, self.output

    @property
    def norms(self) -> tuple[NormShape, ...]:
        """The norms of q and k."""
        if self.qk_norm in ("none", "unit"):
            return ()
        names, sizes = ("q_norm", "k_norm"), [self.head_dim] * 2
        if self.qk_norm == "full":
            sizes = [num_outputs for _, num_outputs in self.qkv.whole().shards[:2]]
        return tuple(NormShape(self.qkv.prefix + name, size) for name, size in zip(names, sizes, strict=True))

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("full", 0)

    @property
    def flops_per_pair(self) -> int:
        """The operations for one new token and one token that it sees: the score, and the sum of values."""
        return 4 * self.num_q_heads * self.head_dim

    def _kv_spec(self, kind: KvKind, window: int) -> KvSpec:
        return KvSpec(
            kind=kind,
            num_kv_heads=self.num_kv_heads,
            head_dim_k=self.head_dim,
            head_dim_v=self.head_dim,
            window=window,
        )


@dataclass(frozen=True, kw_only=True)
class Window(Full):
    """Attention to the last `size` tokens, with the token itself."""

    size: int

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("window", self.size)


@dataclass(frozen=True, kw_only=True)
class Chunked(Full):
    """Attention to earlier tokens in the same chunk of `size` tokens (Llama 4)."""

    size: int

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("chunked", self.size)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one row per token for all heads.

    Attributes:
        rank: elements of a row, the latents, that give keys and values of all heads.
        rope_dim: elements of a row that rotate: they are a part of the key, and all heads share it.
        nope_dim: elements of a head's query that do not rotate. The first ones: nope_dim + rope_dim.
        value_dim: elements of a head's value.
        scale: factor on q.k.
        is_interleaved: whether the checkpoint rotates dimensions 2 i and 2 i + 1 together. If not, it rotates
            dimensions i and i + rope_dim / 2 together.
        input: its last shard gives the row. The shard before gives the queries, or the input of `query`.
        query: None: `input` gives the queries.
        up: makes the keys and values of all heads from the latents, head by head.
        query_norm: the norm of the input of `query`.
        row_norm: the norm of the latents.
        norm_eps: the epsilon of both norms.
    """

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig
    is_interleaved: bool
    input: LinearShape
    query: LinearShape | None
    up: LinearShape
    output: LinearShape
    query_norm: NormShape | None
    row_norm: NormShape
    norm_eps: float

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        query = () if self.query is None else (self.query,)
        return self.input, *query, self.up, self.output

    @property
    def norms(self) -> tuple[NormShape, ...]:
        """The norms of the queries' input and of the latents."""
        return (*(() if self.query_norm is None else (self.query_norm,)), self.row_norm)

    @property
    def kv_spec(self) -> KvSpec:
        return KvSpec(kind="latent", num_kv_heads=1, head_dim_k=self.rank + self.rope_dim, head_dim_v=self.rank)

    @property
    def flops_per_pair(self) -> int:
        """The operations for one new token and one token that it sees, in the space of the rows."""
        return 2 * self.num_heads * (2 * self.rank + self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class State:
    """A state per sequence instead of rows per token: linear attention, Mamba.

    Attributes:
        num_bytes: bytes of the state of one sequence.
    """

    num_bytes: int
    linears: tuple[LinearShape, ...]
    norms: tuple[NormShape, ...] = ()

    @property
    def kv_spec(self) -> KvSpec:
        return KvSpec(kind="state", num_kv_heads=0, head_dim_k=0, head_dim_v=0, state_bytes=self.num_bytes)

    @property
    def flops_per_pair(self) -> int:
        return 0


Attention = Full | Latent | State  # Window and Chunked are Full with a bound
