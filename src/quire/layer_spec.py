"""The spec of one layer of a model: its attention, its feed-forward part, and its content of the cache. No torch.

The costs of a model are sums over its layers. Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from quire.formats.kv_format import KvFormat

KvKind = Literal["full", "window", "chunked", "latent", "state"]
QkNorm = Literal["none", "head", "full", "unit"]
StackedForm = Literal["rows", "columns", "turns"]
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"]


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of each position. layers/rope.py has the formulas."""

    rotary_dim: int  # leading dimensions of a head that rotate
    theta: float = 10_000.0
    type: str = "default"  # one of hf_config.rope.ROPE_TYPES
    factor: float = 1.0  # the context is stretched by it
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
        """Longrope: sequences of more tokens take the long factors, others the short ones. None: there is one set."""
        is_reached = self.type == "longrope" and max_model_len > self.original_max_position
        return self.original_max_position if is_reached and self.short_factor != self.long_factor else None

    def row_offset(self, num_tokens: int, max_model_len: int) -> int:
        """The first row of the rotary table (layers/rope.py) for a sequence of `num_tokens` tokens."""
        border = self.switches_after(max_model_len)
        return 0 if border is None or num_tokens <= border else border


@dataclass(frozen=True)
class Cut:
    """How several ranks may share a linear layer.

    Attributes:
        by: `rows`: each rank has some of the outputs, and uses only these. `joined`: each rank has some of the outputs,
            and inputs and outputs of all ranks are joined. `none`: each rank has the whole layer.
        sections: the sizes of the sections of the outputs. Each section is shared by itself. Empty: each shard is a
            section.
    """

    by: Literal["none", "rows", "joined"]
    sections: tuple[int, ...] = ()


WHOLE = Cut("none")


@dataclass(frozen=True)
class Share:
    """The part of a linear layer that one of several ranks holds: some of the outputs, with all inputs.

    Attributes:
        rows: for each shard and each rank, the rows of the checkpoint's tensor.
        tensor_rows: for each shard, the number of rows of the checkpoint's tensor. Shards with one name are parts of
            one tensor.
        inputs: the in-features that each rank has before they are joined; empty: every rank has all in-features.
    """

    rank: int
    rows: tuple[tuple[range, ...], ...]
    tensor_rows: tuple[int, ...]
    inputs: tuple[int, ...] = ()

    def own_rows(self, shard: int) -> range:
        """The rows of this rank."""
        return self.rows[shard][self.rank]

    def widths(self, shard: int) -> tuple[int, ...]:
        """The number of out-features of each rank."""
        return tuple(map(len, self.rows[shard]))


