"""Quantized checkpoints from their files to tokens: exact weights, logits, planned bytes, and refusals.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import quire.demo
from quire import LLM, SamplingParams
from quire.errors import ConfigError, WeightsError
from quire.formats.stored_linear import stored_from
from quire.hf_config.fields import Fields
from quire.hf_config.quantization import parse_description
from quire.kernels import cpu, reference
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear, make_linear
from quire.model_config import load_model_config
from tests.covering import in_turn
from tests.loading import load_model
from tests.models.tiny_models import QUANTIZED_ACTIVATIONS_TOLERANCE, hf_logits
from tests.quantization.answers import answer, answer_in_floating_point
from tests.quantization.checkpoints import Format, Numbers, Written, draw, tensors_of, write, write_quantized
from tests.quantization.logits import PATHS, error_of_logits

FORMATS = {
    "awq": Format(method="awq", group_size=64, has_zeros=True),
    "awq-32": Format(method="awq", group_size=32, has_zeros=True),
    "awq-128": Format(method="awq", group_size=128, has_zeros=True),
    "awq-row": Format(method="awq", has_zeros=True),
    "gptq": Format(method="gptq", group_size=64),
    "gptq-zeros": Format(method="gptq", group_size=32, has_zeros=True),
    "gptq-v2": Format(method="gptq", group_size=64, has_zeros=True, config={"checkpoint_format": "gptq_v2"}),
    "gptq-8": Format(method="gptq", bits=8, group_size=128),
    "gptq-8-zeros": Format(method="gptq", bits=8, group_size=64, has_zeros=True),
    "gptq-8-order": Format(method="gptq", bits=8, group_size=64, has_order=True),
    "gptq-order": Format(method="gptq", group_size=64, has_order=True),
    "gptq-order-zeros": Format(method="gptq", group_size=32, has_order=True, has_zeros=True),
    "gptq-row": Format(method="gptq"),
    "w4a16": Format(method="pack-quantized", group_size=64, scale_dtype=torch.bfloat16),
    "w4a16-zeros": Format(method="pack-quantized", group_size=32, has_zeros=True),
    "w4a16-order": Format(method="pack-quantized", group_size=64, has_order=True),
    "w8a16": Format(method="pack-quantized", bits=8, scale_dtype=torch.bfloat16),
    "w8a16-order": Format(method="pack-quantized", bits=8, group_size=128, has_order=True),
    "w8a16-zeros": Format(method="pack-quantized", bits=8, group_size=64, has_zeros=True),
    "w8a8": Format(method="int-quantized", bits=8, scale_dtype=torch.bfloat16),
}
SIZES: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    # All experts are active: rounded activations cannot choose others.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=128, norm_topk_prob=True
    ),
}
DENSE = ("llama", "qwen3")
GROUPS = [
    *([(family, name) for name in FORMATS] for family in DENSE),
    [("qwen3_moe", name) for name in ("awq", "gptq-order-zeros", "gptq-8", "w4a16", "w8a16-order", "w8a8")],
]
PAIRS = [pair for group in GROUPS for pair in group]
PREFIX = "model.layers.0.self_attn."
Q_PROJ = f"{PREFIX}q_proj"
UP_PROJ = "model.layers.0.mlp.up_proj"
OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "num_threads": 1, "skip_tokenizer_init": True}

needs_kernels = pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Written]:
    """A checkpoint of a family in a format, written once."""
    return cache(
        lambda family, name: write(tmp_path_factory.mktemp(f"{family}-{name}"), FAMILIES[family](), FORMATS[name])
    )


def make_layer(form: Format, shards: tuple[tuple[str, int], ...], K: int) -> tuple[Any, dict[str, Numbers]]:
    """A layer without weights, and numbers for each shard."""
    checkpoint = parse_description(Fields(form.describe(), "config.json"))
    stored = stored_from(LinearShape(prefix=PREFIX, shards=shards, in_features=K), checkpoint)
    rng = np.random.default_rng(3)
    return make_linear(stored, torch.float32), {name: draw(rng, N, K, form) for name, N in shards}


def load_layer(layer: Any, numbers: dict[str, Numbers], form: Format, changed: dict[str, Tensor] | None = None) -> None:
    slots = dict(layer.slots())
    for shard in reversed(numbers):
        for part, tensor in tensors_of(numbers[shard], form).items():
            name = f"{shard}.{part}"
            tensor = (changed or {}).get(name, tensor)
            assert tuple(tensor.shape) == slots[name].shape, name
            assert tensor.dtype in slots[name].accepts, name
            slots[name].load(tensor)


def held_weight(layer: Linear) -> Tensor:
    weight = layer.weight.weight
    assert weight is not None
    return reference.dequantize_grouped(weight)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("K", [8, 128, 192, 200])
def test_weights_are_exact(name: str, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a bit, with shards fused; K is not always whole groups, and may be one word."""
    monkeypatch.setattr(cpu, "_available", False)
    form = FORMATS[name]
    shards = (("q_proj", 64), ("k_proj", 8), ("v_proj", 24))
    layer, numbers = make_layer(form, shards, K)
    load_layer(layer, numbers, form)
    parts = getattr(layer, "parts", (layer,))
    assert len(parts) == (3 if form.has_order else 1)
    held = torch.cat([held_weight(part) for part in parts])
    assert torch.equal(held, torch.cat([numbers[shard].weight() for shard, _ in shards]))


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_stay_on_their_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a weight is made on torch's default device, here one without data: weights may arrive on a GPU."""
    monkeypatch.setattr(cpu, "_available", False)
    form = FORMATS[name]
    layer, numbers = make_layer(form, (("q_proj", 64), ("k_proj", 8)), 192)
    slots = dict(layer.slots())
    pieces = {f"{shard}.{part}": x for shard in numbers for part, x in tensors_of(numbers[shard], form).items()}
    with torch.device("meta"):
        for piece, tensor in pieces.items():
            slots[piece].load(tensor)
    held = torch.cat([held_weight(part) for part in getattr(layer, "parts", (layer,))])
    assert torch.equal(held, torch.cat([of_shard.weight() for of_shard in numbers.values()]))


