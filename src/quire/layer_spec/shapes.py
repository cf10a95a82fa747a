"""The shapes of linear layers and norms, with the names of their tensors in checkpoints. No torch.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from quire.layer_spec.cuts import WHOLE, Cut, Placement, Share

StackedForm = Literal["rows", "columns", "turns"]


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
        is_first_apart: whether the first shard is stored as a layer of its own, so that the others can be computed
            without it.
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
    is_first_apart: bool = False

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
        chosen = tuple(self.shards[index] for index in shards)
        return replace(self, shards=chosen, share=share, paired_heads=heads, is_first_apart=False)

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
