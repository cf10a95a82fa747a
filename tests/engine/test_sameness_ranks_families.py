"""Ranks share models with experts, sinks, chunks and latent attention: tokens and logprobs of one rank, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.kernels import cpu
from tests.covering import covering
from tests.engine.test_sameness_ranks import Answer, of_ranks
from tests.models.test_families import CASES, random_hf_model
from tests.quantization import checkpoints, fp8_checkpoints
from tests.quantization.checkpoints import Format
from tests.quantization.fp8_checkpoints import Fp8Form

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LIMITS: dict[str, Any] = {"max_model_len": 128}
VOCABULARY = {"vocab_size": 5000}  # the prompts' tokens
FAMILIES = (
    *("phimoe", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss", "llama4_text"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v3-halves"),
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family, as transformers writes it."""

    def write(name: str) -> Path:
        folder, case = tmp_path_factory.mktemp(name), CASES[name]
        random_hf_model(replace(case, settings=case.settings | VOCABULARY)).save_pretrained(folder)
        return folder

    return cache(write)


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str, str, str], Answer]:
    """Of one rank."""
    return cache(lambda family, form, isa: of_ranks(1, folder_of(family), **LIMITS, **FORMS[form]))


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@pytest.mark.parametrize(("family", "form", "num_ranks"), covering(list(FAMILIES), list(FORMS), [2, 3]))
def test_families(
    family: str,
    form: str,
    num_ranks: int,
    folder_of: Callable[[str], Path],
    expected: Callable[[str, str, str], Answer],
) -> None:
    """Router, routing and rows of the cache of latent attention are computed by every rank."""
    one = expected(family, form, cpu.isa())
    assert len({tuple(tokens) for tokens, _ in one}) > 2
    assert of_ranks(num_ranks, folder_of(family), **LIMITS, **FORMS[form]) == one


@pytest.mark.parametrize(("isa", "family"), covering(cpu.isas()[:-1], ["qwen2_moe", "deepseek_v3"]))
def test_every_instruction_set(
    isa: str, family: str, folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]
) -> None:
    """With chunks of prompts and two batches in flight."""
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        found = of_ranks(
            2, folder_of(family), max_num_batched_tokens=17, async_scheduling=True, **LIMITS, dtype="bfloat16"
        )
        assert found == expected(family, "bfloat16", isa)
    finally:
        cpu.set_isa(best)


EXPERTS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    **VOCABULARY,
}


def _experts(form: Format | Fp8Form) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = transformers.Qwen3MoeConfig(**EXPERTS, head_dim=128 if isinstance(form, Fp8Form) else 32)
        if isinstance(form, Fp8Form):
            fp8_checkpoints.write(folder, config, form)
        else:
            checkpoints.write(folder, config, form)

    return write


def _latent(folder: Path) -> None:
    """Blocks of 128 rows keep two heads together."""
    settings = CASES["deepseek_v3"].settings | {"q_lora_rank": 160, "hidden_size": 256, "num_attention_heads": 4}
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    more = {"num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 256, "attention_bias": False}
    config = transformers.DeepseekV3Config(**settings | sizes | more | VOCABULARY)
    fp8_checkpoints.write(folder, config, Fp8Form(scales="block", block=(64, 128)))


def _mxfp4(folder: Path) -> None:
    case = CASES["gpt_oss"]
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 3}
    random_hf_model(replace(case, settings=case.settings | sizes | VOCABULARY)).save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (E, N, K // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "AWQ": _experts(Format(method="awq", group_size=64, has_zeros=True)),
    "GPTQ with act-order": _experts(Format(method="gptq", group_size=32, has_zeros=True, has_order=True)),
    "int8 of whole rows": _experts(Format(method="int-quantized", bits=8)),
    "FP8 blocks": _experts(Fp8Form(scales="block")),
    "latent FP8 blocks": _latent,
    "MXFP4": _mxfp4,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    CHECKPOINTS[name](tmp_path)
    one = of_ranks(1, tmp_path, **LIMITS)
    assert len({tuple(tokens) for tokens, _ in one}) > 1
    assert of_ranks(2, tmp_path, **LIMITS) == one
