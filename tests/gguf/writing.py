"""GGUF files of a Hugging Face checkpoint, written and quantized by the `gguf` package as llama.cpp converts it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d)\.(.+)")
_OF_GPT_OSS = [f"{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def interleave(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from two halves to neighbouring pairs: what llama.cpp's llama models rotate."""
    head = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return head.transpose(1, 2).reshape(weight.shape)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, vocab_size: int) -> None:
    """Byte-level BPE from tokenizer.json, as the converter's `_set_vocab_gpt2`."""
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab: dict[str, int] = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    vocab |= {text: token["id"] for text, token in added.items()}
    by_id = {index: token for token, index in vocab.items()}
    tokens, kinds = [], []
    for index in range(vocab_size):
        token = by_id.get(index)
        tokens.append(f"[PAD{index}]" if token is None else token)
        if token is None:
            kinds.append(UNUSED)
        elif token in added:
            kinds.append(CONTROL if added[token]["special"] else USER_DEFINED)
        else:
            kinds.append(NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]]
    )
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if isinstance(config.get(name), str):
            add(vocab[config[name]])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())


def add_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], splits_heads: bool) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if "kv_lora_rank" in config:
        add_latent(writer, config, splits_heads)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def add_latent(writer: gguf.GGUFWriter, config: Mapping[str, Any], splits_heads: bool) -> None:
    """DeepSeek, as its class in llama.cpp's conversion/deepseek.py: latent attention is written as one head of rows."""
    rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key_length, value_length = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
    if splits_heads:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
        key_length, value_length = rank + rope_dim, rank
    writer.add_head_count_kv(1 if splits_heads else config["num_key_value_heads"])
    writer.add_key_length(key_length)
    writer.add_value_length(value_length)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rope_dim)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(getattr(gguf.ExpertGatingFuncType, config["scoring_func"].upper()))


def file_type(kind: str) -> gguf.LlamaFileType:
    """The type of the whole file in its header. If several begin alike (Q4_K_S, Q4_K_M), it is the first."""
    return next(known for known in gguf.LlamaFileType if known.name.partition("_")[2].startswith(kind))


def kind_of(name: str, weight: Tensor, kind: str, overrides: Mapping[str, str]) -> str:
    """The type of one tensor: `kind`, but for vectors, and for tensors whose names have a part of `overrides`."""
    if weight.dim() == 1 or "ffn_gate_inp" in name or name.endswith("bias"):
        return "F32"
    return next((own for part, own in overrides.items() if part in name), kind)


# Where a block has its scale and its minimum, and the mean of its codes.
K_QUANTS = {
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0),
}


