"""The transformers backend against transformers itself on tiny random weights; its refusals; code that it never
runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from quire.attention.backend import AttentionSpec
from quire.errors import ConfigError, ModelConfigError, WeightsError
from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.models import transformers_attention
from quire.models.registry import CausalLM
from tests.examples import IS_FULL
from tests.loading import load_model
from tests.models.paged_run import PagedRun, greedy

# float32 sums in another order, logits of size 5 to 10
TOLERANCE = 1e-4
VOCAB = 131
NUM_DECODE = 8

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 96, "vocab_size": VOCAB, "eos_token_id": None}
GQA = {**COMMON, "num_key_value_heads": 2}
MAMBA = {**GQA, "mamba_n_heads": 8, "mamba_d_head": 12}
EXPERTS = {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}

# By what makes each different: learned positions and Conv1D; interleaved qkv; partial rope and biases; a body inside
# the body; logit scale and parallel block; sliding window; window on some layers; soft caps; a mixture of experts; a
# hybrid without recurrent layers; a native family with an activation of its own.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-scaled-by-layer": ("GPT2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode-one-kv-head": ("GPTBigCode", {**GPT2, "n_inner": 96}),
    "gpt_neox": ("GPTNeoX", COMMON),
    "stablelm": ("StableLm", {**GQA, "hidden_size": 64, "use_qkv_bias": True, "qk_layernorm": True}),
    "opt": ("OPT", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": True}),
    "cohere": ("Cohere", {**GQA, "logit_scale": 2.0}),
    "cohere2-windows": ("Cohere2", {**GQA, "sliding_window": 7, "head_dim": 12}),
    "starcoder2-window": ("Starcoder2", {**GQA, "sliding_window": 5}),
    "gemma2-soft-caps": ("Gemma2", {**GQA, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
    "phimoe": ("Phimoe", {**GQA, "num_local_experts": 4, "sliding_window": 6}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "granite-hybrid-attention-only": (
        "GraniteMoeHybrid",
        {**MAMBA, "layer_types": ["attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "llama-relu2": ("Llama", {**GQA, "hidden_act": "relu2"}),
}


# Every architecture with one of the sizes of a chunk; with all of them in make test-full.
CHUNKS = [
    pytest.param(name, chunk, marks=() if index % 3 == place else pytest.mark.slow)
    for index, name in enumerate(ARCHITECTURES)
    for place, chunk in enumerate((5, 16, 1))
]


def checkpoint(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    """Write a tiny random model, return transformers' own."""
    config = getattr(transformers, f"{family}Config")(**settings)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> CausalLM:
    config = load_model_config(folder, overrides, any_architecture=True)
    return load_model(config, dtype, model_impl="transformers")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs = checkpoint(folder, *ARCHITECTURES[request.param])
    return theirs, load(folder)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (21, 13)]


@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers(pair: tuple[Any, CausalLM]) -> None:
    """Prompts longer than every window; and tokens after the shorter one, which reach over them too.

    They are the likeliest ones to transformers, behind the prompt and those before.
    """
    theirs, ours = pair
    for index, prompt in enumerate(prompts()):
        tokens = greedy(ours, torch.float32, prompt, NUM_DECODE) if IS_FULL or index == 1 else []
        expected = theirs(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        actual = PagedRun(ours, torch.float32).step({0: prompt})[0]
        torch.testing.assert_close(actual, expected[: len(prompt)], rtol=0, atol=TOLERANCE)
        assert tokens == expected[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize(("pair", "chunk"), CHUNKS, indirect=["pair"])
def test_chunks_and_batch_mates_do_not_change_logits(pair: tuple[Any, CausalLM], chunk: int) -> None:
    """Not by a single bit: matrix products, attention and norms sum a row in the same order whatever else is computed.

    Widths are multiples of 32, as in real models: the last elements of other widths go through scalar code in torch's
    activation functions. The experts of a mixture, and everything without the compiled kernels, are torch's own matrix
    products, exact to rounding only.
    """
    theirs, ours = pair
    is_exact = cpu.available() and "moe" not in theirs.config.model_type
    first, second = prompts()
    whole = PagedRun(ours, torch.float32).step({0: first})[0]
    run = PagedRun(ours, torch.float32)
    pieces = []
    for begin in range(0, len(first), chunk):
        rows = {1: second[begin : begin + chunk], 0: first[begin : begin + chunk]}
        pieces.append(run.step({sequence: tokens for sequence, tokens in rows.items() if tokens})[0])
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=0 if is_exact else TOLERANCE)


def test_bfloat16_and_float16(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path, *ARCHITECTURES["stablelm"])
    prompt = prompts()[0]
    for dtype in (torch.bfloat16, torch.float16):
        ours = load(tmp_path, dtype)
        actual = PagedRun(ours, dtype).step({0: prompt})[0]
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt]), use_cache=False).logits[0]
        assert actual.dtype == torch.float32
        error = (actual - expected).norm() / expected.norm()
        assert error < 0.05, f"{dtype}: relative error {error:.3f}"