def test_packed_as_the_compressed_tensors_package_does() -> None:
    """The tests' own writer against an independent one, so that both cannot be wrong together."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        form = Format(method="pack-quantized", bits=bits, group_size=64, has_zeros=True)
        numbers = draw(np.random.default_rng(1), 24, 200, form)
        tensors, middle = tensors_of(numbers, form), 2 ** (bits - 1)
        signed_NK = torch.from_numpy(numbers.codes_NK - middle).to(torch.int8)
        signed_NG = torch.from_numpy(numbers.zeros_NG - middle).to(torch.int8)
        assert torch.equal(helpers.pack_to_int32(signed_NK, bits), tensors["weight_packed"])
        assert torch.equal(helpers.pack_to_int32(signed_NG, bits, packed_dim=0), tensors["weight_zero_point"])


@pytest.mark.parametrize(("family", "name", "path"), in_turn(GROUPS, PATHS), indirect=["path"])
def test_logits(family: str, name: str, path: str, written: Callable[[str, str], Written]) -> None:
    """Close to transformers' with the weights in floating point: only the rounding of activations lies between."""
    checkpoint = written(family, name)
    assert error_of_logits(checkpoint.folder, checkpoint.model) < QUANTIZED_ACTIVATIONS_TOLERANCE


@needs_kernels
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_planned_bytes_are_held(family: str, name: str, written: Callable[[str, str], Written]) -> None:
    config = load_model_config(written(family, name).folder)
    config_bytes = config.weight_bytes("bfloat16", "anything: the checkpoint decides")
    assert load_model(config, torch.bfloat16).weight_bytes() == config_bytes
    assert config_bytes < replace(config, quantized=None).weight_bytes("bfloat16")


