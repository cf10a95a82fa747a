"""Quantized checkpoints of models with latent attention, whose up-projection is unpacked while loading."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.formats.stored_linear import TAKEN_APART
from quire.kernels import cpu
from quire.layer_spec.attention import Latent
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.models.tiny_models import QUANTIZED_ACTIVATIONS_TOLERANCE
from tests.quantization import checkpoints, fp8_checkpoints
from tests.quantization.checkpoints import Format, Written
from tests.quantization.fp8_checkpoints import Fp8Form
from tests.quantization.logits import error_of_logits

FORMS: dict[str, Format | Fp8Form] = {
    "awq": Format(method="awq", group_size=32, has_zeros=True),
    "gptq-order": Format(method="gptq", group_size=32, has_order=True),
    "w4a16": Format(method="pack-quantized", group_size=32, scale_dtype=torch.bfloat16),
    "w8a8": Format(method="int-quantized", bits=8, scale_dtype=torch.bfloat16),
    "fp8-block": Fp8Form(scales="block"),
    "fp8-channel": Fp8Form(method="compressed-tensors", scales="channel"),
}
# The outputs of the projections to latents and queries fill no block of 128.
SIZES: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 160,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    # All experts are active: rounded activations cannot choose others.
    "n_routed_experts": 3,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """A checkpoint in a form, written once."""

    def write(name: str) -> Written:
        folder: Path = tmp_path_factory.mktemp(name)
        form, config = FORMS[name], transformers.DeepseekV3Config(**SIZES)
        if isinstance(form, Fp8Form):
            return fp8_checkpoints.write(folder, config, form)
        return checkpoints.write(folder, config, form)

    return cache(write)


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_those_of_dequantized_weights(name: str, written: Callable[[str], Written]) -> None:
    tolerance = 1e-5 if isinstance(FORMS[name], Fp8Form) else QUANTIZED_ACTIVATIONS_TOLERANCE
    assert error_of_logits(written(name).folder, written(name).model) < tolerance


@pytest.mark.parametrize("name", FORMS)
def test_planned_bytes_are_held(name: str, written: Callable[[str], Written]) -> None:
    config = load_model_config(written(name).folder)
    attention = config.layers[0].attention
    assert isinstance(attention, Latent)
    (up,) = config.stored(attention.up)
    assert up.reason.endswith(TAKEN_APART)
    assert up.num_bytes("bfloat16") >= 2 * attention.up.num_weights
    if cpu.available():  # the twin does not pad
        assert load_model(config, torch.bfloat16).weight_bytes() == config.weight_bytes("bfloat16")