def test_auto_takes_transformers_only_without_a_native_implementation(tmp_path: Path) -> None:
    checkpoint(tmp_path / "neox", *ARCHITECTURES["gpt_neox"])
    checkpoint(tmp_path / "llama", "Llama", GQA)
    checkpoint(tmp_path / "relu2", *ARCHITECTURES["llama-relu2"])
    names = {}
    for name in ("neox", "llama", "relu2"):
        config = load_model_config(tmp_path / name, any_architecture=True)
        names[name] = type(load_model(config, torch.float32)).__name__
    assert names == {"neox": "TransformersModel", "llama": "Decoder", "relu2": "TransformersModel"}
    with pytest.raises(ModelConfigError, match=r"hidden_act.*'relu2'.*silu"):
        load_model_config(tmp_path / "relu2")


def test_an_activation_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "Llama", GQA)
    with pytest.raises(ModelConfigError, match=r"Quire and transformers do not know.*'relu7'.*one of gelu"):
        load(tmp_path, hidden_act="relu7")


def test_overrides_of_config_json_reach_transformers(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["starcoder2-window"])
    plain, overridden = load(tmp_path), load(tmp_path, sliding_window=50)
    prompt = prompts()[0]
    a, b = (PagedRun(model, torch.float32).step({0: prompt})[0] for model in (plain, overridden))
    assert torch.allclose(a[:5], b[:5], atol=TOLERANCE), "before the window is full both see everything"
    assert not torch.allclose(a[-1], b[-1], atol=0.01), "the override has no effect"


def test_dummy_weights_run_and_repeat(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt2"])
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(tmp_path, any_architecture=True)
    runs = []
    for _ in range(2):
        model = load_model(config, torch.float32, load_format="dummy")
        runs.append(PagedRun(model, torch.float32).step({0: [1, 2, 3]})[0])
    assert torch.isfinite(runs[0]).all()
    assert torch.equal(*runs)


def test_weight_bytes_count_every_weight_once(tmp_path: Path) -> None:
    theirs = checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    exact = sum(parameter.nbytes for parameter in theirs.parameters())
    assert exact <= load(tmp_path).weight_bytes() < 1.5 * exact  # packed panels are padded


_STATE = "it keeps other state than keys and values"
# Their config.json holds an infinite number, as transformers writes it.
_BAMBA = {**MAMBA, "time_step_limit": (0.0, math.inf)}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state beside some layers' attention": ("Bamba", _BAMBA, _STATE),
    "a state beside each layer's attention": ("FalconH1", {**_BAMBA, "mamba_d_ssm": 96}, _STATE),
    "a state beside attention and experts": ("GraniteMoeHybrid", _BAMBA, _STATE),
    "heads and layers under other names": (
        "XGLM",
        {"vocab_size": VOCAB, "d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
        "does not use the attention interface",
    ),
    "ALiBi, own attention": ("Bloom", {**COMMON, "n_head": 4, "n_layer": 2}, "does not use the attention interface"),
    "attention sinks": ("GptOss", {**EXPERTS, "num_local_experts": 4}, "s_aux"),
    "two attentions per layer": ("DiffLlama", GQA, "6 attention calls for its 3 layers"),
    "recurrent state": ("RecurrentGemma", {**GQA, "lru_width": 48, "head_dim": 12}, "other state than keys and values"),
    "linear attention layers": ("MiniMax", {**GQA, "num_local_experts": 2}, "attention calls for its 3 layers"),
    "not causal": ("Bert", COMMON, "not plain causal attention"),
    "a mask of its own": ("Doge", GQA, "not plain causal attention"),
    "body and head in one": (
        "Llama4",
        {**EXPERTS, "num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
        "does not separate body and head",
    ),
    "rope of the longest sequence": (
        "StableLm",
        {
            **GQA,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        "dynamic rope",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_architectures_that_are_not_plain_causal_attention_are_refused(tmp_path: Path, case: str) -> None:
    family, settings, message = REFUSED[case]
    class_name = {"Bert": "BertLMHeadModel", "Llama4": "Llama4ForCausalLM"}.get(family, f"{family}ForCausalLM")
    config = getattr(transformers, "Llama4TextConfig" if family == "Llama4" else f"{family}Config")(**settings)
    config.architectures, config.dtype = [class_name], "float32"
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 96}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours = load_model_config(tmp_path, any_architecture=True)
    with pytest.raises(ModelConfigError) as caught:
        load_model(ours, torch.float32, load_format="dummy", model_impl="transformers")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "class_name", "message"),
    [
        ("Mamba", "MambaForCausalLM", r"other state than keys and values \(state_size\)"),
        ("Mamba2", "Mamba2ForCausalLM", r"other state than keys and values \(state_size\)"),
        ("NemotronH", "NemotronHForCausalLM", r"other state than keys and values \(ssm_state_size\)"),
        ("Rwkv", "RwkvForCausalLM", r"no attention heads \(its config.json gives no num_attention_heads"),
        ("Bloom", "BloomForCausalLM", r"no max_position_embeddings.*attention is of another kind.*--hf-overrides"),
        ("Kosmos2", "Kosmos2ForConditionalGeneration", r"reads more than text"),
    ],
)
def test_what_config_json_lacks_is_said_of_the_architecture(
    tmp_path: Path, family: str, class_name: str, message: str
) -> None:
    """It is the right config.json: there is no other to take."""
    config = getattr(transformers, f"{family}Config")()
    config.architectures = [class_name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match=f"{class_name} cannot run on paged attention: .*{message}") as caught:
        load_model_config(tmp_path, any_architecture=True)
    assert "belongs to the checkpoint" not in str(caught.value)


def test_a_multimodal_model_is_refused_by_its_own_name(tmp_path: Path) -> None:
    config = transformers.LlavaConfig()
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match=r"LlavaForConditionalGeneration \(model_type llava\) reads more than"):
        load_model(load_model_config(tmp_path, any_architecture=True), torch.float32, load_format="dummy")


def test_an_mlp_of_another_size_in_each_layer(tmp_path: Path) -> None:
    """Gemma 3n: its reason is its own attention, not the list."""
    config = transformers.Gemma3nTextConfig(**{**GQA, "intermediate_size": [96, 128, 64]})
    config.architectures = ["Gemma3nForCausalLM"]
    config.save_pretrained(tmp_path)
    (*_, feed_forward) = load_model_config(tmp_path, any_architecture=True).layers[0].linears()
    assert feed_forward.in_features == 128


def prefix_mask(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 3)


def table_mask(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
    return torch.ones(4, 4, dtype=torch.bool)[query, key]


MASKS: dict[str, tuple[Any, int | None, int]] = {
    "causal": (masking_utils.causal_mask_function, None, 0),
    "window of 1": (masking_utils.sliding_window_causal_mask_function(1), 1, 1),
    "window of 4096": (masking_utils.sliding_window_causal_mask_function(4096), 4096, 4096),
    "window that is not announced": (masking_utils.sliding_window_causal_mask_function(8), None, -1),
    "bidirectional": (masking_utils.bidirectional_mask_function, None, -1),
    "bidirectional window": (masking_utils.sliding_window_bidirectional_mask_function(8), 8, -1),
    "chunks": (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)), 8, -1),
    "prefix": (prefix_mask, None, -1),
    "looked up": (table_mask, None, -1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_told_apart(mask: str) -> None:
    function, announced, window = MASKS[mask]
    assert transformers_attention._mask_marker(function, local_size=announced).tolist() == [[[[window]]]]


def test_modelling_code_that_ignores_positions_is_refused() -> None:
    spec = AttentionSpec(1, 1, 4, 1.0, 0, 0.0, torch.float32)
    first, moved = (
        transformers_attention.AttentionCall(torch.nn.Identity(), 0, spec, torch.full((1, 1, 3, 4), value), None)
        for value in (1.0, 2.0)
    )
    transformers_attention.check_calls([first], [moved], "SomeForCausalLM", 1)
    with pytest.raises(ModelConfigError, match="ignores the positions"):
        transformers_attention.check_calls([first], [first], "SomeForCausalLM", 1)


def test_a_cache_shape_that_config_json_does_not_describe_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    config = load_model_config(tmp_path, {"num_key_value_heads": 2}, any_architecture=True)
    config = dataclasses.replace(config, hf_overrides={})
    with pytest.raises(ModelConfigError, match=r"stores 4 heads of 12 per token, but config\.json describes 2 of 12"):
        load_model(config, torch.float32)


def test_unknown_architecture(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["NovelForCausalLM"]}))
    with pytest.raises(ModelConfigError, match="NovelForCausalLM"):
        load(tmp_path)


