"""Models from GGUF files against transformers with the weights that the files hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.errors import ModelConfigError, WeightsError
from quire.families import FAMILIES
from quire.formats.weight_format import GGUF
from quire.gguf.file import open_gguf
from quire.kernels import cpu, reference
from quire.measure.floor import Machine, Work, floor
from quire.model_config import load_model_config
from quire.models.registry import CausalLM
from quire.quantization.gguf_blocks import unpack_blocks
from tests.covering import in_turn
from tests.gguf.raw import F32_TENSOR, STRING, Raw, pair, tensor, text
from tests.gguf.writing import write_gguf
from tests.loading import load_model
from tests.models.paged_run import PagedRun, greedy
from tests.models.tiny_models import SIZES, hf_logits

TOLERANCE = 1e-4  # float32 logits, summed in another order
MADE = Path(__file__).parent / "made" / "llama.cpp.gguf"
PROMPT = [3, 77, 12, 130, 5, 5, 64, 9, 101, 33, 2, 18, 90, 41, 7]


def llama3_factors(dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """The converter's numbers for Llama 3: the divisor of each frequency."""
    result = []
    for frequency in theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            result.append(1.0)
        elif wavelength > original / low:
            result.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, dtype=np.float32)


@dataclass(frozen=True)
class Case:
    config_class: str
    settings: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)  # metadata
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 1.5, 2.5, 4.0]
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 3, "expert_used_count": 2}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 6,
    "kv_lora_rank": 21,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
