"""Reading descriptions of quantized checkpoints: formats by layer name, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelConfigError
from quire.hf_config.fields import Fields
from quire.hf_config.layer_format import LayerFormat
from quire.hf_config.quantization import parse_description
from quire.model_config import ModelConfig, load_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "ignore": ["lm_head", "model.layers.0*", "*.mlp.gate", "model.layers.2.self_attn.*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
LAYER = "model.layers.1.self_attn.q_proj"


def parse(description: dict[str, Any], name: str = LAYER) -> LayerFormat | None:
    return parse_description(Fields(description, "config.json")).format_of(name)


def with_weights(**changes: Any) -> dict[str, Any]:
    group = W4A16["config_groups"]["group_0"]  # type: ignore[index]
    return {**W4A16, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def with_group(**changes: Any) -> dict[str, Any]:
    return {**W4A16, "config_groups": {"group_0": {**W4A16["config_groups"]["group_0"], **changes}}}  # type: ignore[index]


def with_groups_of_patterns(count: int) -> dict[str, Any]:
    group = W4A16["config_groups"]["group_0"] | {"targets": ["re:.*.*.*.*!"]}  # type: ignore[index]
    return {**W4A16, "config_groups": {f"group_{index}": group for index in range(count)}}


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (AWQ, LayerFormat(layout="awq", bits=4, scales="group", group_size=128, has_zeros=True)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1},
            LayerFormat(layout="awq", bits=4, scales="channel", has_zeros=True),
        ),
        (
            GPTQ,
            LayerFormat(layout="gptq", bits=4, scales="group", group_size=128, has_order=True, zero_offset=1),
        ),
        (
            {**GPTQ, "bits": 8, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2", "group_size": 32},
            LayerFormat(layout="gptq", bits=8, scales="group", group_size=32, has_zeros=True),
        ),
        ({**GPTQ, "group_size": -1}, LayerFormat(layout="gptq", bits=4, scales="channel", zero_offset=1)),
        (
            W4A16,
            LayerFormat(layout="packed", bits=4, scales="group", group_size=128, scale_name="weight_scale"),
        ),
        (
            with_weights(num_bits=8, symmetric=False, strategy="channel", group_size=None),
            LayerFormat(layout="packed", bits=8, scales="channel", scale_name="weight_scale", has_zeros=True),
        ),
        (
            with_weights(actorder="group"),
            LayerFormat(
                layout="packed", bits=4, scales="group", group_size=128, scale_name="weight_scale", has_order=True
            ),
        ),
        (
            with_weights(actorder="weight"),
            LayerFormat(layout="packed", bits=4, scales="group", group_size=128, scale_name="weight_scale"),
        ),
        (
            {
                **with_group(
                    weights={"num_bits": 8, "type": "int", "strategy": "channel"},
                    input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
                ),
                "format": "int-quantized",
            },
            LayerFormat(layout="int8", bits=8, scales="channel", scale_name="weight_scale"),
        ),
        (
            {
                **with_group(
                    weights={"num_bits": 8, "type": "float", "strategy": "tensor"},
                    input_activations={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
                ),
                "format": "float-quantized",
            },
            LayerFormat(layout="fp8", bits=8, scales="tensor", scale_name="weight_scale", has_input_scale=True),
        ),
        (
            FP8,
            LayerFormat(layout="fp8", bits=8, scales="block", block=(128, 128), scale_name="weight_scale_inv"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            LayerFormat(layout="fp8", bits=8, scales="tensor", scale_name="weight_scale", has_input_scale=True),
        ),
    ],
)
def test_format_of_a_layer(description: dict[str, Any], expected: LayerFormat) -> None:
    assert parse(description) == expected


@pytest.mark.parametrize(
    ("description", "quantized", "plain"),
    [
        (AWQ, [LAYER], ["lm_head"]),
        ({**AWQ, "modules_to_not_convert": ["self_attn", "layers.0."]}, ["model.layers.1.mlp.up_proj"], [LAYER]),
        ({**AWQ, "modules_to_not_convert": ["mlp.gate"]}, ["model.layers.0.mlp.gate_proj"], []),
        ({**GPTQ, "lm_head": True}, [LAYER, "lm_head"], []),
        (
            {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]},
            [LAYER],
            ["model.layers.1.mlp.down_proj"],
        ),
        ({**GPTQ, "dynamic": {r"-:model\.layers\.1\..*": {}}}, ["model.layers.0.self_attn.q_proj"], [LAYER]),
        (W4A16, [LAYER], ["lm_head"]),
        ({**W4A16, "ignore": [r"re:.*self_attn\.", "model.layers.0.mlp.up_proj"]}, ["lm_head"], [LAYER]),
        (with_group(targets=[r"re:.*q_proj$"]), [LAYER], ["model.layers.1.mlp.up_proj"]),
        (with_group(targets=[LAYER]), [LAYER], ["model.layers.0.self_attn.q_proj"]),
        ({**FP8, "modules_to_not_convert": [LAYER]}, ["model.layers.0.self_attn.q_proj"], [LAYER, "lm_head"]),
        (
            MODELOPT,
            [LAYER, "model.layers.10.mlp.up_proj", "model.layers.1.mlp.gate_proj"],
            ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.5.mlp.gate", "model.layers.2.self_attn.o_proj"],
        ),
        ({**MODELOPT, "ignore": []}, [LAYER, "lm_head"], []),
    ],
)
def test_which_layers(description: dict[str, Any], quantized: list[str], plain: list[str]) -> None:
    assert all(parse(description, name) is not None for name in quantized)
    assert all(parse(description, name) is None for name in plain)


def test_settings_of_single_modules() -> None:
    dynamic = {**GPTQ, "dynamic": {r".*\.1\..*": {"bits": 8, "group_size": 32, "desc_act": False}}}
    assert parse(dynamic) == LayerFormat(layout="gptq", bits=8, scales="group", group_size=32, zero_offset=1)
    assert parse(dynamic, "model.layers.0.self_attn.q_proj") == parse(GPTQ)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.mlp\.(gate|up|down)_proj$",
        r"model\.layers\.(?:" + "|".join(map(str, range(32))) + r")\.self_attn\..*",
        r".*a.*b.*c.*d",
        r"(?:model\.)?.*experts\.\d+\.[\w(?]+",
        r".*\?\|\*\+\{",
    ],
)
def test_patterns_that_are_read(pattern: str) -> None:
    rule = parse_description(Fields(W4A16 | {"ignore": ["re:" + pattern]}, "config.json")).rules[0]
    assert rule.patterns == (pattern,)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*Expected awq, gptq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"bits": 4}, "a method that is not read"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**AWQ, "bits": 8}, "bits per weight.*8.*Expected 4"),
        ({**AWQ, "bits": "4x"}, "illegal bits.*'4x'"),
        ({**GPTQ, "bits": 3}, "bits per weight.*3.*Expected 4 or 8"),
        (with_weights(group_size=None), "lacks group_size.*per group"),
        (with_weights(group_size=-1), "illegal group_size.*Got -1.*per group"),
        ({**GPTQ, "group_size": 0}, "illegal group_size.*Got 0"),
        ({**GPTQ, "group_size": -5}, "illegal group_size.*Got -5"),
        ({**GPTQ, "group_size": 10**9}, "illegal group_size"),
        ({**GPTQ, "group_size": 48}, "illegal group_size.*multiple of 32"),
        ({**GPTQ, "group_size": True}, "illegal group_size"),
        ({**GPTQ, "desc_act": "yes"}, "illegal desc_act"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "pack_dtype": "int64"}, "int64"),
        ({**GPTQ, "dynamic": []}, "illegal dynamic"),
        ({**GPTQ, "dynamic": {"(a+)+b": {}}}, "very long to match"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 2}}}, "bits per weight"),
        ({**GPTQ, "modules_in_block_to_quantize": [[1]]}, "illegal modules_in_block_to_quantize"),
        ({**W4A16, "ignore": ["re:" + "a*" * 5]}, "very long to match"),
        ({**W4A16, "ignore": ["re:" + ".?" * 28 + "!"]}, "very long to match"),
        ({**W4A16, "ignore": ["re:" + r"(.|\w)" * 24 + "!"]}, "very long to match"),
        ({**W4A16, "ignore": ["re:(?x)(a+) +!"]}, "very long to match"),
        ({**W4A16, "ignore": ["re:" + "*" * 256]}, "very long to match"),
        ({**GPTQ, "dynamic": {"-:" + r"\w?" * 17: {}}}, "very long to match"),
        ({**W4A16, "ignore": ["re:.*.*.*.*!"] * 9}, "together could take very long to match"),
        (with_groups_of_patterns(9), "together could take very long to match"),
        ({**W4A16, "ignore": ["re:("]}, "illegal pattern"),
        ({**W4A16, "ignore": ["re:a"] * 65}, "too many modules"),
        ({**W4A16, "ignore": "lm_head"}, "illegal ignore"),
        ({**W4A16, "format": "marlin-24"}, "marlin-24"),
        ({**W4A16, "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({**W4A16, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({**W4A16, "transform_config": {"config_groups": {}}}, "rotated"),
        ({**W4A16, "config_groups": [1]}, "illegal config_groups"),
        (with_weights(num_bits=2), "int2"),
        (with_weights(strategy="tensor"), "scales per tensor"),
        (with_weights(strategy="nonsense"), "illegal strategy"),
        (with_weights(actorder="alphabetical"), "illegal actorder"),
        (with_group(output_activations={"num_bits": 8}), "quantized outputs"),
        (with_group(input_activations={"num_bits": 8, "dynamic": False}), "with activations"),
        ({**FP8, "fmt": "e5m2"}, "e5m2"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "an algorithm of ModelOpt.*NVFP4.*Expected FP8 or FP8_PER_CHANNEL"),
        ({"quant_method": "modelopt"}, "an algorithm of ModelOpt"),
        ({**MODELOPT, "ignore": ["*a*b*c*d*e"]}, "very long to match"),
        ({**MODELOPT, "ignore": "lm_head"}, "illegal ignore"),
        ({**FP8, "weight_block_size": [128]}, "illegal weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, "illegal weight_block_size"),
    ],
)
def test_refused(description: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse(description)


def load(folder: Path, files: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return load_model_config(folder, overrides)


@pytest.mark.parametrize(
    ("files", "method"),
    [
        ({"config.json": LLAMA}, None),
        ({"config.json": {**LLAMA, "quantization_config": AWQ}}, "awq"),
        ({"config.json": {**LLAMA, "compression_config": W4A16}}, "compressed-tensors"),
        ({"config.json": LLAMA, "quantize_config.json": {"bits": 4, "group_size": 128}}, "gptq"),
        ({"config.json": LLAMA, "quant_config.json": {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}}, "awq"),
        ({"config.json": {**LLAMA, "quantization_config": FP8}, "quantize_config.json": GPTQ}, "fp8"),
        (
            {
                "config.json": LLAMA,
                "hf_quant_config.json": {"quantization": {"quant_algo": "fp8", "exclude_modules": ["lm_head"]}},
            },
            "modelopt",
        ),
    ],
)
def test_where_it_is_described(files: dict[str, Any], method: str | None, tmp_path: Path) -> None:
    config = load(tmp_path, files)
    assert (None if config.quantized is None else config.quantized.method) == method


def test_an_override_describes_it_anew(tmp_path: Path) -> None:
    files = {"config.json": {**LLAMA, "quantization_config": AWQ}, "quantize_config.json": GPTQ}
    assert load(tmp_path, files, {"quantization_config": None}).quantized is None
