"""What one layer of a model is: its attention, its feed-forward part, and what a cache keeps for it. No torch.

What a model costs is a sum over its layers. Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.formats.kv_format import KvFormat

KvKind = Literal["full", "window", "chunked", "latent", "state"]
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class RopeConfig:
    """Which rotation each position gets. layers/rope.py holds the formulas."""

    rotary_dim: int  # leading dimensions of a head that rotate
    theta: float = 10_000.0
    type: str = "default"  # one of hf_config.rope.ROPE_TYPES
    factor: float = 1.0  # by which the context is stretched
    max_position: int = 0  # position limit of the file
    original_max_position: int = 0  # context of the pretraining
    attention_factor: float = 1.0  # on cos and sin (yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope, one per pair of dimensions: contexts up to original_max_position
    long_factor: tuple[float, ...] = ()  # longrope: longer contexts

    def switches_after(self, max_model_len: int) -> int | None:
        """Longrope: sequences of more tokens take the long factors, others the short ones. None: all take the same."""
        is_reached = self.type == "longrope" and max_model_len > self.original_max_position
        return self.original_max_position if is_reached and self.short_factor != self.long_factor else None

    def row_offset(self, num_tokens: int, max_model_len: int) -> int:
        """Where the rotary table (layers/rope.py) begins for a sequence of so many tokens."""
        border = self.switches_after(max_model_len)
        return 0 if border is None or num_tokens <= border else border


@dataclass(frozen=True)
class Cut:
    """How several devices may share a linear layer.

    Attributes:
        by: `rows`: each has some of the outputs. `columns`: each has some of the inputs, and the results are added.
            `experts`: each has some experts, whole. `none`: each has all of it.
        unit: outputs or inputs that stay together: those of a head.
        sections: sizes of the sections of the outputs, each of which is shared; empty: the shards are the sections.
        may_repeat: a section with fewer units than devices is held several times: heads of keys and values.
    """

    by: Literal["none", "rows", "columns", "experts"]
    unit: int = 1
    sections: tuple[int, ...] = ()
    may_repeat: bool = False


WHOLE = Cut("none")


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear layer whose weight may lie in several tensors of the checkpoint, side by side.

    Attributes:
        prefix: of the tensors' names, as `model.layers.0.self_attn.`.
        shards: (name, N) in the order of the outputs, as (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)).
        in_features: K.
        bias: every shard has one.
        cut: how it may be cut; stored_linear.cut says whether its form allows that.
    """

    prefix: str
    shards: tuple[tuple[str, int], ...]
    in_features: int
    bias: bool = False
    cut: Cut = WHOLE

    @property
    def out_features(self) -> int:
        return sum(num_outputs for _, num_outputs in self.shards)

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    @property
    def num_biases(self) -> int:
        return self.out_features if self.bias else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules in the checkpoint."""
        return tuple(self.prefix + shard for shard, _ in self.shards)


class NormShape(NamedTuple):
    """An RMS norm: the name of its module in the checkpoint, and how many elements share a mean."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """What the cache keeps for one layer. Layers with equal ones share a group of blocks.

    Attributes:
        kind: `full`: keys and values of all tokens. `window`: those of the last `window` tokens. `chunked`: those of
            the chunk of `window` tokens that a position lies in. `latent`: one row per token, from which keys and
            values are made. `state`: no rows, but `state_bytes` per sequence.
        window: tokens; 0 where the kind has none.
        head_dim_k, head_dim_v: elements of a key and of a value of one head. A latent row counts as a key.
    """

    kind: KvKind
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    state_bytes: int = 0

    def bytes_per_token(self, kv: KvFormat) -> int:
        """Bytes of one token in one layer, scales included."""
        rows = (kv.row_bytes(head_dim) for head_dim in (self.head_dim_k, self.head_dim_v) if head_dim)
        return self.num_kv_heads * sum(rows)


@dataclass(frozen=True, kw_only=True)
class Full:
    """Attention of heads to everything before.

    Attributes:
        scale: factor on q.k.
        soft_cap: cap * tanh(score / cap); 0: none.
        rope: None: a layer without position encoding.
        qk_norm: RMS norm of q and k: per head, or over the full width of all heads.
        qkv: its shards are q, k and v, or one with all three.
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

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self.qkv, self.output

    @property
    def norms(self) -> tuple[NormShape, ...]:
        """Those of q and k."""
        if self.qk_norm == "none":
            return ()
        names, heads = ("q_norm", "k_norm"), (self.num_q_heads, self.num_kv_heads)
        sizes = (self.head_dim * (1 if self.qk_norm == "head" else count) for count in heads)
        return tuple(NormShape(self.qkv.prefix + name, size) for name, size in zip(names, sizes, strict=True))

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("full", 0)

    @property
    def flops_per_pair(self) -> int:
        """Of one new token and one that it sees: the score, and the sum of values."""
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
    """Attention to the last `size` tokens, the own one among them."""

    size: int

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("window", self.size)


