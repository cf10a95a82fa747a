"""config.json in our names, read once, and what the model costs: parameters, bytes, KV bytes per token. No torch.

Hugging Face's names are translated in hf_config/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.gguf.file import is_gguf, open_gguf
from quire.hf_config.families import QkNorm
from quire.hf_config.fields import Fields
from quire.hf_config.from_gguf import to_hf_config
from quire.hf_config.gguf_types import GgufWeights, gguf_weights
from quire.hf_config.json_file import read_object
from quire.hf_config.layer_format import QuantizedCheckpoint
from quire.hf_config.quantization import OUTPUT, SEPARATE_FILES, parse_description
from quire.hf_config.rope import RopeConfig
from quire.hf_config.translate import merge, translate
from quire.kv_format import KvFormat
from quire.stored_linear import LinearShape, StoredLinear, stored_from
from quire.weight_format import DTYPE_BYTES, ON_LOAD

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeConfig", "load_model_config"]


class BlockLinears(NamedTuple):
    """The linear layers of one block."""

    qkv: LinearShape
    attention_output: LinearShape
    gate_up: LinearShape
    down: LinearShape


class WeightBytes(NamedTuple):
    """Bytes of weights in memory by kind: scales and padding included, tied embeddings counted in the output."""

    blocks: int  # linear layers
    output: int
    embeddings: int
    norms_and_biases: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts about one model. Sizes count elements, windows and lengths count tokens."""

    model: str  # folder or GGUF file it was read from
    model_type: str
    architecture: str
    is_native: bool  # quire.models has its family and activation; else it needs the transformers backend
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    quantized: QuantizedCheckpoint | GgufWeights | None  # how its linear layers are stored, if not in dtype
    tie_word_embeddings: bool
    has_fused_checkpoint: bool  # it holds qkv_proj and gate_up_proj
    rms_norm_eps: float
    hidden_act: str  # silu, gelu or gelu_tanh
    rope: RopeConfig
    local_rope: RopeConfig | None  # of layers with a window, where it differs (Gemma 3)
    rope_layers: tuple[bool, ...]  # False: a layer without position encoding (SmolLM3)
    layer_windows: tuple[int, ...]  # per layer; 0 = attends to everything before
    attention_scale: float  # factor on q.k
    attention_soft_cap: float  # cap * tanh(score / cap); 0 = none
    logits_soft_cap: float  # 0 = none
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm  # RMS norm of q and k: per head, or over the full width of all heads
    norms_per_layer: int  # RMS norms of hidden_size in one layer
    embedding_multiplier: float  # on the embeddings
    residual_multiplier: float  # on what attention and MLP add to the residual
    logits_scaling: float  # logits are divided by it
    eos_token_ids: tuple[int, ...]
    ignored_fields: tuple[str, ...]  # of config.json, because the modelling code of the architecture does not read them
    hf_overrides: dict[str, Any] = field(default_factory=dict, hash=False)  # what was merged over config.json

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Position encoding of one layer; None if it has none."""
        if not self.rope_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope

    def kv_bytes_per_token(self, kv: KvFormat) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * kv.row_bytes(self.head_dim)

    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once. Exact for native models, an estimate for others."""
        linear = sum(linear.out_features * linear.in_features for linear in self.linears())
        return linear + self._num_looked_up_parameters() + self._num_norm_and_bias_parameters()

    def num_block_parameters(self) -> int:
        """Elements of all weights but embeddings and output projection: what every token is multiplied with."""
        return self.num_parameters() - self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    def weight_bytes(self, dtype: str, quantization: str | None = None, *, is_packed: bool = True) -> int:
        """Bytes of all weights in `dtype` (a key of DTYPE_BYTES), linear layers as they are held.

        `is_packed`: the compiled kernels hold weights in `dtype`; else they are as in the checkpoint, without padding.
        """
        return sum(self.weight_bytes_by_kind(dtype, quantization, is_packed=is_packed))

    def weight_bytes_by_kind(
        self, dtype: str, quantization: str | None = None, *, is_packed: bool = True
    ) -> WeightBytes:
        """The parts of `weight_bytes`."""
        if not self.is_native:
            is_packed = False  # transformers' code multiplies with them
        blocks = output = 0
        for linear in self.linears():
            num_bytes = sum(part.num_bytes(dtype, is_packed=is_packed) for part in self.stored(linear, quantization))
            if linear == self.output_linear():
                output += num_bytes
            else:
                blocks += num_bytes
        others = self._num_norm_and_bias_parameters() * DTYPE_BYTES[dtype]
        return WeightBytes(blocks, output, self._looked_up_bytes(dtype), others)

    def read_bytes_per_step(self, dtype: str, quantization: str | None = None) -> int:
        """Bytes of the weights every step reads: all but embeddings that are only looked up, a row per token."""
        return self.weight_bytes(dtype, quantization) - self._looked_up_bytes(dtype)

    def stored_linears(self, quantization: str | None = None) -> Iterator[StoredLinear]:
        """All linear layers as `stored` gives them."""
        return (stored for linear in self.linears() for stored in self.stored(linear, quantization))

    def stored(self, linear: LinearShape, quantization: str | None = None) -> tuple[StoredLinear, ...]:
        """How a layer is stored, in parts if its shards are not fused.

        A key of ON_LOAD for `quantization` makes integers of a checkpoint in floating point; else, the checkpoint says.
        """
        is_output = linear == self.output_linear()
        if isinstance(self.quantized, GgufWeights):
            return stored_from(linear, self.quantized)
        if self.quantized is not None and not (is_output and self.tie_word_embeddings):
            return stored_from(linear, self.quantized)
        held, reason = None, f"the checkpoint is in {self.dtype}"
        if self.quantized is not None:
            reason = "shared with the embeddings, which are not quantized"
        elif quantization is not None:
            on_load = ON_LOAD[quantization]
            held = on_load.output if is_output else on_load.linear
            reason = f"--quantization {quantization}"
        return (StoredLinear(shape=linear, source=None, held=held, reason=reason),)

    def stored_embeddings(self) -> StoredLinear | None:
        """The embeddings, where they are a table of their own in integers; None: shared, or in the model's dtype."""
        if self.tie_word_embeddings or not isinstance(self.quantized, GgufWeights):
            return None
        shape = LinearShape(prefix="model.", shards=(("embed_tokens", self.vocab_size),), in_features=self.hidden_size)
        (table,) = stored_from(shape, self.quantized)
        return table if table.held is not None else None

    def linears(self) -> Iterator[LinearShape]:
        """All linear layers, fused where their inputs are the same."""
        for layer in range(self.num_layers):
            yield from self.block_linears(layer)
        yield self.output_linear()

    def block_linears(self, layer: int) -> BlockLinears:
        """Those of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv: tuple[tuple[str, int], ...] = (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width))
        gate_up: tuple[tuple[str, int], ...] = (("gate_proj", inner), ("up_proj", inner))
        if self.has_fused_checkpoint:
            qkv, gate_up = (("qkv_proj", q_width + 2 * kv_width),), (("gate_up_proj", 2 * inner),)
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        return BlockLinears(
            LinearShape(prefix=attention, shards=qkv, in_features=hidden),
            LinearShape(prefix=attention, shards=(("o_proj", hidden),), in_features=q_width),
            LinearShape(prefix=mlp, shards=gate_up, in_features=hidden),
            LinearShape(prefix=mlp, shards=(("down_proj", hidden),), in_features=inner),
        )

    def output_linear(self) -> LinearShape:
        """hidden -> logits."""
        prefix, name = ("model.", "embed_tokens") if self.tie_word_embeddings else ("", OUTPUT)
        return LinearShape(prefix=prefix, shards=((name, self.vocab_size),), in_features=self.hidden_size)

    def _num_looked_up_parameters(self) -> int:
        """Elements of embeddings that are not the output projection too."""
        return 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size

    def _looked_up_bytes(self, dtype: str) -> int:
        """Bytes of them, as they are held."""
        table = self.stored_embeddings()
        return self._num_looked_up_parameters() * DTYPE_BYTES[dtype] if table is None else table.num_bytes(dtype)

    def _num_norm_and_bias_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = self.qkv_bias * (q_width + 2 * kv_width) + self.attention_output_bias * hidden
        biases += self.mlp_bias * (2 * inner + hidden)
        qk_norm = {"none": 0, "head": 2 * self.head_dim, "full": q_width + kv_width}[self.qk_norm]
        return self.num_layers * (biases + qk_norm + self.norms_per_layer * hidden) + hidden


def load_model_config(
    folder: Path, overrides: dict[str, Any] | None = None, *, any_architecture: bool = False
) -> ModelConfig:
    """Read config.json of a checkpoint folder and, if there, the end-of-sequence ids of its generation_config.json.

    Args:
        folder: the checkpoint folder, or a GGUF file, whose metadata is taken for a config.json.
        overrides: merged over config.json first, in Hugging Face's names (`--hf-overrides`); nested objects merge too.
        any_architecture: also accept an architecture or activation that is not native (for the transformers backend).

    Raises:
        ModelConfigError: a file is missing or no JSON object, a field is missing or illegal, unknown architecture.
        WeightsError: a malformed GGUF file.
    """
    folder = Path(folder)
    if is_gguf(folder):
        file = open_gguf(folder)
        facts = translate(merge(to_hf_config(file), overrides or {}), str(folder), any_architecture=False)
        facts["quantized"] = gguf_weights(file)
        return ModelConfig(model=str(folder), hf_overrides=dict(overrides or {}), **facts)
    raw = merge(read_object(folder / "config.json", required=True), overrides or {})
    facts = translate(raw, str(folder / "config.json"), any_architecture)
    if facts["quantized"] is None and "quantization_config" not in raw:  # null there is an override
        for name, method in SEPARATE_FILES.items():
            if description := read_object(folder / name, required=False):
                facts["quantized"] = parse_description(Fields(description, str(folder / name)), method)
                break
    path = folder / "generation_config.json"
    generation = read_object(path, required=False)
    if generation.get("eos_token_id") is not None:  # replaces the one of config.json, as in transformers
        facts["eos_token_ids"] = Fields(generation, str(path)).token_ids("eos_token_id")
    return ModelConfig(model=str(folder), hf_overrides=dict(overrides or {}), **facts)
