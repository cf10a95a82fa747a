"""The part of a model that one of several devices holds: a model of its own, planned like any other. No torch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from quire.errors import ConfigError, ModelConfigError
from quire.formats.stored_linear import StoredLinear, legal_cuts
from quire.layer_spec import WHOLE, Attention, Dense, FeedForward, Full, LinearShape
from quire.model_config import ModelConfig

MOST_DEGREES = 64  # devices per copy that are looked at where the legal numbers are listed


class ModelCut:
    """Cuts a model whose weights are in one format into `num_parts` equal parts.

    Heads, the inner width and the vocabulary are shared; norms are held by every device, and so are heads of keys and
    values where there are fewer of them than devices.

    Args:
        quantization: as ModelConfig.weight_bytes takes it.
    """

    def __init__(self, model: ModelConfig, quantization: str | None, num_parts: int) -> None:
        self._model, self._quantization, self._num_parts = model, quantization, num_parts
        self._known: dict[Hashable, LinearShape] = {}

    def part(self) -> ModelConfig:
        """What one device holds. Raises ModelConfigError where the parts would not be equal and whole."""
        model = self._model
        if self._num_parts == 1:
            return model
        if not model.is_native:
            raise self._impossible("transformers' modelling code runs it, which is not cut")
        layers = tuple(
            replace(
                layer,
                attention=None if layer.attention is None else self._attention(layer.attention),
                feed_forward=None if layer.feed_forward is None else self._feed_forward(layer.feed_forward),
            )
            for layer in model.layers
        )
        return replace(model, layers=layers, vocab_size=self._linear(model.output_linear()).out_features)

    def _attention(self, part: Attention) -> Attention:
        if not isinstance(part, Full):
            raise self._impossible("its attention is not of heads with keys and values of their own")
        num_kv_heads = max(part.num_kv_heads // self._num_parts, 1)
        qkv, output = self._linear(part.qkv), self._linear(part.output)
        return replace(
            part,
            num_q_heads=part.num_q_heads // self._num_parts,
            num_kv_heads=num_kv_heads,
            qkv=qkv,
            output=output,
        )

    def _feed_forward(self, part: FeedForward) -> FeedForward:
        if not isinstance(part, Dense):
            raise self._impossible("it has experts")
        return replace(part, gate_up=self._linear(part.gate_up), down=self._linear(part.down))

    def _linear(self, linear: LinearShape) -> LinearShape:
        """Layers that differ in their names alone are cut once."""
        stored = self._model.stored(linear, self._quantization)
        sizes = tuple(size for _, size in linear.shards)
        key = (
            sizes,
            linear.in_features,
            linear.cut,
            *((part.source, part.held, len(part.shape.shards)) for part in stored),
        )
        if key not in self._known:
            self._known[key] = self._cut(linear, stored)
        known = self._known[key]
        shards = tuple((name, size) for (name, _), (_, size) in zip(linear.shards, known.shards, strict=True))
        return replace(linear, shards=shards, in_features=known.in_features, cut=WHOLE)

    def _cut(self, linear: LinearShape, stored: tuple[StoredLinear, ...]) -> LinearShape:
        pieces = [legal_cuts(part, self._num_parts)[0].stored.shape for part in stored]
        shards = tuple(shard for piece in pieces for shard in piece.shards)
        return replace(linear, shards=shards, in_features=pieces[0].in_features)

    def _impossible(self, why: str) -> ModelConfigError:
        return ModelConfigError(f"{self._model.architecture} cannot be cut in {self._num_parts}: {why}")


def legal_degrees(model: ModelConfig, quantization: str | None, most: int) -> list[int]:
    """Into how many parts the model can be cut, at most `most`."""
    return [degree for degree in range(1, most + 1) if why_not_cut(model, quantization, degree) is None]


def why_not_cut(model: ModelConfig, quantization: str | None, degree: int) -> str | None:
    """Why the model cannot be cut into so many parts; None: it can."""
    try:
        ModelCut(model, quantization, degree).part()
    except ModelConfigError as error:
        return error.what if error.value is None else f"{error.what} ({error.value})"
    return None


def check_degree(model: ModelConfig, quantization: str | None, degree: int, num_devices: int) -> None:
    """ConfigError for a number of parts that the model cannot have on so many devices, with those that it can have."""
    reason = f"{num_devices} devices do not make whole copies" if num_devices % max(degree, 1) else None
    if degree < 1:
        reason = "a copy takes at least one device"
    reason = reason or why_not_cut(model, quantization, degree)
    if reason is not None:
        legal = legal_degrees(model, quantization, MOST_DEGREES)
        here = [each for each in legal if num_devices % each == 0]
        raise ConfigError(
            f"A copy of the model cannot be shared by {degree} devices: {reason}",
            value=degree,
            expected=f"one of {', '.join(map(str, here))} with {num_devices} devices; the model allows "
            + ", ".join(map(str, legal)),
            param="tensor_parallel_size",
        )
