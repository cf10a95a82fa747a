"""FP8 checkpoints from their files to tokens: exact weights, logits, planned bytes, and refusals.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, SamplingParams
from quire.errors import ConfigError, WeightsError
from quire.formats.stored_linear import stored_from
from quire.hf_config.fields import Fields
from quire.hf_config.quantization import parse_description
from quire.kernels import cpu
from quire.kernels.fp8 import fp8_rows
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import make_linear
from quire.model_config import load_model_config
from tests.covering import in_turn
from tests.loading import load_model
from tests.models.tiny_models import hf_logits
from tests.quantization.checkpoints import Written
from tests.quantization.fp8_checkpoints import Fp8Form, draw, tensors_of, write
from tests.quantization.logits import PATHS, error_of_logits

FORMS = {
    "tensor": Fp8Form(),
    "tensor-static": Fp8Form(scale_shape=(1,), has_input_scale=True),
    "channel": Fp8Form(scales="channel"),
    "block": Fp8Form(scales="block"),
    "block-small": Fp8Form(scales="block", block=(24, 32)),
    "block-wide": Fp8Form(scales="block", block=(1, 1000)),
    "compressed-tensor": Fp8Form(method="compressed-tensors", scale_shape=(1,), has_input_scale=True),
    "compressed-channel": Fp8Form(method="compressed-tensors", scales="channel", scale_dtype=torch.bfloat16),
    "compressed-block": Fp8Form(method="compressed-tensors", scales="block"),
    "modelopt": Fp8Form(method="modelopt", has_input_scale=True),
    "modelopt-channel": Fp8Form(method="modelopt", scales="channel"),
}
# No shard of q, k, v is a multiple of 128, nor is any K: blocks are cut at every end.
SIZES: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    # All experts are active: rounded activations cannot choose others.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=128, norm_topk_prob=True
    ),
}
DENSE = ("llama", "qwen3")
GROUPS = [
    *([(family, name) for name in FORMS] for family in DENSE),
    [("qwen3_moe", name) for name in ("block", "tensor", "compressed-channel")],
]
PAIRS = [pair for group in GROUPS for pair in group]
PREFIX = "model.layers.0.self_attn."
Q_PROJ = f"{PREFIX}q_proj"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1, "skip_tokenizer_init": True}
# Weights are exact and activations are not rounded: only the order of sums in float32 differs.
TOLERANCE = 1e-5

needs_kernels = pytest.mark.skipif(not cpu.available(), reason="the twin does not pad")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """A checkpoint of a family in a form, written once."""
    return cache(
        lambda family, name: write(tmp_path_factory.mktemp(f"{family}-{name}"), FAMILIES[family](), FORMS[name])
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("K", [128, 192, 200])
def test_weights_are_exact(name: str, K: int, path: str) -> None:
    """To a bit, with shards fused whose blocks straddle the seams."""
    form, generator = FORMS[name], torch.Generator().manual_seed(3)
    shards = (("q_proj", 150), ("k_proj", 40), ("v_proj", 50))
    checkpoint = parse_description(Fields(form.describe(), "config.json"))
    stored = stored_from(LinearShape(prefix=PREFIX, shards=shards, in_features=K), checkpoint)
    layer: Any = make_linear(stored, torch.float32)
    numbers = {shard: draw(N, K, form, generator) for shard, N in shards}
    slots = dict(layer.slots())
    for shard in reversed(numbers):
        for part, tensor in tensors_of(numbers[shard], form).items():
            slots[f"{shard}.{part}"].load(tensor)
    held = fp8_rows(layer.weight, torch.arange(240), torch.float32)
    assert torch.equal(held, torch.cat([numbers[shard].weight() for shard, _ in shards]))


@pytest.mark.parametrize(("family", "name", "path"), in_turn(GROUPS, PATHS), indirect=["path"])
def test_logits(family: str, name: str, path: str, written: Callable[[str, str], Written]) -> None:
    """Logits of transformers with dequantized weights."""
    checkpoint = written(family, name)
    assert error_of_logits(checkpoint.folder, checkpoint.model) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_planned_bytes_are_held(family: str, name: str, written: Callable[[str, str], Written]) -> None:
    config = load_model_config(written(family, name).folder)
    assert load_model(config, torch.bfloat16).weight_bytes() == config.weight_bytes("bfloat16")
    assert config.weight_bytes("bfloat16") < replace(config, quantized=None).weight_bytes("bfloat16")


@pytest.mark.parametrize("family", DENSE)
def test_greedy_tokens(family: str, written: Callable[[str, str], Written]) -> None:
    checkpoint = written(family, "block")
    prompt = [5, 17, 23, 99, 101, 42, 7]
    llm = LLM(str(checkpoint.folder), quantization="fp8", dtype="float32", **OPTIONS)
    assert llm.resolved.settings["quantization"].detail == "FP8, blocks of 128x128"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    logits = hf_logits(checkpoint.model, prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == logits.argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, written: Callable[[str, str], Written]) -> None:
    """Codes are as exact as in float32: the difference comes from the activations' dtype."""
    checkpoint = written("qwen3", "block")
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.003
    assert error_of_logits(checkpoint.folder, checkpoint.model, dtype) < tolerance