def test_settings_that_transformers_refuses(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    with pytest.raises(ModelConfigError, match="transformers refuses"):
        load(tmp_path, hidden_dropout="much")


def edit_weights(folder: Path, edit: str) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    if edit == "missing":
        del weights[name]
    elif edit == "unexpected":
        weights["gpt_neox.layers.9.mlp.weight"] = torch.zeros(2)
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("edit", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, edit: str) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    edit_weights(tmp_path, edit)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    name = "layers.9.mlp" if edit == "unexpected" else "layers.1.mlp.dense_h_to_4h.weight"
    assert f"1 {edit}" in str(caught.value)
    assert name in str(caught.value)


def test_calibrated_kv_scales_are_left_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    weights = load_file(tmp_path / "model.safetensors")
    weights["gpt_neox.layers.1.attention.attn.k_scale"] = torch.tensor(0.5)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)


def test_code_and_kernels_named_by_a_checkpoint_are_never_used(tmp_path: Path) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")
    raw |= {
        "attn_implementation": "nobody/kernels",
        "_attn_implementation": "nobody/kernels",
        "custom_generate": "evil",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"custom_generate": "evil.py"}))
    (tmp_path / "adapter_config.json").write_text("{}")
    model = load(tmp_path)
    assert torch.isfinite(PagedRun(model, torch.float32).step({0: [1, 2]})[0]).all()
    assert not canary.exists()


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, *ARCHITECTURES["gpt_neox"])
    config = load_model_config(tmp_path, any_architecture=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        load_model(config, torch.float32)
