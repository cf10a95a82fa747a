"""The part of a model that one of several ranks holds: a model of its own, planned and loaded like any other. No torch.

Every linear layer is cut by its outputs, so the sum behind an output is the same at every degree. Where a layer reads
what another layer's cut outputs became, ranks join their parts first (layers/joined.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from quire.distributed.layout import head_shares, shares
from quire.errors import ConfigError, ModelConfigError
from quire.formats.stored_linear import row_unit
from quire.formats.weight_format import PANEL_WIDTH
from quire.layer_spec import Attention, Dense, FeedForward, Full, LinearShape, Share
from quire.model_config import ModelConfig

MOST_DEGREES = 64  # ranks per copy that are looked at where the legal numbers are listed


class ModelCut:
    """Cuts a model into `num_parts` parts that differ as little as heads and panels allow.

    Heads, the inner width, outputs and the vocabulary are shared. Every rank has all norms. Heads of keys and values
    are held by several ranks where there are fewer of them than ranks.
    """

    def __init__(self, model: ModelConfig, num_parts: int) -> None:
        self._model, self._num_parts = model, num_parts

    def part(self, rank: int = 0) -> ModelConfig:
        """What one rank holds; the first one holds the most. Raises ModelConfigError if the model cannot be cut so."""
        model = self._model
        if self._num_parts == 1:
            return model
        if not model.is_native:
            raise self._impossible("transformers' modelling code runs it, which is not cut")
        if model.drafter is not None or model.head is not None:
            raise self._impossible("a model that drafts is not cut, and not run beside one that is")
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
        return replace(model, layers=layers, vocab_share=Share(rank, (tuple(rows),), (model.vocab_size,)))

    def _attention(self, part: Attention, rank: int) -> Attention:
        if not isinstance(part, Full):
            raise self._impossible("its attention is not of heads with keys and values of their own")
        if part.sinks or part.qkv.paired_heads:
            raise self._impossible("its heads have sinks, or rows in another order, which ranks do not share yet")
        size, unit = part.head_dim, self._unit(part.qkv)
        heads = head_shares(part.num_q_heads, part.num_kv_heads, self._num_parts, lcm(unit, size) // size)
        if not all(own for own, _ in heads):
            raise self._impossible(f"it has {part.num_q_heads} heads")
        queries = [range(own.start * size, own.stop * size) for own, _ in heads]
        keys = [range(own.start * size, own.stop * size) for _, own in heads]
        if any(each.start % unit for each in (*queries, *keys)):
            raise self._impossible(f"{part.qkv.names[0]} keeps {unit} out-features together")
        if part.qk_norm == "full" and self._num_parts > part.num_kv_heads:
            raise self._impossible(f"a norm over all heads needs a head of k per rank, and it has {part.num_kv_heads}")
        return replace(
            part,
            num_q_heads=len(heads[rank][0]),
            num_kv_heads=len(heads[rank][1]),
            qkv=_with_rows(part.qkv, rank, (queries, keys, keys)),
            output=self._joined(part.output, rank, queries),
        )

    def _feed_forward(self, part: FeedForward, rank: int) -> FeedForward:
        if not isinstance(part, Dense):
            raise self._impossible("it has experts, which are not shared by ranks in this version")
        inner = self._ranges(part.gate_up.names[0], part.down.in_features, self._unit(part.gate_up))
        return replace(
            part, gate_up=_with_rows(part.gate_up, rank, (inner, inner)), down=self._joined(part.down, rank, inner)
        )

    def _joined(self, linear: LinearShape, rank: int, inputs: Sequence[range]) -> LinearShape:
        rows = self._ranges(linear.names[0], linear.out_features, self._unit(linear))
        cut = _with_rows(linear, rank, (rows,))
        assert cut.share is not None
        return replace(cut, share=replace(cut.share, inputs=tuple(map(len, inputs))))

    def _ranges(self, what: str, size: int, unit: int) -> list[range]:
        """Whole panels, if there is one for every rank."""
        panels = lcm(PANEL_WIDTH, unit)
        ranges = shares(size, self._num_parts, panels if size >= self._num_parts * panels else unit)
        if not all(ranges):
            raise self._impossible(f"{what} has {size} rows, {unit} of which stay together")
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
    shards = tuple((name, len(section[rank])) for name, section in zip(names, rows, strict=True))
    return replace(linear, shards=shards, share=Share(rank, tuple(rows), sizes))


def legal_degrees(model: ModelConfig, most: int) -> list[int]:
    """Into how many parts the model can be cut, at most `most`."""
    return [degree for degree in range(1, most + 1) if why_not_cut(model, degree) is None]


def why_not_cut(model: ModelConfig, degree: int) -> str | None:
    """Why the model cannot be cut into so many parts; None: it can."""
    try:
        ModelCut(model, degree).part()
    except ModelConfigError as error:
        return error.what
    return None


def check_degree(model: ModelConfig, degree: int, num_devices: int | None = None) -> None:
    """ConfigError for a number of parts that the model cannot have, with those that it can have.

    Args:
        num_devices: that copies of the model share; None: as many as a copy takes.
    """
    reason = None
    if num_devices is not None and num_devices % max(degree, 1):
        reason = f"{num_devices} devices do not make whole copies"
    if degree < 1:
        reason = "a copy takes at least one device"
    reason = reason or why_not_cut(model, degree)
    if reason is not None:
        legal = legal_degrees(model, MOST_DEGREES)
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