def test_layers_left_in_floating_point(path: str, tmp_path: Path) -> None:
    """One shard of a fused layer, and one layer, by their names."""
    plain = ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj")
    form = replace(FORMS["block"], config={"modules_to_not_convert": [f"model.{name}" for name in plain]})
    checkpoint = write(tmp_path, FAMILIES["llama"](), form, plain)
    names = [name for s in load_model_config(tmp_path).stored_linears() if s.source is None for name in s.shape.names]
    assert names == [*(f"model.{name}" for name in plain), "lm_head"]
    assert error_of_logits(tmp_path, checkpoint.model) < TOLERANCE


@pytest.mark.parametrize(("name", "num_notices"), [("tensor", 0), ("tensor-static", 1), ("compressed-tensor", 1)])
def test_scales_of_activations_are_passed_over_with_one_notice(
    name: str, num_notices: int, written: Callable[[str, str], Written], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_model(load_model_config(written("llama", name).folder), torch.float32)
    assert sum("scales for activations" in record.message for record in caplog.records) == num_notices


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (160,), (160, 1)])
def test_shapes_of_scales(shape: tuple[int, ...], written: Callable[[str, str], Written], tmp_path: Path) -> None:
    """The bytes of files with one scale per tensor and per channel."""
    checkpoint = written("llama", "tensor")
    name = f"{Q_PROJ}.weight_scale"
    checkpoint.write_changed(tmp_path, {name: checkpoint.tensors[name].expand(shape).clone()})
    assert error_of_logits(tmp_path, checkpoint.model) < TOLERANCE


HOSTILE: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "scale-nan": ("tensor", "weight_scale", lambda x: x * float("nan"), "a scale is not a finite number"),
    "scale-infinite": ("channel", "weight_scale", lambda x: x / 0, "a scale is not a finite number"),
    "scale-negative": ("block", "weight_scale_inv", lambda x: -x, "a scale is negative"),
    "scale-short": ("channel", "weight_scale", lambda x: x[:-1], r"has shape \[159, 1\] instead of \[160, 1\]"),
    "scale-long": ("tensor", "weight_scale", lambda x: x.expand(2), r"has shape \[2\] instead of \[160, 1\]"),
    "scale-empty": ("tensor", "weight_scale", lambda x: x.expand(0), r"has shape \[0\] instead of"),
    "block-transposed": ("block-small", "weight_scale_inv", lambda x: x.T, r"has shape \[6, 7\] instead of \[7, 6\]"),
    "block-scalar": ("block", "weight_scale_inv", lambda x: x[0, 0], r"has shape \[\] instead of \[2, 2\]"),
    "block-no-more-rows": ("block", "weight_scale_inv", lambda x: x.repeat(2, 1), r"has shape \[4, 2\]"),
    "scale-integer": ("tensor", "weight_scale", lambda x: x.int(), "has dtype int32 instead of float32"),
    "scale-missing": ("tensor", "weight_scale", lambda x: None, "1 missing .*q_proj.weight_scale"),
    "weight-float": ("tensor", "weight", lambda x: x.float(), "has dtype float32 instead of float8_e4m3fn"),
    "weight-e5m2": ("tensor", "weight", lambda x: x.view(torch.float8_e5m2), "dtype float8_e5m2 instead of float8_e4"),
    "weight-bytes": ("block", "weight", lambda x: x.view(torch.uint8), "has dtype uint8 instead of float8_e4m3fn"),
    "weight-short": ("block", "weight", lambda x: x[:, :-1], r"has shape \[160, 191\] instead of \[160, 192\]"),
    "input-scale-wide": ("tensor-static", "input_scale", lambda x: x.expand(7), r"has shape \[7\] instead of \[1\]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors(name: str, path: str, written: Callable[[str, str], Written], tmp_path: Path) -> None:
    """A sentence that names the tensor."""
    form, part, change, message = HOSTILE[name]
    checkpoint = written("llama", form)
    tensor = f"{Q_PROJ}.{part}"
    checkpoint.write_changed(tmp_path, {tensor: change(checkpoint.tensors[tensor])})
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(load_model_config(tmp_path), torch.float32)
    assert PREFIX in str(caught.value)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (Fp8Form(config={"fmt": "e5m2"}).describe(), "e5m2"),
        (Fp8Form(scales="block", block=(128, 100)).describe(), "q_proj has scales per block of columns of a width"),
        (Fp8Form(scales="block", config={"weight_block_size": [128]}).describe(), "weight_block_size"),
        (Fp8Form(scales="block", config={"weight_block_size": [0, 128]}).describe(), "weight_block_size"),
    ],
)
def test_what_is_not_read_is_refused_before_loading(description: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = {**FAMILIES["llama"]().to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": description}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path).weight_bytes("bfloat16")