@dataclass(frozen=True, kw_only=True)
class Chunked(Full):
    """Attention to what lies before in the same chunk of `size` tokens (Llama 4)."""

    size: int

    @property
    def kv_spec(self) -> KvSpec:
        return self._kv_spec("chunked", self.size)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek): the cache holds one row per token for all heads.

    Attributes:
        rank: elements of a row from which keys and values of all heads are made.
        rope_dim: elements of a row that rotate: a part of the key that all heads share.
    """

    num_heads: int
    rank: int
    rope_dim: int
    rope: RopeConfig
    linears: tuple[LinearShape, ...]
    norms: tuple[NormShape, ...]

    @property
    def kv_spec(self) -> KvSpec:
        return KvSpec(kind="latent", num_kv_heads=1, head_dim_k=self.rank + self.rope_dim, head_dim_v=0)

    @property
    def flops_per_pair(self) -> int:
        """Of one new token and one that it sees, both in the space of the rows."""
        return 2 * self.num_heads * (2 * self.rank + self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class State:
    """A state per sequence instead of rows per token: linear attention, Mamba.

    Attributes:
        num_bytes: of the state of one sequence.
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


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A gated MLP: down(activation(gate) * up).

    Attributes:
        activation: silu, gelu or gelu_tanh.
    """

    gate_up: LinearShape
    down: LinearShape
    activation: str

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self.gate_up, self.down

    @property
    def width(self) -> int:
        """Elements between the linear layers, per token."""
        return self.gate_up.out_features


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Several MLPs of one shape, some of which every token goes through, chosen by a router.

    Attributes:
        num_active: experts per token.
        shared: one that every token goes through, if there is one.
    """

    router: LinearShape
    experts: tuple[Dense, ...]
    num_active: int
    shared: Dense | None = None

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self._linears(len(self.experts))

    @property
    def active_linears(self) -> tuple[LinearShape, ...]:
        """What one token reads, as if the first experts were chosen."""
        return self._linears(self.num_active)

    @property
    def width(self) -> int:
        """Elements between the linear layers, per token."""
        return self.num_active * self.experts[0].width + (self.shared.width if self.shared else 0)

    def _linears(self, num_experts: int) -> tuple[LinearShape, ...]:
        chosen = [*self.experts[:num_experts], *([self.shared] if self.shared else [])]
        return self.router, *(linear for expert in chosen for linear in expert.linears)


FeedForward = Dense | Experts


class Norms(NamedTuple):
    """RMS norms around one part of a layer: of its input, and of what it adds to the residual stream."""

    before: NormShape | None = None
    after: NormShape | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then a feed-forward part, each added to the residual stream. Either may be missing.

    Attributes:
        residual_multiplier: on what both add.
    """

    attention: Attention | None
    feed_forward: FeedForward | None
    attention_norms: Norms = Norms()
    feed_forward_norms: Norms = Norms()
    residual_multiplier: float = 1.0

    @property
    def kv_spec(self) -> KvSpec | None:
        """What the cache keeps; None: nothing."""
        return None if self.attention is None else self.attention.kv_spec

    @property
    def parts(self) -> tuple[tuple[Attention | FeedForward, Norms], ...]:
        """What is there, in order, with the norms around it."""
        parts = ((self.attention, self.attention_norms), (self.feed_forward, self.feed_forward_norms))
        return tuple((part, norms) for part, norms in parts if part is not None)

    def linears(self) -> Iterator[LinearShape]:
        """All linear layers, fused where their inputs are the same."""
        for part, _ in self.parts:
            yield from part.linears

    def active_linears(self) -> Iterator[LinearShape]:
        """Those that one token is multiplied with."""
        for part, _ in self.parts:
            yield from part.active_linears if isinstance(part, Experts) else part.linears

    def num_norm_elements(self) -> int:
        """Of all norms."""
        around = [norm for _, norms in self.parts for norm in norms if norm is not None]
        return sum(norm.size for norm in (*around, *(() if self.attention is None else self.attention.norms)))
