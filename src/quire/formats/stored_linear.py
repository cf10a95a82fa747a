"""The stored form of each linear layer, in the checkpoint and in memory. No torch.

Planning, loading and `quire explain` use the same answer.
Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

from quire.errors import ModelConfigError
from quire.formats.weight_format import GGUF, K_UNIT, MXFP4, Fp8Format, GroupedFormat, WeightFormat, float_bytes
from quire.gguf.types import FLOAT_TYPES, TensorType
from quire.hf_config.gguf_types import GgufWeights
from quire.hf_config.layer_format import LayerFormat, QuantizedCheckpoint
from quire.layer_spec.shapes import LinearShape

TAKEN_APART = "taken apart into matrices of heads in the model's dtype"


@dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """The stored form of a linear layer, or of a shard of one.

    Attributes:
        source: the format of its tensors in the checkpoint; None: one weight in floating point.
        held: the format of its weight in memory; None: the model's dtype. A quantized weight is unpacked to it.
        reason: explains the choice.
    """

    shape: LinearShape
    source: LayerFormat | TensorType | None
    held: WeightFormat | None
    reason: str

    def num_bytes(self, dtype: str, *, is_packed: bool = True) -> int:
        """Bytes of the weight in memory, for a model in `dtype`. `is_packed`: the compiled kernels pack and pad it."""
        N, K, count = self.shape.out_features, self.shape.in_features, max(self.shape.num_experts, 1)
        if self.held is None:
            parts = [(each.num_heads, each.N, each.K) for each in self.shape.matrices] or [(count, N, K)]
            return sum(count * float_bytes(N, K, dtype, is_packed=is_packed) for count, N, K in parts)
        if isinstance(self.held, Fp8Format):
            return count * self.held.num_bytes(N, K, is_packed=is_packed)
        return count * self.held.num_bytes(N, K)


def stored_from(shape: LinearShape, checkpoint: QuantizedCheckpoint | GgufWeights) -> tuple[StoredLinear, ...]:
    """A layer of a quantized checkpoint: fused into one, or one entry per shard if they cannot be fused.

    Shards cannot be fused if their formats differ, or if each has its own order of the in-features.
    Raises ModelConfigError if the format does not allow the sizes of the layer.
    """
    if shape.matrices:
        is_apart = isinstance(checkpoint, GgufWeights) and checkpoint.type_of(shape.names[0]) is None
        return tuple(_taken_apart(part, checkpoint) for part in (shape.taken_apart() if is_apart else (shape,)))
    if isinstance(checkpoint, GgufWeights):
        return _stored_from_gguf(shape, checkpoint)
    shards = [shape.only([index]) for index in range(len(shape.shards))]
    formats = [_format(shard, checkpoint) for shard in shards]
    first = formats[0]
    parts = [shape] if all(f == first for f in formats) and not (first and first.has_order) else shards
    return tuple(_stored(part, checkpoint) for part in parts)


def _taken_apart(shape: LinearShape, checkpoint: QuantizedCheckpoint | GgufWeights) -> StoredLinear:
    (whole,) = stored_from(replace(shape, matrices=()), checkpoint)
    return replace(whole, shape=shape, held=None, reason=f"{whole.reason}; {TAKEN_APART}")


def _format(shard: LinearShape, checkpoint: QuantizedCheckpoint) -> LayerFormat | None:
    """The format of a layer, which all its experts share."""
    (name,) = shard.names
    first, *others = checkpoint.formats_of(name, shard.num_stored_experts)
    for expert, other in enumerate(others, 1):
        if other != first:
            described = ["floating point" if each is None else each.describe() for each in (other, first)]
            raise ModelConfigError(
                f"{name.format(expert)} has another format than {name.format(0)}",
                value=described[0],
                expected=f"{described[1]}, because the experts of a layer have one format",
                fix="Quantize all experts of a layer alike, or use the unquantized checkpoint with --quantization",
            )
    return first


def _stored(shape: LinearShape, checkpoint: QuantizedCheckpoint) -> StoredLinear:
    name = shape.names[0].format(0)
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
    """Fuse neighbouring shards of the same type. Many files store v in a better type than q and k."""
    parts = []
    for tensor_type, shards in groupby(range(len(shape.shards)), key=lambda index: weights.type_of(shape.names[index])):
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
                shape=shape.only(tuple(shards)),
                source=None if is_float else tensor_type,
                held=None if tensor_type is None or is_float else GGUF[tensor_type.name],
                reason="not in the GGUF file" if tensor_type is None else f"{tensor_type.name} in the GGUF file",
            )
        )
    return tuple(parts)


def held_form(source: LayerFormat, K: int) -> WeightFormat:
    """The form in memory of a checkpoint's quantized weight with K in-features."""
    if source.layout == "fp8":
        columns = K if source.block is None else source.block[1]
        return Fp8Format(columns if columns < K else None)
    if source.layout == "mxfp4":
        return MXFP4
    has_groups = source.group_size is not None and source.group_size < K
    return GroupedFormat(
        source.bits,
        source.group_size if has_groups else None,
        scales="float16" if has_groups else "float32",
        offsets="uint8" if source.has_zeros else None,
        is_ordered=source.has_order,
    )


def _packs_rows(source: LayerFormat) -> bool:
    """Whether a word of the checkpoint holds numbers of several out-features."""
    return source.layout in ("awq", "gptq") or (source.layout == "packed" and source.has_zeros)


def _check_sizes(source: LayerFormat, name: str, N: int, K: int) -> None:
    if source.block is not None and source.block[1] < K and source.block[1] % K_UNIT:
        raise ModelConfigError(
            f"{name} has scales per block of columns of a width that is not read",
            value=source.block[1],
            expected=f"a multiple of {K_UNIT}",
            fix="Use the unquantized checkpoint of the model with --quantization fp8",
        )
    if source.layout == "mxfp4" and K % 32:
        raise ModelConfigError(
            f"{name} has a width that is no whole number of MXFP4's blocks",
            value=K,
            expected="a multiple of 32",
            fix="Check that config.json belongs to the checkpoint",
        )
    per_word = 32 // source.bits
    packed_along_K = source.layout == "gptq"
    if (packed_along_K and K % per_word) or (_packs_rows(source) and N % per_word):
        raise ModelConfigError(
            f"{name} has a size that its format cannot pack",
            value=[N, K],
            expected=f"multiples of {per_word}",
            fix="Check that config.json belongs to the checkpoint",
        )


def row_unit(stored: StoredLinear) -> int:
    """The number of out-features that the checkpoint's form keeps together."""
    source = stored.source
    if not isinstance(source, LayerFormat):
        return 1
    return lcm(32 // source.bits if _packs_rows(source) else 1, source.block[0] if source.block else 1)
