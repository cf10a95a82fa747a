"""config.json in our names, read once, and what the model costs: parameters, bytes, KV bytes per token. No torch.

Hugging Face's names are translated in hf_config/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ModelConfigError
from quire.hf_config.families import QkNorm
from quire.hf_config.fields import Fields
from quire.hf_config.rope import RopeConfig
from quire.hf_config.translate import merge, translate
from quire.weight_format import ON_LOAD

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeConfig", "load_model_config"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts about one model. Sizes count elements, windows and lengths count tokens."""

    model: str  # folder it was read from
    model_type: str
    architecture: str
    is_native: bool  # a family of quire.models; else it needs the transformers backend
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: str  # of the checkpoint: bfloat16, float16 or float32
    tie_word_embeddings: bool
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
    hf_overrides: dict[str, Any] = field(default_factory=dict, hash=False)  # what was merged over config.json

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Position encoding of one layer; None if it has none."""
        if not self.rope_layers[layer]:
            return None
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once. Exact for native models, an estimate for others."""
        linear = sum(count * N * K for count, N, K in self._linear_shapes())
        return linear + self.vocab_size * self.hidden_size + self._num_other_parameters()

    def weight_bytes(self, dtype: str, quantization: str | None = None) -> int:
        """Bytes of all weights in `dtype` (a key of DTYPE_BYTES), linear layers as `quantization` stores them."""
        if quantization is None:
            return self.num_parameters() * DTYPE_BYTES[dtype]
        on_load = ON_LOAD[quantization]
        linear = sum(count * on_load.linear.num_bytes(N, K) for count, N, K in self._linear_shapes())
        output = on_load.output.num_bytes(self.vocab_size, self.hidden_size)
        return linear + output + self._num_other_parameters() * DTYPE_BYTES[dtype]

    def _linear_shapes(self) -> Iterator[tuple[int, int, int]]:
        """(how often, out-features, in-features) of the linear layers in all blocks, fused as they are held."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield self.num_layers, q_width + 2 * kv_width, hidden
        yield self.num_layers, hidden, q_width
        yield self.num_layers, 2 * inner, hidden
        yield self.num_layers, hidden, inner

    def _num_other_parameters(self) -> int:
        """Elements of norms and biases, and of embeddings that are not the output projection too."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = self.qkv_bias * (q_width + 2 * kv_width) + self.attention_output_bias * hidden
        biases += self.mlp_bias * (2 * inner + hidden)
        qk_norm = {"none": 0, "head": 2 * self.head_dim, "full": q_width + kv_width}[self.qk_norm]
        embeddings = 0 if self.tie_word_embeddings else self.vocab_size * hidden
        return embeddings + self.num_layers * (biases + qk_norm + self.norms_per_layer * hidden) + hidden


def load_model_config(
    folder: Path, overrides: dict[str, Any] | None = None, *, any_architecture: bool = False
) -> ModelConfig:
    """Read config.json of a checkpoint folder and, if there, the end-of-sequence ids of its generation_config.json.

    Args:
        folder: the checkpoint folder.
        overrides: merged over config.json first, in Hugging Face's names (`--hf-overrides`); nested objects merge too.
        any_architecture: also accept an architecture that is not native (for the transformers backend).

    Raises:
        ModelConfigError: a file is missing or no JSON object, a field is missing or illegal, unknown architecture.
    """
    folder = Path(folder)
    raw = merge(_read_object(folder / "config.json", required=True), overrides or {})
    facts = translate(raw, str(folder / "config.json"), any_architecture)
    path = folder / "generation_config.json"
    generation = _read_object(path, required=False)
    if generation.get("eos_token_id") is not None:  # replaces the one of config.json, as in transformers
        facts["eos_token_ids"] = Fields(generation, str(path)).token_ids("eos_token_id")
    return ModelConfig(model=str(folder), hf_overrides=dict(overrides or {}), **facts)


def _read_object(path: Path, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelConfigError(
            f"{path} does not exist",
            expected="the folder of a Hugging Face checkpoint",
            fix="Check the model's folder or hub id",
        ) from None
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}", fix="Download the file again") from None
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} does not hold a JSON object", value=value, expected="an object of settings")
    return value