@dataclass(frozen=True)
class Placement:
    """The experts of each rank. An expert has one place or several. Places are numbered rank after rank.

    Attributes:
        experts: for each rank, the numbers of its experts, in the order of its places. No rank has an expert twice.
        columns: for each rank, the columns of the experts' results that it sums for all tokens.
        num_lanes: the number of lanes whose tokens go to these experts.
    """

    rank: int
    experts: tuple[tuple[int, ...], ...]
    columns: tuple[range, ...]
    num_lanes: int = 1

    @property
    def own(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.experts[self.rank]

    @property
    def num_experts(self) -> int:
        """The number of experts of the layer."""
        return 1 + max(max(own) for own in self.experts)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first place of each rank, and then the number of all places."""
        return tuple(accumulate(map(len, self.experts), initial=0))

    @property
    def num_places(self) -> int:
        return self.firsts[-1]


@dataclass(frozen=True)
class Stage:
    """The part of a model that one of several stages holds: some of its layers.

    Attributes:
        index: the number of the stage. Stage 0 has the embeddings; the last stage has the final norm and the output.
        layers: the numbers of its layers.
        tables: the cache contents of all layers of the model, with their numbers of block tables. All stages have the
            same tables.
    """

    index: int
    num_stages: int
    layers: range
    tables: tuple[tuple[KvSpec, int], ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


class HeadMatrices(NamedTuple):
    """A matrix [N, K] for each head.

    Attributes:
        name: GGUF files have a module with only these matrices, [num_heads, N, K]. This is its name.
        num_rows: the number of rows of each matrix in the whole weight.
    """

    name: str
    num_heads: int
    N: int
    K: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear layer. Several tensors of the checkpoint, side by side, may form its weight.

    Attributes:
        prefix: the prefix of the tensors' names, for example `model.layers.0.self_attn.`. For experts it has `{}` in
            place of their number: `model.layers.0.mlp.experts.{}.`.
        shards: (name, N) in the order of the outputs: (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)).
        in_features: K.
        bias: whether every shard has a bias.
        cut: how the layer may be cut. planning/cut_model.py checks that its stored form allows this.
        share: the rank's share, if the shape is a part of the layer; None: it is the whole layer.
        paired_heads: for each shard, the number of heads that rotate neighbouring dimensions in the checkpoint; 0 or no
            entry: none. Here halves of a head rotate, so loading reorders their rows.
        num_experts: the number of stacked layers of this shape; 0: an ordinary layer. Sizes are those of one expert.
        placement: the placement of experts, if a rank has only some of them; None: it has all experts of the layer.
        stacked: the name of one tensor [num_experts, N, K] that a checkpoint may hold instead; empty: there is none.
            Biases and the tensors of a quantized form have its name and their own behind it (moe/stack.py).
        stacked_form: `columns`: the tensor is [num_experts, K, N]. `turns`: the tensor has this shape too, and the
            outputs of the shards take turns in it.
        is_gate: whether its few outputs decide about other outputs. Then it stays in floating point, and adapters do
            not change it.
        matrices: the matrices into which the weight is taken apart after loading. They are in the model's dtype,
            whatever form the checkpoint has. Empty: the weight is not taken apart.
    """

    prefix: str
    shards: tuple[tuple[str, int], ...]
    in_features: int
    bias: bool = False
    cut: Cut = WHOLE
    share: Share | None = None
    paired_heads: tuple[int, ...] = ()
    num_experts: int = 0
    placement: Placement | None = None
    stacked: str = ""
    stacked_form: StackedForm = "rows"
    is_gate: bool = False
    matrices: tuple[HeadMatrices, ...] = ()

    @property
    def out_features(self) -> int:
        return sum(num_outputs for _, num_outputs in self.shards)

    @property
    def num_weights(self) -> int:
        """The number of weights, of all experts together."""
        return self.out_features * self.in_features * max(self.num_experts, 1)

    @property
    def num_biases(self) -> int:
        """The number of biases, of all experts together."""
        return self.out_features * max(self.num_experts, 1) if self.bias else 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules in the checkpoint."""
        return tuple(self.prefix + shard for shard, _ in self.shards)

    def only(self, shards: Sequence[int]) -> LinearShape:
        """The layer with some of its shards, given by their indexes."""
        share = self.share and replace(
            self.share,
            rows=tuple(self.share.rows[index] for index in shards),
            tensor_rows=tuple(self.share.tensor_rows[index] for index in shards),
        )
        heads = tuple(self.paired_heads[index] for index in shards) if self.paired_heads else ()
        return replace(self, shards=tuple(self.shards[index] for index in shards), share=share, paired_heads=heads)

    def whole(self) -> LinearShape:
        """The whole layer, if this is a part. Its shards are the tensors of the checkpoint."""
        if self.share is None:
            return self
        sizes = {name: size for (name, _), size in zip(self.shards, self.share.tensor_rows, strict=True)}
        return replace(self, shards=tuple(sizes.items()), share=None)

    def taken_apart(self) -> Iterator[LinearShape]:
        """The matrices as layers of their own, with [N, K] of all heads one after the other."""
        for each in self.matrices:
            shards = ((each.name, each.num_heads * each.N),)
            share = self.share
            if share is not None:
                per_head = sum(matrix.num_rows for matrix in self.matrices)
                rows = tuple(
                    range(own.start // per_head * each.N, own.stop // per_head * each.N) for own in share.rows[0]
                )
                share = Share(share.rank, (rows,), (share.tensor_rows[0] // per_head * each.N,))
            yield replace(self, shards=shards, in_features=each.K, matrices=(each,), share=share)

    @property
    def num_stored_experts(self) -> int:
        """The number of stacked layers of this shape in the checkpoint."""
        return self.num_experts if self.placement is None else self.placement.num_experts

    @property
    def is_adaptable(self) -> bool:
        """Whether adapters may change the layer."""
        return not (self.num_experts or self.is_gate)

    def of_expert(self, expert: int) -> LinearShape:
        """The ordinary layer of one expert."""
        return replace(self, prefix=self.prefix.format(expert), num_experts=0, placement=None, stacked="")


class NormShape(NamedTuple):
    """A norm: the name of its module in the checkpoint, and the number of elements with one mean.

    Attributes:
        is_layer_norm: whether it subtracts the mean and has a bias; else it is an RMS norm.
    """

    name: str
    size: int
    is_layer_norm: bool = False

    @property
    def num_elements(self) -> int:
        """The number of elements of its weight and its bias."""
        return (2 if self.is_layer_norm else 1) * self.size


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


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A gated MLP: down(activation(gate) * up).

    Attributes:
        activation: silu, gelu, gelu_tanh or clamped_swiglu.
    """

    gate_up: LinearShape
    down: LinearShape
    activation: str

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self.gate_up, self.down

    @property
    def width(self) -> int:
        """The number of elements between the linear layers, for one token."""
        return self.gate_up.out_features


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses the experts of a token from its logits [num_experts], and gives each a weight.

    Attributes:
        linear: hidden -> logits.
        scoring: `softmax`, `sigmoid`: of the logits of all experts. `softmax_of_chosen`: of the logits of the chosen
            experts. `sparsemixer`: see kernels/routing.py.
        has_bias_for_choice: a tensor adds to the scores of all experts, for the choice alone.
        num_groups: the number of equal groups of neighbouring experts. Only experts of the best `num_active_groups`
            are chosen.
        group_score: the score of a group: its largest score, or the sum of its two largest.
        normalizes: weights are divided by their sum.
        scale: factor on the weights.
        jitter: for sparsemixer.
        weighs_input: weights multiply the expert's input instead of its result (Llama 4).
    """

    linear: LinearShape
    scoring: Scoring
    has_bias_for_choice: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalizes: bool = False
    scale: float = 1.0
    jitter: float = 0.0
    weighs_input: bool = False

    @property
    def num_biases(self) -> int:
        """The number of elements of the tensor for the choice."""
        return self.linear.out_features if self.has_bias_for_choice else 0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Several MLPs of one shape. A router chooses some of them for every token.

    Attributes:
        expert: the shape of each; its linear layers are stacks of all experts.
        num_active: experts per token.
        shared: an expert for every token; None: there is none.
        shared_gate: hidden -> 1. Its sigmoid multiplies the shared expert's result. None: there is no gate.
    """

    router: Router
    expert: Dense
    num_active: int
    shared: Dense | None = None
    shared_gate: LinearShape | None = None

    @property
    def num_experts(self) -> int:
        """The experts that are held. On a rank, these may be some of the experts that the router chooses from."""
        return self.expert.gate_up.num_experts

    @property
    def num_routed(self) -> int:
        """The number of experts from which the router chooses."""
        return self.router.linear.out_features

    @property
    def num_active_here(self) -> int:
        """The mean number of held experts that a token uses, if tokens go to all experts equally."""
        return -(-self.num_active * self.num_experts // self.num_routed)

    @property
    def placement(self) -> Placement | None:
        """See LinearShape."""
        return self.expert.gate_up.placement

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self._linears(self.num_experts)

    @property
    def active_linears(self) -> tuple[LinearShape, ...]:
        """The linear layers that one token reads: stacks of the chosen experts."""
        return self._linears(self.num_active_here)

    @property
    def width(self) -> int:
        """The number of elements between the linear layers, for one token."""
        return self.num_active * self.expert.width + (self.shared.width if self.shared else 0)

    def _linears(self, num_experts: int) -> tuple[LinearShape, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        shared = () if self.shared is None else self.shared.linears
        stacks = (replace(linear, num_experts=num_experts) for linear in self.expert.linears)
        return self.router.linear, *stacks, *gate, *shared


def distinct_experts(num_experts: int, num_active: int, num_tokens: int) -> float:
    """The expected number of experts that `num_tokens` tokens hit, if all are equally likely."""
    return num_experts * (1.0 - (1.0 - num_active / num_experts) ** num_tokens)


FeedForward = Dense | Experts


class Norms(NamedTuple):
    """Norms around one part of a layer: the norm of its input, and the norm of its addition to the residual stream."""

    before: NormShape | None = None
    after: NormShape | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then a feed-forward part. Each adds to the residual stream, and each may be missing.

    Attributes:
        residual_multiplier: a factor of both additions.
    """

    attention: Attention | None
    feed_forward: FeedForward | None
    attention_norms: Norms = Norms()
    feed_forward_norms: Norms = Norms()
    residual_multiplier: float = 1.0

    @property
    def kv_spec(self) -> KvSpec | None:
        """The content of the cache for this layer; None: there is none."""
        return None if self.attention is None else self.attention.kv_spec

    @property
    def parts(self) -> tuple[tuple[Attention | FeedForward, Norms], ...]:
        """The parts of the layer in order, with the norms around them."""
        parts = ((self.attention, self.attention_norms), (self.feed_forward, self.feed_forward_norms))
        return tuple((part, norms) for part, norms in parts if part is not None)

    def linears(self) -> Iterator[LinearShape]:
        """All linear layers; layers with the same input are fused."""
        for part, _ in self.parts:
            yield from part.linears

    def active_linears(self) -> Iterator[LinearShape]:
        """The linear layers that one token uses."""
        for part, _ in self.parts:
            yield from part.active_linears if isinstance(part, Experts) else part.linears

    def num_router_biases(self) -> int:
        """The number of float32 elements that add to the scores of experts."""
        return self.feed_forward.router.num_biases if isinstance(self.feed_forward, Experts) else 0

    def num_norm_elements(self) -> int:
        """The number of elements of all norms, and of sinks."""
        around = [norm for _, norms in self.parts for norm in norms if norm is not None]
        num_sinks = self.attention.num_q_heads if isinstance(self.attention, Full) and self.attention.sinks else 0
        norms = (*around, *(() if self.attention is None else self.attention.norms))
        return sum(norm.num_elements for norm in norms) + num_sinks


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A head drafts from the hidden states of another model, its target. Its ModelConfig has its own layers.

    At each position it reads the target's hidden state at this position and the embedding of the next token.

    Attributes:
        kind: `eagle3`: the first layer's attention reads both side by side, and the hidden state is the residual
            stream. `mtp`: `input` makes the residual stream of both.
        streams: the hidden state is made of the target's residual streams before these layers. The number of all layers
            means the stream after the last layer.
        stream_size: elements of one stream.
        input: `eagle3`: the streams to the hidden state. `mtp`: hidden state and embedding to the residual stream.
        norms: the norms of the embedding, and of the hidden state.
        norm_before_residual: eagle3: the residual stream begins with the norm of the hidden state.
        num_tokens: tokens that it can draft.
        maps_tokens: whether a table has the target's ids of these tokens. If not, they are the target's first tokens.
        owns_embeddings, owns_output: whether the head has embeddings and an output layer of its own. If not, it uses
            the target's.
    """

    kind: Literal["eagle3", "mtp"]
    streams: tuple[int, ...]
    stream_size: int
    input: LinearShape
    norms: tuple[NormShape, NormShape]
    norm_before_residual: bool = False
    num_tokens: int
    maps_tokens: bool = False
    owns_embeddings: bool = False
    owns_output: bool = False

    @property
    def hidden_width(self) -> int:
        """The number of elements of all streams of a token."""
        return len(self.streams) * self.stream_size
