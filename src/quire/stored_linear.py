"""How each linear layer of a model is stored: in the checkpoint and, once loaded, in memory. No torch.

One answer for planning, for loading and for `quire explain`.
Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from quire.errors import ModelConfigError
from quire.gguf.types import FLOAT_TYPES, TensorType
from quire.hf_config.gguf_types import GgufWeights
from quire.hf_config.layer_format import LayerFormat, QuantizedCheckpoint
from quire.weight_format import GGUF, K_UNIT, Fp8Format, GroupedFormat, WeightFormat, float_bytes


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear layer whose weight may lie in several tensors of the checkpoint, side by side.

    Attributes:
        prefix: of the tensors' names, as `model.layers.0.self_attn.`.
        shards: (name, N) in the order of the outputs, as (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)).
        in_features: K.
    """

    prefix: str
    shards: tuple[tuple[str, int], ...]
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(num_outputs for _, num_outputs in self.shards)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules in the checkpoint."""
        return tuple(self.prefix + shard for shard, _ in self.shards)


@dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """A layer, or a shard of one.

    Attributes:
        source: its tensors in the checkpoint; None: one weight in floating point.
        held: its weight in memory; None: in the model's dtype.
        reason: why it is so.
    """

    shape: LinearShape
    source: LayerFormat | TensorType | None
    held: WeightFormat | None
    reason: str

    def num_bytes(self, dtype: str, *, is_packed: bool = True) -> int:
        """Of the weight in memory, for a model in `dtype`. `is_packed`: by the compiled kernels, which pad it."""
        N, K = self.shape.out_features, self.shape.in_features
        if self.held is None:
            return float_bytes(N, K, dtype, is_packed=is_packed)
        if isinstance(self.held, Fp8Format):
            return self.held.num_bytes(N, K, is_packed=is_packed)
        return self.held.num_bytes(N, K)


def stored_from(shape: LinearShape, checkpoint: QuantizedCheckpoint | GgufWeights) -> tuple[StoredLinear, ...]:
    """A layer of a quantized checkpoint: one, or its shards each for itself where they cannot be fused.

    They cannot if their formats differ, or if each brings its own order of the in-features.
    Raises ModelConfigError for a layer whose sizes the format does not allow.
    """
    if isinstance(checkpoint, GgufWeights):
        return _stored_from_gguf(shape, checkpoint)
    shards = [replace(shape, shards=(shard,)) for shard in shape.shards]
    formats = [checkpoint.format_of(shard.names[0]) for shard in shards]
    first = formats[0]
    parts = [shape] if all(f == first for f in formats) and not (first and first.has_order) else shards
    return tuple(_stored(part, checkpoint) for part in parts)


def _stored(shape: LinearShape, checkpoint: QuantizedCheckpoint) -> StoredLinear:
    name = shape.names[0]
    rule = checkpoint.rule_for(name)
    source = None if rule is None else rule.format
    if source is None:
        reason = "no field of the config covers it" if rule is None else rule.reason
        return StoredLinear(shape=shape, source=None, held=None, reason=f"not quantized in the checkpoint: {reason}")
    for shard_name, (_, num_outputs) in zip(shape.names, shape.shards, strict=True):
        _check_sizes(source, shard_name, num_outputs, shape.in_features)
    return StoredLinear(
        shape=shape,
        source=source,
        held=held_form(source, shape.in_features),
        reason=f"the checkpoint's {source.describe()}",
    )


def _stored_from_gguf(shape: LinearShape, weights: GgufWeights) -> tuple[StoredLinear, ...]:
    """Shards of one type that lie side by side are fused: files give v, often, a better type than q and k."""
    parts = []
    for tensor_type, shards in groupby(shape.shards, key=lambda shard: weights.type_of(shape.prefix + shard[0])):
        is_float = tensor_type is None or tensor_type.name in FLOAT_TYPES
        if tensor_type is not None and shape.in_features % tensor_type.block_size:
            raise ModelConfigError(
                f"{shape.prefix}* has a width that its type in the GGUF file, {tensor_type.name}, cannot have",
                value=shape.in_features,
                expected=f"a multiple of {tensor_type.block_size}",
                fix="Check the sizes in the file's metadata, and those given with --hf-overrides",
            )
        parts.append(
            StoredLinear(
                shape=replace(shape, shards=tuple(shards)),
                source=None if is_float else tensor_type,
                held=None if tensor_type is None or is_float else GGUF[tensor_type.name],
                reason="not in the GGUF file" if tensor_type is None else f"{tensor_type.name} in the GGUF file",
            )
        )
    return tuple(parts)


def held_form(source: LayerFormat, K: int) -> WeightFormat:
    """The form in memory of a weight with K in-features that a checkpoint stores quantized."""
    if source.layout == "fp8":
        columns = K if source.block is None else source.block[1]
        return Fp8Format(columns if columns < K else None)
    has_groups = source.group_size is not None and source.group_size < K
    return GroupedFormat(
        source.bits,
        source.group_size if has_groups else None,
        scales="float16" if has_groups else "float32",
        offsets="uint8" if source.has_zeros else None,
        is_ordered=source.has_order,
    )


def _check_sizes(source: LayerFormat, name: str, N: int, K: int) -> None:
    if source.block is not None and source.block[1] < K and source.block[1] % K_UNIT:
        raise ModelConfigError(
            f"{name} has scales per block of columns of a width that is not read",
            value=source.block[1],
            expected=f"a multiple of {K_UNIT}",
            fix="Use the unquantized checkpoint of the model with --quantization fp8",
        )
    per_word = 32 // source.bits
    packed_along_K = source.layout == "gptq"
    packed_along_N = source.layout in ("awq", "gptq") or (source.layout == "packed" and source.has_zeros)
    if (packed_along_K and K % per_word) or (packed_along_N and N % per_word):
        raise ModelConfigError(
            f"{name} has a size that its format cannot pack",
            value=[N, K],
            expected=f"multiples of {per_word}",
            fix="Check that config.json belongs to the checkpoint",
        )