def encoded(weight: Tensor, kind: str, seed: int) -> np.ndarray:
    """The bytes of a tensor. The package quantizes no K-quants: these are random blocks with the weight's deviation."""
    qtype = gguf.GGMLQuantizationType[kind]
    if kind not in K_QUANTS:
        return gguf.quants.quantize(weight.float().contiguous().numpy(), qtype)
    random = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    blocks = random.integers(0, 256, (weight.numel() // block_size, block_bytes), dtype=np.uint8)
    scales = random.uniform(0.5, 1.5, (len(blocks), 1))
    scale_at, minimum_at, mean_code = K_QUANTS[kind]

    def put(deviation: float) -> np.ndarray:
        blocks[:, scale_at : scale_at + 2] = (scales / deviation).astype(np.float16).view(np.uint8)
        if minimum_at is not None:
            minima = (scales * mean_code / deviation).astype(np.float16)
            blocks[:, minimum_at : minimum_at + 2] = minima.view(np.uint8)
        return blocks.reshape(*weight.shape[:-1], -1)

    return put(float(gguf.quants.dequantize(put(1.0), qtype).std()) / float(weight.std()))


def write_gguf(
    path: Path,
    folder: Path,
    kind: str,
    *,
    overrides: Mapping[str, str] | None = None,
    pre: str = "llama-bpe",
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    splits_heads: bool = True,
) -> dict[str, Tensor]:
    """Write a checkpoint folder as GGUF, matrices in `kind`. Returns the content of the file, by Hugging Face's names.

    Args:
        overrides: types of tensors whose GGUF names have one of these parts.
        extra: further values of metadata, keys without the architecture.
        tensors: further tensors.
        splits_heads: kv_b_proj of latent attention is two tensors, as in files since April 2025.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    add_config(writer, config, splits_heads)
    writer.add_file_type(file_type(kind))
    for key, value in (extra or {}).items():
        full = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder, pre, config["vocab_size"])
    tensor_names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers.astype(np.float32))
    held = {}
    weights = stacked_experts(load_file(folder / "model.safetensors"))
    if splits_heads and "kv_lora_rank" in config:
        weights = taken_apart(weights, config)
    for seed, (hf_name, weight) in enumerate(sorted(weights.items())):
        named = hf_name.replace("correction_bias", "correction.bias")
        name = tensor_names.get_name(named, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"the package has no name for {hf_name}"
        name += ".weight" if name.endswith("sinks") else ""
        heads = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
        head_key = next((key for part, key in heads.items() if part in name), None)
        stored = weight.float().squeeze()
        is_interleaved = architecture in ("llama", "granite", "granitemoe", "smollm3") and head_key is not None
        if is_interleaved:
            stored = interleave(stored, config[head_key])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        own = kind_of(name, stored, kind, overrides or {})
        raw = encoded(stored, own, seed)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[own])
        found = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[own]).copy())
        if is_interleaved:
            found = deinterleave(found, config[head_key])
        held[hf_name] = found.reshape(weight.shape) - (1 if architecture.startswith("gemma") and "norm" in name else 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return single_experts(put_together(held))


def taken_apart(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """kv_b_proj as transposed matrices of keys, and matrices of values, of each head."""
    result: dict[str, Tensor] = {}
    sizes = (config["qk_nope_head_dim"], config["v_head_dim"])
    for name, weight in weights.items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = weight.view(-1, sum(sizes), config["kv_lora_rank"]).split(sizes, 1)
            result[name.replace("kv_b", "k_b")], result[name.replace("kv_b", "v_b")] = keys.transpose(1, 2), values
        else:
            result[name] = weight
    return result


def put_together(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `taken_apart`."""
    result = dict(held)
    for name in [name for name in held if name.endswith(".k_b_proj.weight")]:
        keys, values = (result.pop(name.replace("k_b", part)) for part in ("k_b", "v_b"))
        result[name.replace("k_b", "kv_b")] = torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    return result


def stacked_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix of all experts of a layer in one tensor, as the converter writes it."""
    result: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(weight)  # sorted by name: fewer than ten
        elif name.endswith("input_linear.weight"):
            prefix = name.removesuffix("input_linear.weight")
            result |= zip((f"{prefix}experts.w1.weight", f"{prefix}experts.w3.weight"), weight.chunk(2, 1), strict=True)
        elif ".experts.gate_up_proj" in name:  # gpt-oss: gate and up take turns
            parts = (f"experts.{part}_proj.{'bias' if name.endswith('bias') else 'weight'}" for part in ("gate", "up"))
            result |= {
                name.replace(f"experts.{name.rpartition('.')[2]}", part): _by_rows(weight[..., first::2])
                for first, part in enumerate(parts)
            }
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            part = "down_proj.bias" if name.endswith("bias") else "down_proj.weight"
            result[name.replace(name.rpartition(".")[2], part)] = _by_rows(weight)
        elif name.endswith("output_linear.weight"):
            result[name.replace("output_linear", "experts.w2")] = weight
        else:
            result[name] = weight
    return result | {name: torch.stack(each) for name, each in experts.items()}


def _by_rows(weight: Tensor) -> Tensor:
    """Matrices [E, K, N] as [E, N, K]; biases [E, N] as they are."""
    return weight.transpose(1, 2).contiguous() if weight.dim() == 3 else weight


def single_experts(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, as transformers holds them: gate and up in one tensor, and down."""
    result = dict(held)
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        for name in [name for name in held if name.endswith(f".experts.{gate}.weight")]:
            prefix = name.removesuffix(f"{gate}.weight")
            if f"{prefix}{gate}.bias" in held:
                result |= _turns(result, prefix)
                continue
            own = prefix.replace("block_sparse_moe", "mlp") if gate == "w1" else prefix
            result[f"{own}gate_up_proj"] = torch.cat([result.pop(f"{prefix}{part}.weight") for part in (gate, up)], 1)
            result[f"{own}down_proj"] = result.pop(f"{prefix}{down}.weight")
    return result


def _turns(result: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """gpt-oss' experts: weights [E, K, N], and gate and up take turns."""
    taken = {name: result.pop(f"{prefix}{name}") for name in _OF_GPT_OSS}
    gate_up = [torch.stack([taken[f"gate_proj.{kind}"], taken[f"up_proj.{kind}"]], 2) for kind in ("weight", "bias")]
    return {
        f"{prefix}gate_up_proj": gate_up[0].flatten(1, 2).transpose(1, 2),
        f"{prefix}gate_up_proj_bias": gate_up[1].flatten(1, 2),
        f"{prefix}down_proj": taken["down_proj.weight"].transpose(1, 2),
        f"{prefix}down_proj_bias": taken["down_proj.bias"],
    }


def deinterleave(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleave`."""
    head = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return head.transpose(1, 2).reshape(weight.shape)
