"""Sizes of well-known models, from the config.json and the model card of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Family, hidden, inner, layers, heads, KV heads, vocabulary, context,
# further fields; parameters as published; KV bytes per token in bfloat16 (2 x layers x KV heads x head size x 2).
MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], int, int]] = {
    "SmolLM2-135M": ("llama", (576, 1536, 30, 9, 3, 49152, 8192), {"tie_word_embeddings": True}, 134_515_008, 23_040),
    "TinyLlama-1.1B": ("llama", (2048, 5632, 22, 32, 4, 32000, 2048), {}, 1_100_048_384, 22_528),
    "Llama-3.2-1B": (
        "llama", (2048, 8192, 16, 32, 8, 128256, 131072), {"tie_word_embeddings": True}, 1_235_814_400, 32_768
    ),
    "Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128256, 131072), {}, 8_030_261_248, 131_072),
    "Mistral-7B-v0.1": ("mistral", (4096, 14336, 32, 32, 8, 32000, 32768), {}, 7_241_732_096, 131_072),
    "Qwen2.5-0.5B": (
        "qwen2", (896, 4864, 24, 14, 2, 151936, 32768), {"tie_word_embeddings": True}, 494_032_768, 12_288
    ),
    "Qwen2.5-7B": ("qwen2", (3584, 18944, 28, 28, 4, 152064, 131072), {}, 7_615_616_512, 57_344),
    "Qwen3-0.6B": (
        "qwen3",
        (1024, 3072, 28, 16, 8, 151936, 40960),
        {"tie_word_embeddings": True, "head_dim": 128},
        596_049_920,
        114_688,
    ),
    "Qwen3-4B": (
        "qwen3",
        (2560, 9728, 36, 32, 8, 151936, 40960),
        {"tie_word_embeddings": True, "head_dim": 128},
        4_022_468_096,
        147_456,
    ),
    "Phi-3-mini-4k": ("phi3", (3072, 8192, 32, 32, 32, 32064, 4096), {}, 3_821_079_552, 393_216),
    "Llama-3-70B": ("llama", (8192, 28672, 80, 64, 8, 128256, 8192), {}, 70_553_706_496, 327_680),
    "Llama-3.1-405B": ("llama", (16384, 53248, 126, 128, 8, 128256, 131072), {}, 405_853_388_800, 516_096),
    "Mistral-Nemo-12B": (
        "mistral", (5120, 14336, 40, 32, 8, 131072, 131072), {"head_dim": 128, "sliding_window": None},
        12_247_782_400, 163_840,
    ),
    "Mistral-Small-24B": (
        "mistral", (5120, 32768, 40, 32, 8, 131072, 32768), {"head_dim": 128, "sliding_window": None},
        23_572_403_200, 163_840,
    ),
    "Qwen2.5-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064, 131072), {}, 32_763_876_352, 262_144),
    "Qwen2.5-72B": ("qwen2", (8192, 29568, 80, 64, 8, 152064, 131072), {}, 72_706_203_648, 327_680),
    "Qwen3-32B": ("qwen3", (5120, 25600, 64, 64, 8, 151936, 40960), {"head_dim": 128}, 32_762_123_264, 262_144),
    "Gemma-2-9B": (
        "gemma2",
        (3584, 14336, 42, 16, 8, 256000, 8192),
        {
            "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        9_241_705_984,
        344_064,
    ),
    "Phi-4": ("phi3", (5120, 17920, 40, 40, 10, 100352, 16384), {}, 14_659_507_200, 204_800),
    "OLMo-2-7B": ("olmo2", (4096, 11008, 32, 32, 32, 100352, 4096), {}, 7_298_617_344, 524_288),
}  # fmt: skip
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
ARCHITECTURES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3", "gemma2": "Gemma2",
    "olmo2": "Olmo2",
}  # fmt: skip


def write_config(folder: Path, name: str, **more: Any) -> Path:
    """A folder with the config.json of a model and no other file; `more` comes on top."""
    family, sizes, further, _, _ = MODELS[name]
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    names = {"model_type": family, "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"]}
    config = common | names | dict(zip(FIELDS, sizes, strict=True)) | further | more
    (folder / "config.json").write_text(json.dumps(config))
    return folder
