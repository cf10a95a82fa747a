"""config.json of published models: sizes, costs and rope as published; and the errors for broken files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelConfigError
from quire.formats.kv_format import KV_FORMATS
from quire.model_config import ModelConfig, load_model_config
from tests.examples import IS_FULL
from tests.real_models import write_config

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI_3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI_3_MINI_128K = {
    **PHI_3_MINI_4K,
    "max_position_embeddings": 131072,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
}
PHI_4 = {
    "architectures": ["Phi3ForCausalLM"],
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "max_position_embeddings": 16384,
    "model_type": "phi3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
PHI_4_MINI = {
    **PHI_4,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 100352,
}
GRANITE_3_3_8B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}

# name -> (config.json, head_dim, KV bytes per token in bf16, parameters as published, context, rope type)
PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int, int, str]] = {
    "Llama-3.2-1B": (LLAMA_3_2_1B, 64, 32_768, 1_235_814_400, 131_072, "llama3"),
    "Llama-3-8B": (LLAMA_3_8B, 128, 131_072, 8_030_261_248, 8192, "default"),
    "Qwen3-0.6B": (QWEN3_0_6B, 128, 114_688, 596_049_920, 40_960, "default"),
    "Qwen2.5-7B": (QWEN2_5_7B, 128, 57_344, 7_615_616_512, 131_072, "default"),
    "Mistral-7B-v0.1": (MISTRAL_7B, 128, 131_072, 7_241_732_096, 32_768, "default"),
    "gemma-2-2b": (GEMMA_2_2B, 256, 106_496, 2_614_341_888, 8192, "default"),
    "gemma-3-1b-it": (GEMMA_3_1B, 256, 26_624, 999_885_952, 32_768, "default"),
    # the text part; 4,300,079,472 with the vision tower and its projector
    "gemma-3-4b-it": (GEMMA_3_4B, 256, 139_264, 3_880_263_168, 131_072, "linear"),
    "Phi-3-mini-4k": (PHI_3_MINI_4K, 96, 393_216, 3_821_079_552, 4096, "default"),
    "Phi-3-mini-128k": (PHI_3_MINI_128K, 96, 393_216, 3_821_079_552, 131_072, "longrope"),
    "phi-4": (PHI_4, 128, 204_800, 14_659_507_200, 16_384, "default"),
    "Phi-4-mini": (PHI_4_MINI, 128, 131_072, 3_836_021_760, 131_072, "longrope"),
    "SmolLM3-3B": (SMOLLM3_3B, 128, 73_728, 3_075_098_624, 65_536, "default"),
    "OLMo-2-1124-7B": (OLMO_2_7B, 128, 524_288, 7_298_617_344, 4096, "default"),
    "granite-3.3-8b": (GRANITE_3_3_8B, 128, 163_840, 8_170_864_640, 131_072, "default"),
    "gpt-oss-20b": (GPT_OSS_20B, 64, 49_152, 20_914_757_184, 131_072, "yarn"),
    # the text part; 108,641,793,536 with the vision tower and its projector
    "Llama-4-Scout-17B-16E": (LLAMA_4_SCOUT, 128, 196_608, 107_769_861_120, 10_485_760, "llama3"),
}


@pytest.fixture
def load(tmp_path: Path):
    """Writes files of a checkpoint folder and loads its config."""

    def write_and_load(config: object, generation: object = None, **kwargs: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path, **kwargs)

    return write_and_load


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name, load):
    raw, head_dim, kv_bytes_per_token, num_parameters, max_model_len, rope_type = PUBLISHED[name]
    config = load(raw)
    assert {spec.head_dim_k for spec in config.kv_specs()} == {head_dim}
    assert config.kv_bytes_per_token(KV_FORMATS["bfloat16"]) == kv_bytes_per_token
    assert config.num_parameters() == num_parameters
    assert config.weight_bytes("bfloat16", is_packed=False) == 2 * num_parameters
    assert config.weight_bytes("float32", is_packed=False) == 4 * num_parameters
    assert config.max_model_len == max_model_len
    assert config.rope.type == rope_type
    assert config.is_native
    assert len(config.kv_specs()) == config.num_layers


def test_llama3_rope(load):
    rope = load(LLAMA_3_2_1B).rope
    assert (rope.theta, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (500_000.0, 32.0, 1.0, 4.0)
    assert rope.original_max_position == 8192
    assert rope.rotary_dim == 64


def test_experts_of_gpt_oss_keep_their_four_bits(load):
    """17 bytes for 32 weights, and nothing for padding but half a panel of each router."""
    config = load({**GPT_OSS_20B, "quantization_config": {"quant_method": "mxfp4"}})
    experts = 24 * 32 * 3 * 2880 * 2880
    routers = 24 * 32 * 2880 * 2
    assert config.weight_bytes("bfloat16") == experts * 17 // 32 + 2 * (config.num_parameters() - experts) + routers


def test_rope_parameters_of_transformers_5_mean_the_same(load):
    old = load(LLAMA_3_2_1B)
    raw = {
        key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    new = load(
        {**raw, "rope_parameters": {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}, "dtype": "bfloat16"}
    )
    assert new == old


def test_gemma3_nested_rope_parameters_mean_the_same(load):
    old = load({**GEMMA_3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    raw = {key: value for key, value in GEMMA_3_1B.items() if not key.startswith("rope_")}
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert load({**raw, "rope_parameters": parameters}) == old
    ropes = [layer.attention.rope for layer in old.layers]
    assert (old.rope.theta, old.rope.factor, ropes[0].theta, ropes[0].factor) == (1e6, 8.0, 1e4, 1.0)
    assert [rope is old.rope for rope in ropes[:12]] == [layer % 6 == 5 for layer in range(12)]


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (LLAMA_3_8B, [0] * 32),
        (MISTRAL_7B, [4096] * 32),
        ({**MISTRAL_7B, "sliding_window": None}, [0] * 32),
        (QWEN2_5_7B, [0] * 28),
        (
            {**QWEN2_5_7B, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20},
            [0] * 20 + [64] * 8,
        ),
        (GEMMA_2_2B, [4096, 0] * 13),
        (GEMMA_3_1B, [0 if layer % 6 == 5 else 512 for layer in range(26)]),
        (PHI_3_MINI_4K, [2047] * 32),
        (SMOLLM3_3B, [0] * 36),
    ],
)
def test_windows(raw, windows, load):
    assert [spec.window for spec in load(raw).kv_specs()] == windows


def test_smollm3_layers_without_rope(load):
    config = load(SMOLLM3_3B)
    rope = config.rope
    assert [layer.attention.rope for layer in config.layers[:5]] == [rope, rope, rope, None, rope]


def test_phi4_mini_rotates_part_of_a_head(load):
    rope = load(PHI_4_MINI).rope
    assert rope.rotary_dim == 96
    assert len(rope.long_factor) == 48
    assert rope.attention_factor == pytest.approx((1 + 3.4657359 / 8.3177661) ** 0.5)  # ln 32 and ln 4096


def test_gemma_and_granite_factors(load):
    gemma, granite = load(GEMMA_2_2B), load(GRANITE_3_3_8B)
    assert gemma.embedding_multiplier == 48.0
    assert {(layer.attention.scale, layer.attention.soft_cap) for layer in gemma.layers} == {(0.0625, 50.0)}
    assert gemma.logits_soft_cap == 30.0
    assert gemma.tie_word_embeddings
    assert (granite.embedding_multiplier, granite.logits_scaling) == (12.0, 16.0)
    assert {(layer.attention.scale, layer.residual_multiplier) for layer in granite.layers} == {(0.0078125, 0.22)}


def test_yarn_stretches_the_context(load):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load({**QWEN2_5_7B, "max_position_embeddings": 32768, "rope_scaling": scaling})
    assert config.max_model_len == 131_072
    assert config.rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1


@pytest.mark.parametrize(("kind", "length"), [("linear", 16_384), ("dynamic", 16_384), ("llama3", 8192)])
def test_which_scaling_stretches_the_limit(kind, length, load):
    scaling = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert load({**LLAMA_3_8B, "rope_scaling": scaling}).max_model_len == length


def test_generation_config_gives_eos(load):
    assert load(QWEN3_0_6B, {"eos_token_id": [5, 7], "temperature": 0.6}).eos_token_ids == (5, 7)


def test_eos_of_config_without_generation_config(load):
    assert load(LLAMA_3_2_1B).eos_token_ids == (128001, 128008, 128009)
    assert load(LLAMA_3_2_1B, {"temperature": 0.6}).eos_token_ids == (128001, 128008, 128009)


def test_overrides_are_merged(load):
    config = load(LLAMA_3_2_1B, overrides={"rope_scaling": {"factor": 8.0}, "num_hidden_layers": 2})
    assert (config.rope.factor, config.rope.low_freq_factor, config.num_layers) == (8.0, 1.0, 2)


def test_missing_fields_are_all_named(load):
    raw = {key: value for key, value in LLAMA_3_8B.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(ModelConfigError, match=r"config\.json lacks vocab_size, hidden_size"):
        load(raw)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist.*Check the model"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff\xfe"])
def test_no_object_in_the_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_unknown_architecture_names_the_way_out(load):
    raw = {**LLAMA_3_8B, "architectures": ["FalconForCausalLM"], "model_type": "falcon"}
    with pytest.raises(ModelConfigError, match=r"FalconForCausalLM.*LlamaForCausalLM.*--model-impl transformers"):
        load(raw)
    config = load(raw, any_architecture=True)
    assert not config.is_native
    assert config.architecture == "FalconForCausalLM"
    assert config.num_layers == 32


def test_older_names_of_foreign_architectures(load):
    raw = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 99,
    }
    config = load(raw, any_architecture=True)
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    assert (config.hidden_size, config.num_layers, attention.num_q_heads, attention.head_dim) == (64, 3, 4, 16)
    assert (config.max_model_len, feed_forward.down.in_features, config.eos_token_ids) == (128, 256, ())


POISONED = [LLAMA_3_2_1B, GEMMA_3_1B, PHI_4_MINI, SMOLLM3_3B, QWEN2_5_7B]


@pytest.mark.parametrize("raw", POISONED, ids=lambda raw: raw["model_type"])
def test_any_bad_value_is_a_config_error(raw, load):
    """Poison every field in turn: it loads (the value is legal or unused) or ends in an error that names the file.

    In `make test` a field that several families have meets some values in one and the others in the next.
    """
    poisons = [None, True, -1, 0, 1, 3, 1 << 62, 1.5, float("nan"), "x", "", [], [0], [None] * 99, {}, {"factor": "x"}]

    def values(field):
        having = [one for one in POISONED if field in one]
        return poisons[having.index(raw) :: len(having)] if field in raw and not IS_FULL else poisons

    changes = [({field: poison}, poison) for field in raw for poison in values(field)]
    scaling = raw.get("rope_scaling") or {}
    changes += [({"rope_scaling": {**scaling, field: poison}}, poison) for field in scaling for poison in poisons]
    for change, poison in changes:
        try:
            load({**raw, **change})
        except ModelConfigError as error:
            if "config.json" not in str(error):
                pytest.fail(f"{change} with {poison!r} gives an error without the file's name: {error}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads.*Got 0.*whole number from 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads.*Got 5.*divisor of num_attention_heads = 32"),
        ({"head_dim": 33}, "head_dim.*Got 33.*even"),
        ({"hidden_act": "relu2"}, "hidden_act.*'relu2'.*silu"),
        ({"torch_dtype": "int8"}, "dtype.*'int8'.*bfloat16"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type.*'spiral'.*llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps.*a number from 0 to"),
        (
            {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0},
            "attention_multiplier.*Got 0.0.*a number from 1e-06",
        ),
        ({"is_encoder_decoder": True}, "not a causal decoder"),
    ],
)
def test_illegal_values_are_explained(change, message, load):
    with pytest.raises(ModelConfigError, match=message):
        load({**LLAMA_3_8B, **change})


def test_no_torch_is_imported():
    code = "import sys, quire.model_config; assert 'torch' not in sys.modules, 'quire.model_config imports torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_that_differ_in_their_number_alone_are_counted_as_one_kind(tmp_path: Path) -> None:
    """Gemma 2 has a window in every other layer."""
    model = load_model_config(write_config(tmp_path, "Gemma-2-9B"))
    specs = [(layer.kv_spec, count) for layer, count in model.layer_kinds]
    assert [(spec.window, count) for spec, count in specs if spec is not None] == [(4096, 21), (0, 21)]
    assert [spec.window for spec in model.kv_specs()] == [4096, 0] * 21


@pytest.mark.parametrize("apart", ["model.layers.0.mlp.down_proj", "model.layers.3.mlp.down_proj"])
def test_a_layer_with_a_format_of_its_own_is_counted_by_it(apart: str, tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": [apart]}
    model = load_model_config(write_config(tmp_path, "Qwen3-0.6B", quantization_config=awq))
    held = model.weight_bytes_by_kind("bfloat16")
    assert held.blocks + held.output == sum(stored.num_bytes("bfloat16") for stored in model.stored_linears())