CASES = {
    "llama": Case("LlamaConfig", {}),
    "llama-tied-biases": Case(
        "LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 8}
    ),
    "llama-3": Case(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3_ROPE}},
        tensors={"rope_freqs.weight": llama3_factors(16, 500.0, 8.0, 1.0, 4.0, 32)},
    ),
    "qwen2-yarn": Case(
        "Qwen2Config",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, **YARN}, "head_dim": 8},
        extra={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": Case(
        "Gemma2Config",
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 20.0,
        },
        extra={
            "attention.sliding_window": 9,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 20.0,
        },
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        extra={
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1000.0,
            "rope.freq_base_swa": 100.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
        },
    ),
    "phi3": Case("Phi3Config", {"head_dim": 8, "sliding_window": 9}, extra={"attention.sliding_window": 9}),
    "phi3-longrope": Case(
        "Phi3Config",
        {
            "head_dim": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": SHORT,
                "long_factor": LONG,
                "attention_factor": 1.25,
            },
        },
        extra={
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 256,
            "rope.scaling.attn_factor": 1.25,
        },
        tensors={"rope_factors_short.weight": np.array(SHORT), "rope_factors_long.weight": np.array(LONG)},
    ),
    "smollm3": Case("SmolLM3Config", {"head_dim": 8, "tie_word_embeddings": True, "num_hidden_layers": 5}),
    "olmo2": Case("Olmo2Config", {"head_dim": 8}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.5,
            "head_dim": 8,
        },
        extra={"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.22, "logit_scale": 2.5},
    ),
    "mixtral": Case(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        extra={"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2moe": Case(
        "Qwen2MoeConfig",
        {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "head_dim": 8},
        extra={**EXPERT_KEYS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    ),
    "qwen3moe": Case(
        "Qwen3MoeConfig",
        {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True},
        extra={**EXPERT_KEYS, "expert_feed_forward_length": 32},
    ),
    "olmoe": Case("OlmoeConfig", {**EXPERTS, "head_dim": 8}, extra=EXPERT_KEYS),
    "gpt-oss": Case(
        "GptOssConfig",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, "truncate": False, **YARN},
        },
        extra={
            **EXPERT_KEYS,
            "attention.sliding_window": 9,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "glm4moe": Case(
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
        extra={
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 8,
        },
    ),
    "deepseek-v2": Case(
        "DeepseekV2Config",
        LATENT
        | {
            "q_lora_rank": None,
            "kv_lora_rank": 22,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "rope_parameters": {
                **{
                    "rope_type": "yarn",
                    "rope_theta": 300.0,
                    "beta_fast": 8.0,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.707,
                },
                **YARN,
            },
        },
    ),
    "deepseek-v3": Case("DeepseekV3Config", LATENT | {"q_lora_rank": 27, "scoring_func": "sigmoid"}),
    "granitemoe": Case(
        "GraniteMoeConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "head_dim": 8},
        extra={**EXPERT_KEYS, "attention.scale": 0.2},
    ),
}


def make(folder: Path, config_class: str, settings: Mapping[str, Any], scale: float = 1.0) -> torch.nn.Module:
    """A tiny random model, saved to the folder."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(SIZES | dict(settings)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            elif "embed" not in name:
                weight.normal_(0, scale / math.sqrt(weight.shape[1]))
    model.save_pretrained(folder)
    return model


def found_logits(path: Path, dtype: torch.dtype = torch.float32, prompt: list[int] = PROMPT) -> tuple[CausalLM, Tensor]:
    model = load_model(load_model_config(path), dtype)
    return model, PagedRun(model, dtype).step({0: prompt})[0].float()


def test_every_architecture_is_covered() -> None:
    covered = {case.config_class for case in CASES.values()}
    assert len(covered) == sum(family.gguf is not None for family in FAMILIES.values())


@pytest.mark.parametrize("name", CASES)
def test_family(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = make(tmp_path, case.config_class, case.settings)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, "F32", extra=case.extra, tensors=case.tensors)
    loaded, logits = found_logits(path)
    assert loaded.config.dtype == "float32"
    torch.testing.assert_close(logits, hf_logits(model, PROMPT), rtol=0, atol=TOLERANCE)


# Only fields that transformers reads from a file: it takes the rest from defaults of its own.
READ_BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, {"rope.dimension_count": 16}),
    "qwen2": ("Qwen2Config", {}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128, "tie_word_embeddings": True}, {}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 9, "head_dim": 256},
        {"attention.sliding_window": 9, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 9, "head_dim": 256, "num_hidden_layers": 7},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": 6, "rope.freq_base_swa": 10_000.0},
    ),
    "phi3": ("Phi3Config", {"pad_token_id": 0}, {}),
}


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_as_transformers_reads_the_file(name: str, tmp_path: Path) -> None:
    """Its own names of keys and tensors, order of rows and norms; the tests' writer is ours, and could err with us."""
    config_class, settings, extra = READ_BY_TRANSFORMERS[name]
    make(tmp_path, config_class, {"hidden_size": 96, "head_dim": 16} | settings)
    (tmp_path / "g").mkdir()
    write_gguf(tmp_path / "g" / "m.gguf", tmp_path, "F32", extra=extra | {"vocab_size": SIZES["vocab_size"]})
    _, logits = found_logits(tmp_path / "g" / "m.gguf")
    expected = hf_logits(read_by_transformers(tmp_path / "g" / "m.gguf"), PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def read_by_transformers(path: Path) -> torch.nn.Module:
    """The model in float32."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, attn_implementation="eager")
    config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


def test_made_by_llama_cpp() -> None:
    """Nine types by llama.cpp's own quantizer (made/README.md): the weights to a bit, and transformers' logits."""
    file = open_gguf(MADE)
    kinds = {info.type.name for info in file.tensors.values()}
    assert kinds == {"F32", *GGUF} - {"Q5_0", "MXFP4"}
    for item in gguf.GGUFReader(MADE).tensors:
        info = file.tensors[item.name]
        if info.type.name in GGUF:
            raw = torch.frombuffer(bytearray(file.read(info)), dtype=torch.uint8).view(info.shape[0], -1)
            expected = gguf.quants.dequantize(item.data, item.tensor_type)
            found = reference.dequantize_grouped(unpack_blocks(raw, info.type)).numpy()
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), item.name
    prompt = [token % 64 for token in PROMPT]
    loaded, logits = found_logits(MADE, prompt=prompt)
    expected_logits = hf_logits(read_by_transformers(MADE), prompt)
    assert (logits - expected_logits).norm() < 0.04 * expected_logits.norm()
    if cpu.available():
        assert loaded.weight_bytes() == loaded.config.weight_bytes("float32"), "not the planned bytes are held"


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_files_hold_what_they_say(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, "LlamaConfig", {})
    held = write_gguf(tmp_path / "m.gguf", tmp_path, kind)
    model.load_state_dict(held)
    loaded, logits = found_logits(tmp_path / "m.gguf")
    assert loaded.config.dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
    torch.testing.assert_close(logits, hf_logits(model, PROMPT), rtol=0, atol=TOLERANCE)


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# A type, and tensors in others, as llama.cpp mixes them.
MIXTURES: dict[str, tuple[str, dict[str, str]]] = {
    **{kind: (kind, {}) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    **{kind: (kind, {}) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output.": "Q6_K"}),
    "half-fused": ("Q4_0", {"attn_k": "Q8_0", "ffn_up": "F16", "attn_output": "F32", "token_embd": "Q4_0"}),
}


PLAIN = [(mixture,) for mixture in MIXTURES if mixture == MIXTURES[mixture][0]]
MIXED = [(mixture,) for mixture in MIXTURES if mixture != MIXTURES[mixture][0]]


@pytest.mark.parametrize(("mixture", "family"), in_turn([PLAIN, MIXED], ["LlamaConfig", "Qwen3Config"]))
def test_quantized(mixture: str, family: str, tmp_path: Path) -> None:
    """Logits up to the error of 8-bit activations, and the tokens of greedy search except near ties."""
    kind, overrides = MIXTURES[mixture]
    tied = family == "Qwen3Config"
    model = make(tmp_path, family, WIDE | {"tie_word_embeddings": tied})
    held = write_gguf(tmp_path / "m.gguf", tmp_path, kind, overrides=overrides)
    model.load_state_dict(held | ({"lm_head.weight": held["model.embed_tokens.weight"]} if tied else {}))
    loaded, logits = found_logits(tmp_path / "m.gguf")
    expected = hf_logits(model, PROMPT)
    assert (logits - expected).norm() < 0.04 * expected.norm()
    tokens = greedy(loaded, torch.float32, PROMPT, 24)
    after = hf_logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    margins = after.amax(1) - after.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (margins == 0).sum() >= 20, f"other tokens than transformers', by {margins.tolist()}"
    assert margins.max() < 0.1 * after.std()
    if cpu.available():
        assert loaded.weight_bytes() == loaded.config.weight_bytes("float32"), "not the planned bytes are held"


@pytest.mark.parametrize("overrides", [{}, {"ffn_up": "Q8_0"}, {"ffn_down": "Q6_K", "ffn_gate_exps": "F16"}])
def test_quantized_experts(overrides: dict[str, str], tmp_path: Path) -> None:
    """All experts are active, so that rounded activations cannot choose others."""
    settings = {**WIDE, "num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": True}
    model = make(tmp_path, "Qwen3MoeConfig", settings | {"moe_intermediate_size": 256})
    extra = {"expert_count": 3, "expert_used_count": 3, "expert_feed_forward_length": 256}
    held = write_gguf(tmp_path / "m.gguf", tmp_path, "Q4_K", overrides=overrides, extra=extra)
    model.load_state_dict(held)
    loaded, logits = found_logits(tmp_path / "m.gguf")
    expected = hf_logits(model, PROMPT)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    if cpu.available():
        assert loaded.weight_bytes() == loaded.config.weight_bytes("float32"), "not the planned bytes are held"


def test_older_files_of_deepseek(tmp_path: Path) -> None:
    """The up-projection in one tensor, and the sizes of heads where newer files have the sizes of rows."""
    case = CASES["deepseek-v3"]
    model = make(tmp_path, case.config_class, case.settings)
    write_gguf(tmp_path / "m.gguf", tmp_path, "F32", splits_heads=False)
    _, logits = found_logits(tmp_path / "m.gguf")
    torch.testing.assert_close(logits, hf_logits(model, PROMPT), rtol=0, atol=TOLERANCE)


def test_quantized_latent_attention(tmp_path: Path) -> None:
    """Two types of the matrices of heads, which are unpacked. All experts are active."""
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 64}
    experts = {"num_experts_per_tok": 6, "topk_group": 3, "moe_intermediate_size": 256}
    settings = CASES["deepseek-v3"].settings | WIDE | {"num_key_value_heads": 4, "q_lora_rank": 64} | sizes | experts
    model = make(tmp_path, "DeepseekV3Config", settings)
    held = write_gguf(tmp_path / "m.gguf", tmp_path, "Q8_0", overrides={"attn_k_b": "Q4_0"})
    model.load_state_dict(held)
    loaded, logits = found_logits(tmp_path / "m.gguf")
    expected = hf_logits(model, PROMPT)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    if cpu.available():
        assert loaded.weight_bytes() == loaded.config.weight_bytes("float32"), "not the planned bytes are held"


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("glm4moe", "expert_gating_func", 9, "one of sigmoid"),
        ("glm4moe", "expert_gating_func", 1, "one of sigmoid"),
        ("deepseek-v2", "expert_gating_func", 9, "one of softmax"),
        ("qwen3moe", "expert_gating_func", 2, "one of softmax"),
        ("granitemoe", "expert_gating_func", 1, "one of softmax_of_chosen"),
        ("qwen3moe", "expert_used_count", 9, "from 1 to"),
        ("glm4moe", "expert_group_count", 3, "a divisor of the 4 experts"),
    ],
)
def test_routing_that_does_not_fit_is_refused(name: str, key: str, value: int, expected: str, tmp_path: Path) -> None:
    case = CASES[name]
    make(tmp_path, case.config_class, case.settings)
    write_gguf(tmp_path / "m.gguf", tmp_path, "F32", extra=case.extra | {key: value}, tensors=case.tensors)
    with pytest.raises(ModelConfigError) as caught:
        load_model_config(tmp_path / "m.gguf")
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize("num_experts", [3, 5])
def test_another_number_of_experts_than_the_file_has(num_experts: int, tmp_path: Path) -> None:
    """The router is wider or narrower then, and so are the tensors of all experts."""
    case = CASES["glm4moe"]
    make(tmp_path, case.config_class, case.settings)
    extra = case.extra | {"expert_count": num_experts, "expert_group_count": 1}
    write_gguf(tmp_path / "m.gguf", tmp_path, "F32", extra=extra, tensors=case.tensors)
    with pytest.raises(WeightsError, match=rf"mlp.gate.weight has shape \[4, \d+\] instead of \[{num_experts}, \d+\]"):
        load_model(load_model_config(tmp_path / "m.gguf"), torch.float32)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4 with biases in float32, the rest in Q8_0. All experts are active."""
    settings = {**WIDE, "num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 9}
    rope = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, "truncate": False, **YARN}}
    model = make(tmp_path, "GptOssConfig", settings | rope)
    extra = CASES["gpt-oss"].extra | {"expert_used_count": 3}
    held = write_gguf(tmp_path / "m.gguf", tmp_path, "Q8_0", overrides={"_exps.": "MXFP4"}, extra=extra)
    model.load_state_dict(held)
    loaded, logits = found_logits(tmp_path / "m.gguf")
    expected = hf_logits(model, PROMPT)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    if cpu.available():
        assert loaded.weight_bytes() == loaded.config.weight_bytes("float32"), "not the planned bytes are held"


@pytest.mark.parametrize("mixture", ["Q8_0", "Q4_K_M", "half-fused"])
def test_embedding_rows_are_those_of_the_file(mixture: str, tmp_path: Path) -> None:
    kind, overrides = MIXTURES[mixture]
    make(tmp_path, "LlamaConfig", WIDE)
    held = write_gguf(tmp_path / "m.gguf", tmp_path, kind, overrides=overrides)
    loaded, _ = found_logits(tmp_path / "m.gguf")
    rows = torch.arange(131)
    assert torch.equal(loaded._embed(rows), held["model.embed_tokens.weight"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(("tied", "kind"), [(False, "Q6_K"), (True, None)])
def test_what_a_step_reads(tied: bool, kind: str | None, tmp_path: Path) -> None:
    """All weights but a table of embeddings that is only looked up, at its size in the file's type."""
    make(tmp_path, "LlamaConfig", WIDE | {"tie_word_embeddings": tied})
    write_gguf(tmp_path / "m.gguf", tmp_path, "Q4_K", overrides={"token_embd": "Q6_K"})
    config = load_model_config(tmp_path / "m.gguf")
    table = 0 if kind is None else GGUF[kind].num_bytes(131, WIDE["hidden_size"])
    expected = config.weight_bytes("bfloat16") - table
    assert config.read_bytes_per_step("bfloat16") == expected
    one_token = floor(config, "bfloat16", [Work(1, 0, 1)], Machine(1.0, 1e30, 1e30), quantization="gguf")
    assert one_token.num_bytes == expected


def test_split_model(tmp_path: Path) -> None:
    make(tmp_path, "LlamaConfig", {})
    write_gguf(tmp_path / "whole.gguf", tmp_path, "F16")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    for part in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05}-of-00002.gguf", "llama")
        if part == 0:
            for name, item in reader.fields.items():
                if name.startswith("llama."):
                    writer.add_key_value(name, item.contents(), item.types[0])
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        for item in reader.tensors[part::2]:
            writer.add_tensor(item.name, item.data, raw_dtype=item.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    _, whole = found_logits(tmp_path / "whole.gguf")
    _, parts = found_logits(tmp_path / "m-00002-of-00002.gguf")
    assert torch.equal(whole, parts)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint folder, changed, as a GGUF file."""
    make(tmp_path, "LlamaConfig", {})

    def write(change: Callable[[dict[str, Tensor]], None] | None = None, **arguments: Any) -> Path:
        if change is not None:
            weights = load_file(tmp_path / "model.safetensors")
            change(weights)
            save_file(weights, tmp_path / "model.safetensors")
        write_gguf(tmp_path / "m.gguf", tmp_path, "F32", **arguments)
        return tmp_path / "m.gguf"

    return write


def test_a_missing_tensor(tiny: Callable[..., Path]) -> None:
    path = tiny(lambda weights: weights.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"1 missing \(model.layers.1.mlp.up_proj.weight\)"):
        load_model(load_model_config(path), torch.float32)


@pytest.mark.parametrize("name", ["blk.0.attn_other.weight", "foo", "."])
def test_a_tensor_that_is_not_expected(name: str, tiny: Callable[..., Path]) -> None:
    path = tiny(tensors={name: np.zeros(4)})
    with pytest.raises(WeightsError, match=rf"1 unexpected \({re.escape(name)}\)"):
        load_model(load_model_config(path), torch.float32)


def test_rows_that_are_no_heads(tiny: Callable[..., Path]) -> None:
    path = tiny(extra={"attention.head_count": 5, "attention.head_count_kv": 5})
    with pytest.raises(WeightsError, match="instead of"):
        load_model(load_model_config(path), torch.float32)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    make(tmp_path, "LlamaConfig", WIDE)
    path = tmp_path / "m.gguf"
    write_gguf(path, tmp_path, "Q8_0")
    info = next(item for item in gguf.GGUFReader(path).tensors if item.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(info.data_offset)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(WeightsError, match="not a finite number"):
        load_model(load_model_config(path), torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"expert_count": 8, "expert_used_count": 9}}, "num_experts_per_tok"),
        ({"extra": {"attention.sliding_window": 100}}, "Sliding windows"),
        ({"extra": {"rope.scaling.type": "nonesuch"}}, "none, linear, yarn"),
        ({"extra": {"rope.dimension_count": 64}}, "whole number from 1 to 16"),
        ({"extra": {"embedding_length": 0}}, "hidden_size"),
        ({"tensors": {"rope_freqs.weight": np.ones(5)}}, "does not fit its position encoding"),
    ],
)
def test_a_configuration_that_is_refused(changes: dict[str, Any], message: str, tiny: Callable[..., Path]) -> None:
    with pytest.raises(ModelConfigError, match=message):
        load_model_config(tiny(**changes))


@pytest.mark.parametrize("architecture", ["bert", ""])
def test_another_architecture(architecture: str, tmp_path: Path) -> None:
    raw = Raw(
        pairs=[pair("general.architecture", STRING, text(architecture))],
        tensors=[tensor("token_embd.weight", (4, 4), F32_TENSOR, 0)],
        data=bytes(64),
    )
    (tmp_path / "m.gguf").write_bytes(raw.build())
    with pytest.raises(ModelConfigError, match="one of llama, qwen2"):
        load_model_config(tmp_path / "m.gguf")


def test_windows_by_layer(tmp_path: Path) -> None:
    make(tmp_path, "Gemma2Config", CASES["gemma2"].settings)
    extra = CASES["gemma2"].extra | {"attention.sliding_window_pattern": [False, True, True]}
    write_gguf(tmp_path / "m.gguf", tmp_path, "F32", extra=extra)
    assert [spec.window for spec in load_model_config(tmp_path / "m.gguf").kv_specs()] == [0, 9, 9]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, 0.0])
def test_numbers_that_make_no_model(value: float, tiny: Callable[..., Path]) -> None:
    with pytest.raises(ModelConfigError, match="rope_theta"):
        load_model_config(tiny(extra={"rope.freq_base": value}))


def test_overrides(tiny: Callable[..., Path]) -> None:
    config = load_model_config(tiny(), {"rope_theta": 77.0, "eos_token_id": 9})
    assert config.rope.theta == 77.0
    assert config.eos_token_ids == (9,)


def test_numbers_are_those_of_config_json(tmp_path: Path) -> None:
    """float32 in the file, decimal in config.json: both mean the same number."""
    make(tmp_path, "GraniteConfig", CASES["granite"].settings | {"rms_norm_eps": 1e-6})
    write_gguf(tmp_path / "m.gguf", tmp_path, "F32", extra=CASES["granite"].extra)
    found, original = load_model_config(tmp_path / "m.gguf"), load_model_config(tmp_path)
    same = {"rms_norm_eps", "layers", "logits_scaling", "embedding_multiplier", "rope"}
    for name in same:
        assert getattr(found, name) == getattr(original, name), name
    assert (
        json.loads((tmp_path / "config.json").read_text())["residual_multiplier"] == found.layers[0].residual_multiplier
    )
