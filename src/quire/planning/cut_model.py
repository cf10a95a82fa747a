"""The part of a model that one of several ranks holds: a model of its own, planned and loaded like any other. No torch.

Every linear layer is cut by its outputs, so the sum behind an output is the same at every degree. If a layer reads
results of another layer's cut outputs, ranks join their parts first (layers/joined.py). With ExpertCut, a rank has some
experts instead of rows of all, and adds up some columns of the results of all experts, in the order of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from quire.distributed.layout import head_shares, place_experts, shares
from quire.errors import ConfigError, ModelConfigError
from quire.formats.stored_linear import row_unit
from quire.formats.weight_format import PANEL_WIDTH
from quire.layer_spec.attention import Attention, Full, Latent
from quire.layer_spec.cuts import Placement, Share
from quire.layer_spec.feed_forward import Dense, Experts, FeedForward
from quire.layer_spec.shapes import LinearShape
from quire.model_config import ModelConfig

MOST_HEAD_DIM = 576  # kMaxHeadDim of csrc/include/quire/kernels/kv_cache.h
MOST_DEGREES = 64  # ranks per copy that are looked at where the legal numbers are listed


@dataclass(frozen=True)
class ExpertCut:
    """A cut in which ranks have whole experts. See distributed.layout.place_experts for strategy and redundant experts.

    Attributes:
        num_lanes: the number of lanes that share experts. Each has all other layers.
    """

    strategy: str = "linear"
    num_redundant: int = 0
    num_lanes: int = 1


class ModelCut:
    """Cuts a model into `num_parts` parts that differ as little as heads and panels allow.

    Heads, the inner width, outputs and the vocabulary are shared. Every rank has all norms. Heads of keys and values
    are held by several ranks where there are fewer of them than ranks.

    Args:
        experts: None: experts are cut like dense layers.
        is_native: whether our own code runs the model. Transformers' modelling code has all experts on each rank, and
            computes norms over all heads there.
    """

    def __init__(
        self, model: ModelConfig, num_parts: int, experts: ExpertCut | None = None, *, is_native: bool = True
    ) -> None:
        self._model, self._num_parts, self._experts, self._is_native = model, num_parts, experts, is_native
        self._num_lanes = 1 if experts is None else experts.num_lanes

    def part(self, rank: int = 0, lane: int = 0) -> ModelConfig:
        """The part of one rank; the first one holds the most. Raises ModelConfigError if the model cannot be cut so.

        Args:
            rank: in its lane.
        """
        if self._num_lanes == 1:
            return self._part(rank)
        # All ranks share experts, as if they were of one lane: the rest is cut among the ranks of a lane.
        own = ModelCut(self._model, self._num_parts, ExpertCut())._part(rank)
        cut = ModelCut(self._model, self._num_parts * self._num_lanes, self._experts)
        layers = tuple(
            replace(layer, feed_forward=cut._feed_forward(whole.feed_forward, lane * self._num_parts + rank))
            if isinstance(whole.feed_forward, Experts)
            else layer
            for layer, whole in zip(own.layers, self._model.layers, strict=True)
        )
        return replace(own, layers=layers)

    def _part(self, rank: int) -> ModelConfig:
        model = self._model
        if self._num_parts == 1 or not model.is_shared:
            return model
        layers = tuple(
            replace(
                layer,
                attention=None if layer.attention is None else self._attention(layer.attention, rank),
                feed_forward=None if layer.feed_forward is None else self._feed_forward(layer.feed_forward, rank),
            )
            for layer in model.layers
        )
        unit = lcm(self._unit(model.output_linear()), self._unit(model.embeddings()))
        rows = self._ranges("the vocabulary", model.vocab_size, unit)
        share = Share(rank, (tuple(rows),), (model.vocab_size,))
        return replace(model, layers=layers, vocab_share=share, drafter=self._drafter(rank))

    def _drafter(self, rank: int) -> ModelConfig | None:
        """The part of a drafter. A drafting model is cut too.

        Every rank has all of it if it is a head or cannot be cut.
        """
        drafter = self._model.drafter
        if drafter is None or why_not_cut(drafter, self._num_parts) is not None:
            return drafter
        return ModelCut(drafter, self._num_parts).part(rank)

    def _attention(self, part: Attention, rank: int) -> Attention:
        if isinstance(part, Latent):
            return self._latent(part, rank)
        if not isinstance(part, Full):
            raise self._impossible("it has layers with a state, which ranks do not share")
        size, unit = part.head_dim, self._unit(part.qkv)
        heads = head_shares(part.num_q_heads, part.num_kv_heads, self._num_parts, lcm(unit, size) // size)
        if not all(own for own, _ in heads):
            raise self._impossible(f"it has {part.num_q_heads} heads")
        queries, keys = (_times(own, size) for own in zip(*heads, strict=True))
        if any(each.start % unit for each in (*queries, *keys)):
            raise self._impossible(f"{part.qkv.names[0]} keeps {unit} out-features together")
        if part.qk_norm == "full" and self._is_native and self._num_parts > part.num_kv_heads:
            raise self._impossible(f"a norm over all heads needs a head of k per rank, and it has {part.num_kv_heads}")
        return replace(
            part,
            num_q_heads=len(heads[rank][0]),
            num_kv_heads=len(heads[rank][1]),
            qkv=_with_rows(part.qkv, rank, (queries, keys, keys)),
            output=self._joined(part.output, rank, queries, self._outputs(part.output)),
            sink_share=Share(rank, (tuple(own for own, _ in heads),), (part.num_q_heads,)) if part.sinks else None,
        )

    def _latent(self, part: Latent, rank: int) -> Latent:
        """A rank's part of latent attention: some heads. Every rank has all rows of the cache and their projection."""
        sizes = {
            (part.input if part.query is None else part.query): part.nope_dim + part.rope_dim,
            part.up: part.nope_dim + part.value_dim,
        }
        unit = lcm(*(lcm(self._unit(linear), size) // size for linear, size in sizes.items()))
        heads = shares(part.num_heads, self._num_parts, unit)
        if not all(heads):
            raise self._impossible(f"it has {part.num_heads} heads, and groups of {unit} stay together")
        (queries, ups), num_heads = (_times(heads, size) for size in sizes.values()), len(heads[rank])
        rows = [range(part.input.shards[1][1])] * self._num_parts
        return replace(
            part,
            num_heads=num_heads,
            input=_with_rows(part.input, rank, (queries, rows)) if part.query is None else part.input,
            query=None if part.query is None else _with_rows(part.query, rank, (queries,)),
            up=replace(
                _with_rows(part.up, rank, (ups,)),
                matrices=tuple(each._replace(num_heads=num_heads) for each in part.up.matrices),
            ),
            output=self._joined(part.output, rank, _times(heads, part.value_dim), self._outputs(part.output)),
        )

    def _feed_forward(self, part: FeedForward, rank: int) -> FeedForward:
        if isinstance(part, Dense):
            return self._mlp(part, rank, self._outputs(part.down))
        if not self._is_native:
            return part
        # Each rank adds up its outputs of all experts before they are joined, so all have the same ones.
        if self._experts is not None:
            return self._whole_experts(part, rank, self._experts)
        mlps = (part.expert,) if part.shared is None else (part.expert, part.shared)
        outputs = self._outputs(*(mlp.down for mlp in mlps))
        expert, *shared = (self._mlp(mlp, rank, outputs) for mlp in mlps)
        return replace(part, expert=expert, shared=shared[0] if shared else None)

    def _whole_experts(self, part: Experts, rank: int, cut: ExpertCut) -> Experts:
        num_experts, most, num_redundant = part.num_experts, part.num_experts * (self._num_parts - 1), cut.num_redundant
        if num_experts < self._num_parts:
            raise self._impossible(f"a layer has {num_experts} experts, and each rank holds whole ones")
        if num_redundant > most:
            raise self._impossible(f"{num_redundant} redundant experts are more than {most}: no rank has one twice")
        if part.shared is None:
            columns, shared = self._ranges("the hidden state", part.expert.down.out_features, 1), None
        else:
            columns = self._outputs(part.shared.down)
            shared = self._mlp(part.shared, rank, columns)
        experts = place_experts(num_experts, self._num_parts, cut.strategy, num_redundant)
        placement = Placement(rank, experts, tuple(columns), cut.num_lanes)
        gate_up, down = (
            replace(linear, num_experts=len(placement.own), placement=placement) for linear in part.expert.linears
        )
        return replace(part, expert=replace(part.expert, gate_up=gate_up, down=down), shared=shared)

    def _mlp(self, part: Dense, rank: int, outputs: Sequence[range]) -> Dense:
        inner = self._ranges(part.gate_up.names[0], part.down.in_features, self._unit(part.gate_up))
        return replace(
            part,
            gate_up=_with_rows(part.gate_up, rank, (inner, inner)),
            down=self._joined(part.down, rank, inner, outputs),
        )

    def _outputs(self, *linears: LinearShape) -> list[range]:
        """The outputs of a rank, of layers that have the same outputs."""
        return self._ranges(linears[0].names[0], linears[0].out_features, lcm(*map(self._unit, linears)))

    def _joined(self, linear: LinearShape, rank: int, inputs: Sequence[range], outputs: Sequence[range]) -> LinearShape:
        cut = _with_rows(linear, rank, (outputs,))
        assert cut.share is not None
        return replace(cut, share=replace(cut.share, inputs=tuple(map(len, inputs))))

    def _ranges(self, what: str, size: int, unit: int) -> list[range]:
        """The ranges of all ranks. They are whole panels if there is at least one for every rank."""
        panels = lcm(PANEL_WIDTH, unit)
        ranges = shares(size, self._num_parts, panels if size >= self._num_parts * panels else unit)
        if not all(ranges):
            raise self._impossible(f"{what} has {size} rows, and groups of {unit} stay together")
        return ranges

    def _unit(self, linear: LinearShape) -> int:
        """The number of out-features that stay together. Weights quantized on load keep none together."""
        return lcm(*(row_unit(stored) for stored in self._model.stored(linear)))

    def _impossible(self, why: str) -> ModelConfigError:
        return ModelConfigError(f"{self._model.architecture} cannot be cut in {self._num_parts}: {why}")


def _with_rows(linear: LinearShape, rank: int, sections: Sequence[Sequence[range]]) -> LinearShape:
    """The part of a rank that has these ranges of the sections of a layer. Sections count from their own first row."""
    names, sizes = zip(*linear.shards, strict=True)
    rows = [tuple(section) for section in sections]
    if linear.cut.sections:
        names, sizes = names * len(sections), sizes * len(sections)
        starts = [sum(linear.cut.sections[:index]) for index in range(len(sections))]
        rows = [
            tuple(range(start + each.start, start + each.stop) for each in section)
            for start, section in zip(starts, rows, strict=True)
        ]
    own = [len(section[rank]) for section in rows]
    heads = linear.paired_heads and tuple(
        count * num_rows // size for count, num_rows, size in zip(linear.paired_heads, own, sizes, strict=True)
    )
    shards, share = tuple(zip(names, own, strict=True)), Share(rank, tuple(rows), sizes)
    return replace(linear, shards=shards, share=share, paired_heads=heads)


def _times(ranges: Sequence[range], size: int) -> list[range]:
    """The rows of these heads."""
    return [range(each.start * size, each.stop * size) for each in ranges]


def legal_degrees(
    model: ModelConfig, most: int, experts: ExpertCut | None = None, *, is_native: bool = True
) -> list[int]:
    """The numbers of parts into which the model can be cut, at most `most`. See ModelCut."""
    degrees = range(1, most + 1)
    return [degree for degree in degrees if why_not_cut(model, degree, experts, is_native=is_native) is None]


def why_not_cut(
    model: ModelConfig, degree: int, experts: ExpertCut | None = None, *, is_native: bool = True
) -> str | None:
    """Why the model cannot be cut into this number of parts; None: it can. A layer of each kind is asked."""
    kinds = replace(model, layers=tuple(layer for layer, _ in model.layer_kinds))
    try:
        ModelCut(kinds, degree, experts, is_native=is_native).part()
    except ModelConfigError as error:
        return error.what
    return None


def why_not_divided(model: ModelConfig, num_parts: int, num_owners: int, *, is_native: bool = True) -> str | None:
    """Why neighbours of this number cannot divide the KV cache of `num_parts` ranks; None: they can. See ModelCut.

    All neighbours must hold the same keys and values, and all groups of neighbours as many heads of q.
    """
    if num_owners == 1:
        return None
    if num_parts % num_owners:
        return f"{num_owners} does not divide the number of ranks, {num_parts}"
    groups = [range(first, first + num_owners) for first in range(0, num_parts, num_owners)]
    # Whatever ranks have of the experts, the degree is legal.
    attention = replace(model, layers=tuple(replace(layer, feed_forward=None) for layer in model.layers))
    for layer in ModelCut(attention, num_parts, is_native=is_native).part().layers:
        part = layer.attention
        if isinstance(part, Full):
            share, key_dim, value_dim = part.qkv.share, part.head_dim, part.head_dim
        elif isinstance(part, Latent):
            share, key_dim, value_dim = part.up.share, part.rank + part.rope_dim, part.rank
        else:
            continue
        assert share is not None, "every rank has a part"
        if isinstance(part, Full) and any(len({share.rows[1][rank] for rank in ranks}) > 1 for ranks in groups):
            return f"ranks hold different heads of k and v: {num_parts} ranks have {_num_heads(share, key_dim)} of them"
        if len({sum(share.widths(0)[rank] for rank in ranks) for ranks in groups}) > 1:
            return f"not every {num_owners} neighbours have as many heads of q"
        if max(key_dim, value_dim) > MOST_HEAD_DIM:
            return f"heads of {max(key_dim, value_dim)} elements are more than {MOST_HEAD_DIM}"
    return None


def _num_heads(share: Share, head_dim: int) -> int:
    """The number of different key heads of all ranks."""
    return len({row for rows in share.rows[1] for row in rows}) // head_dim


def legal_divisions(model: ModelConfig, num_parts: int, *, is_native: bool = True) -> list[int]:
    """The numbers of ranks that can divide the KV cache of `num_parts` ranks. See ModelCut."""
    counts = range(1, num_parts + 1)
    return [count for count in counts if why_not_divided(model, num_parts, count, is_native=is_native) is None]


def check_division(model: ModelConfig, num_parts: int, num_owners: int, *, is_native: bool = True) -> None:
    """Raise ConfigError if ranks cannot divide the KV cache so; it names legal numbers. The degree must be legal."""
    reason = why_not_divided(model, num_parts, num_owners, is_native=is_native)
    if reason is not None:
        legal = legal_divisions(model, num_parts, is_native=is_native)
        expected = f"{'one of ' if len(legal) > 1 else ''}{', '.join(map(str, legal))}"
        raise ConfigError(
            f"{num_owners} ranks each cannot divide the KV cache: {reason}",
            value=num_owners,
            expected=f"{expected} with --tensor-parallel-size {num_parts}",
            fix="Ranks divide keys and values that all of them hold: see docs/parallel.md",
            param="decode_context_parallel_size",
        )


def check_degree(
    model: ModelConfig,
    degree: int,
    num_devices: int | None = None,
    experts: ExpertCut | None = None,
    *,
    is_native: bool = True,
) -> None:
    """Raise ConfigError for a number of parts that the model cannot have. It names the possible numbers. See ModelCut.

    Args:
        num_devices: the number of devices that copies of the model share; None: as many as a copy takes.
    """
    reason = None
    if num_devices is not None and num_devices % max(degree, 1):
        reason = f"{num_devices} devices do not make whole copies"
    if degree < 1:
        reason = "a copy takes at least one device"
    reason = reason or why_not_cut(model, degree, experts, is_native=is_native)
    if reason is not None:
        legal = legal_degrees(model, MOST_DEGREES, experts, is_native=is_native)
        expected = f"one of {', '.join(map(str, legal))}"
        if num_devices is not None:
            here = [each for each in legal if num_devices % each == 0]
            expected = f"one of {', '.join(map(str, here))} with {num_devices} devices; the model allows {expected[7:]}"
        raise ConfigError(
            f"A copy of the model cannot be shared by {degree} devices: {reason}",
            value=degree,
            expected=expected,
            param="tensor_parallel_size",
        )
