"""A family that exists here only: every other layer has no attention, and the cache holds nothing for it.

Its twin is transformers' Llama, whose attention adds nothing in these layers, since its output weights are zeros.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.families import FAMILIES
from quire.formats.kv_format import KV_FORMATS
from quire.hf_config.family import Family, LayerFacts, decoder_layer
from quire.layer_spec.layer import LayerSpec
from quire.model_config import load_model_config
from tests.models.tiny_models import SIZES, hf_logits

NUM_LAYERS, NUM_TOKENS = 5, 24
TIGHT = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "enable_prefix_caching": True}


def every_other(facts: LayerFacts, layer: int) -> LayerSpec:
    spec = decoder_layer(facts, layer)
    return replace(spec, attention=None) if layer % 2 == 0 else spec


HALF = Family(model_type="half_attention", architectures=("HalfAttentionForCausalLM",), layer=every_other)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, HALF.model_type, HALF)
    return tmp_path


def twin(folder: Path) -> transformers.PreTrainedModel:
    """Random weights, written without the weights that the family lacks."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": NUM_LAYERS})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weights = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            has_attention = not any(f"layers.{layer}." in name for layer in range(0, NUM_LAYERS, 2))
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.normal_(0.0, 0.2)
            if has_attention or not any(part in name for part in ("self_attn", "input_layernorm")):
                weights[name] = parameter.clone()
            elif "o_proj" in name:
                parameter.zero_()
    save_file(weights, folder / "model.safetensors")
    raw = config.to_dict() | {"architectures": list(HALF.architectures), "model_type": HALF.model_type}
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def test_it_runs_through_the_engine(folder: Path) -> None:
    """The twin gives the same greedy tokens, whatever the schedule, and the cache has two layers of five."""
    model = twin(folder)
    prompts = [torch.randint(3, SIZES["vocab_size"], (length,)).tolist() for length in (37, 5, 37)]
    config = load_model_config(folder)
    assert config.kv_bytes_per_token(KV_FORMATS["float32"]) == 2 * 2 * 2 * 16 * 4
    assert sum(parameter.numel() for parameter in model.parameters()) - config.num_parameters() == 3 * (
        48 + 2 * 48 * 6 * 16 + 2 * 48 * 2 * 16
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for schedule in ({}, TIGHT):
        llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=128, **schedule)
        assert llm.model_config.is_native
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            likeliest = hf_logits(model, prompt + tokens).argmax(1)  # behind each token
            assert len(tokens) == NUM_TOKENS
            assert tokens == likeliest[len(prompt) - 1 : -1].tolist()