@pytest.mark.parametrize("family", DENSE)
def test_greedy_tokens(family: str, written: Callable[[str, str], Written]) -> None:
    """Each is one of the best in transformers' eyes: the rounding of activations may only swap near ties."""
    checkpoint = written(family, "w4a16" if family == "llama" else "gptq-8")
    prompt = [5, 17, 23, 99, 101, 42, 7]
    llm = LLM(str(checkpoint.folder), **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    logits = hf_logits(checkpoint.model, prompt + tokens)[len(prompt) - 1 : -1]
    behind = logits.amax(1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert behind.max() < QUANTIZED_ACTIVATIONS_TOLERANCE * logits.std() * 3
    assert (behind == 0).float().mean() > 0.5


@pytest.mark.parametrize("name", ["awq", "gptq-order-zeros", "w4a16", "w8a8"])
def test_the_demo_model_keeps_its_answer(name: str, tmp_path: Path) -> None:
    write_quantized(quire.demo.path(), tmp_path, FORMATS[name])
    assert answer(model=str(tmp_path)) == answer_in_floating_point()


@needs_kernels
def test_scales_that_float16_cannot_hold(
    written: Callable[[str, str], Written], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay as they are, and more memory than planned is taken."""
    checkpoint = written("llama", "w4a16")
    name = f"{Q_PROJ}.weight_scale"
    checkpoint.write_changed(tmp_path, {name: checkpoint.tensors[name] * 2.0**-20})
    config = load_model_config(tmp_path)
    model = load_model(config, torch.bfloat16)
    assert "float16 cannot hold" in caplog.text
    assert model.weight_bytes() > config.weight_bytes("bfloat16")


@pytest.mark.parametrize("expert", [0, 2])
def test_scales_of_one_expert_that_float16_cannot_hold(
    expert: int, written: Callable[[str, str], Written], tmp_path: Path
) -> None:
    """Whether it is the first or the last one, all experts of the layer get scales in float32, with the same values."""
    checkpoint = written("qwen3_moe", "w4a16")
    name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight_scale"
    checkpoint.write_changed(tmp_path, {name: checkpoint.tensors[name] * 2.0**-20})
    model = load_model(load_model_config(tmp_path), torch.bfloat16)
    assert model.weight_bytes() >= model.config.weight_bytes("bfloat16")
    changed = copy.deepcopy(checkpoint.model)
    changed.model.layers[0].mlp.experts.gate_up_proj.data[expert, 128:] *= 2.0**-20
    assert error_of_logits(tmp_path, changed) < QUANTIZED_ACTIVATIONS_TOLERANCE


@pytest.mark.parametrize(
    ("form", "given"),
    [("awq", "awq_marlin"), ("awq", "auto_awq"), ("gptq", "gptq"), ("w4a16", "compressed-tensors"), ("w8a8", None)],
)
def test_the_flag_may_name_what_it_is(form: str, given: str | None, written: Callable[[str, str], Written]) -> None:
    llm = LLM(str(written("llama", form).folder), quantization=given, **OPTIONS)
    method = {"awq": "awq", "gptq": "gptq"}.get(form, "compressed-tensors")
    setting = llm.resolved.settings["quantization"]
    assert (setting.value, setting.source) == (method, "model" if given is None else "argument")
    assert setting.detail == load_model_config(written("llama", form).folder).quantized.describe()  # type: ignore[union-attr]


@pytest.mark.parametrize("given", ["gptq", "fp8", "int8", "int4", "gguf"])
def test_another_method_is_refused(given: str, written: Callable[[str, str], Written]) -> None:
    with pytest.raises(ConfigError, match="The checkpoint is awq: leave --quantization out") as caught:
        LLM(str(written("llama", "awq").folder), quantization=given, **OPTIONS)
    assert caught.value.param == "quantization"


def test_layers_left_in_floating_point(path: str, tmp_path: Path) -> None:
    """One shard of a fused layer, and one layer, by their names: their weights are exact."""
    ignore = ["lm_head", "re:.*k_proj$", "model.layers.1.mlp.down_proj"]
    form = replace(FORMATS["w4a16"], config={"ignore": ignore})
    plain = ("k_proj", "layers.1.mlp.down_proj")
    checkpoint = write(tmp_path, FAMILIES["llama"](), form, plain)
    stored = [s for s in load_model_config(tmp_path).stored_linears() if s.source is None]
    names = [name for s in stored for name in s.shape.names]
    assert names == [
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]
    assert {s.reason for s in stored} == {"not quantized in the checkpoint: ignore"}
    assert error_of_logits(tmp_path, checkpoint.model) < QUANTIZED_ACTIVATIONS_TOLERANCE


def test_biases_of_zeros_are_passed_over(written: Callable[[str, str], Written], tmp_path: Path) -> None:
    """Old quantizers wrote one for every layer."""
    checkpoint = written("llama", "gptq")
    checkpoint.write_changed(tmp_path, {f"{UP_PROJ}.bias": torch.zeros(256)})
    load_model(load_model_config(tmp_path), torch.float32)
    checkpoint.write_changed(tmp_path, {f"{UP_PROJ}.bias": torch.ones(256)})
    with pytest.raises(WeightsError, match=r"1 unexpected \(model.layers.0.mlp.up_proj.bias\)"):
        load_model(load_model_config(tmp_path), torch.float32)


HOSTILE: dict[str, tuple[str, str, Callable[[Tensor], Tensor], str]] = {
    "g_idx-too-large": ("gptq-order", "g_idx", lambda x: x.where(x != 1, torch.tensor(2**31 - 1).int()), "g_idx"),
    "g_idx-negative": ("gptq-order", "g_idx", lambda x: -x, "g_idx"),
    "g_idx-uneven": ("gptq-order", "g_idx", torch.zeros_like, "g_idx"),
    "g_idx-unsaid": ("gptq", "g_idx", lambda x: x.flip(0), "orders the in-features"),
    "g_idx-short": ("gptq-order", "g_idx", lambda x: x[:-1], "shape"),
    "g_idx-float": ("gptq-order", "g_idx", lambda x: x.float(), "has dtype float32 instead of int32"),
    "packed-g_idx": ("w4a16-order", "weight_g_idx", lambda x: x + 1, "g_idx"),
    "zeros-unsaid": ("gptq", "qzeros", lambda x: x ^ 3, "holds zero points"),
    "qweight-short": ("awq", "qweight", lambda x: x[:-1], "shape"),
    "qweight-float": ("awq", "qweight", lambda x: x.float(), "dtype float32 instead of int32"),
    "scales-integer": ("awq", "scales", lambda x: x.int(), "dtype int32 instead of float32"),
    "scales-nan": ("awq", "scales", lambda x: x * float("nan"), "not a finite number"),
    "scales-infinite": ("gptq", "scales", lambda x: x / 0, "not a finite number"),
    "scales-shape": ("gptq", "scales", lambda x: x[:1].contiguous(), "shape"),
    "qzeros-transposed": ("awq", "qzeros", lambda x: x.T.contiguous(), "shape"),
    "weight-shape": ("w4a16", "weight_shape", lambda x: x + 1, r"says \[129, 129\]"),
    "packed-short": ("w8a16", "weight_packed", lambda x: x[:, :-1].contiguous(), "shape"),
    "w8a8-unsigned": ("w8a8", "weight", lambda x: x.view(torch.uint8), "dtype uint8 instead of int8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors(name: str, path: str, written: Callable[[str, str], Written], tmp_path: Path) -> None:
    """A sentence that names the tensor, and numbers of the file index nothing."""
    form, part, change, message = HOSTILE[name]
    checkpoint = written("llama", form)
    tensor = f"{Q_PROJ}.{part}"
    checkpoint.write_changed(tmp_path, {tensor: change(checkpoint.tensors[tensor])})
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(load_model_config(tmp_path), torch.float32)
    assert PREFIX in str(caught.value)


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16", "w8a8"])
def test_a_missing_tensor_is_named(form: str, written: Callable[[str, str], Written], tmp_path: Path) -> None:
    checkpoint = written("llama", form)
    missing = next(name for name in checkpoint.tensors if name.startswith(Q_PROJ))
    checkpoint.write_changed(tmp_path, {missing: None})
    with pytest.raises(WeightsError, match=f"1 missing .{missing}"):
        load_model(load_model_config(tmp_path), torch.float32)


def test_sizes_that_cannot_be_packed_are_refused_before_loading(tmp_path: Path) -> None:
    raw = {**FAMILIES["llama"]().to_dict(), "intermediate_size": 252, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": FORMATS["awq"].describe()}))
    with pytest.raises(ConfigError, match="gate_proj has a size that its format cannot pack"):
        load_model_config(tmp_path).weight_bytes("bfloat16")


def test_dummy_weights_are_refused(written: Callable[[str, str], Written]) -> None:
    with pytest.raises(ConfigError, match="Dummy weights are not made for a quantized checkpoint"):
        LLM(str(written("llama", "awq").folder), load_format="dummy", **OPTIONS)
