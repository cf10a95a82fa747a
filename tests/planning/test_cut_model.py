"""The part of a model on one of several devices, beside the pieces that loading would cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.model_config import ModelConfig, load_model_config
from quire.planning.cut_model import ExpertCut, ModelCut, check_degree, legal_degrees, legal_divisions
from tests.real_models import write_config

AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
BF16 = kv_format("auto", "bfloat16")


def model_of(folder: Path, name: str, **more: Any) -> ModelConfig:
    return load_model_config(write_config(folder, name, **more))


@pytest.mark.parametrize(
    ("name", "degree", "more"),
    [("Llama-3-70B", 4, {}), ("Phi-4", 2, {}), ("Llama-3-70B", 8, AWQ), ("Gemma-2-9B", 2, {}), ("Llama-3-70B", 3, {})],
)
def test_parts_hold_the_model(name: str, degree: int, more: dict[str, Any], tmp_path: Path) -> None:
    """All parts together hold the linear layers of the model, to a byte, where no head is held twice."""
    model = model_of(tmp_path, name, **more)
    method = None if model.quantized is None else model.quantized.method
    parts = [ModelCut(model, degree).part(rank) for rank in range(degree)]
    held = [each.weight_bytes_by_kind("bfloat16", method, is_packed=False) for each in (model, *parts)]
    whole, *held = held
    assert sum(each.blocks for each in held) == whole.blocks
    assert sum(each.output for each in held) == whole.output
    assert sum(each.embeddings for each in held) == whole.embeddings
    assert sum(part.kv_bytes_per_token(BF16) for part in parts) == model.kv_bytes_per_token(BF16)
    assert held[0].blocks == max(each.blocks for each in held)
    assert {(part.hidden_size, part.vocab_size) for part in parts} == {(model.hidden_size, model.vocab_size)}


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_whole_experts_hold_the_model(strategy: str, tmp_path: Path) -> None:
    """128 experts on 3 ranks: 43, 43 and 42. A rank takes the tensors of its own from the checkpoint."""
    model = model_of(tmp_path, "Qwen3-4B", **EXPERTS)
    parts = [ModelCut(model, 3, ExpertCut(strategy)).part(rank) for rank in range(3)]
    whole = model.weight_bytes_by_kind("bfloat16", is_packed=False).blocks
    routers = 36 * 128 * 2560 * 2  # of every layer, on every rank
    assert sum(part.weight_bytes_by_kind("bfloat16", is_packed=False).blocks for part in parts) == whole + 2 * routers
    assert [part.experts()[0].num_experts for part in parts] == [43, 43, 42]
    names = [f"model.layers.7.mlp.experts.{expert}.down_proj.weight" for expert in range(128)]
    held = [[name for name in names if part.holds(name)] for part in parts]
    assert sorted(chain(*held)) == sorted(names)
    assert held[0][1] == names[1 if strategy == "linear" else 3]
    assert all(part.holds("model.layers.7.mlp.experts.128.down_proj.weight") for part in parts)  # reported there


@pytest.mark.parametrize("width", [1, 2])
def test_lanes_share_experts_alone(width: int, tmp_path: Path) -> None:
    """Each of three lanes has all the rest, cut among its own ranks; experts are cut as among ranks of one lane."""
    model = model_of(tmp_path, "Qwen3-4B", **EXPERTS)
    cut = ModelCut(model, width, ExpertCut(num_lanes=3))
    parts = [cut.part(rank, lane) for lane in range(3) for rank in range(width)]
    as_one_lane = [ModelCut(model, 3 * width, ExpertCut()).part(rank) for rank in range(3 * width)]
    for part, like in zip(parts, as_one_lane, strict=True):
        placements = [each.placement for each in like.experts()]
        assert [each.placement for each in part.experts()] == [replace(each, num_lanes=3) for each in placements]
        assert part.weight_bytes_by_kind("bfloat16", is_packed=False).blocks > 0
    rest = [ModelCut(model, width).part(rank) for _ in range(3) for rank in range(width)]
    assert [[layer.attention for layer in part.layers] for part in parts] == [
        [layer.attention for layer in part.layers] for part in rest
    ]
    assert [part.vocab_share for part in parts] == [part.vocab_share for part in rest]


def test_few_heads_are_held_several_times(tmp_path: Path) -> None:
    """8 heads of keys and values on 16 devices: one on each."""
    model = model_of(tmp_path, "Llama-3-70B")
    part = ModelCut(model, 16).part()
    assert part.kv_bytes_per_token(BF16) == model.kv_bytes_per_token(BF16) // 8
    assert 16 * part.weight_bytes("bfloat16") > model.weight_bytes("bfloat16")


@pytest.mark.parametrize(
    ("name", "more", "refused"),
    [
        ("Llama-3-70B", {}, []),
        ("SmolLM2-135M", {}, [10, 11, 12, 13, 14, 15, 16]),  # 9 heads
        ("Qwen2.5-72B", {"intermediate_size": 29568} | AWQ, []),  # 231 groups of 128 inputs, which are not cut
        ("Llama-3-70B", AWQ, []),
    ],
)
def test_legal_degrees(name: str, more: dict[str, Any], refused: list[int], tmp_path: Path) -> None:
    """Ranks need a head each, and rows of every layer."""
    model = model_of(tmp_path, name, num_hidden_layers=2, **more)
    assert legal_degrees(model, 16) == [degree for degree in range(1, 17) if degree not in refused]


@pytest.mark.parametrize(
    ("degree", "num_devices", "words"),
    [
        (65, 65, "cannot be cut in 65: it has 64 heads"),
        (4, 6, "6 devices do not make whole copies"),
        (0, 2, "at least one device"),
        (-1, 2, "at least one device"),
    ],
)
def test_a_wrong_degree_is_refused_with_the_valid_ones(
    degree: int, num_devices: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_degree(model_of(tmp_path, "Llama-3-70B", num_hidden_layers=2), degree, num_devices)
    valid = ", ".join(str(each) for each in range(1, 65) if num_devices % each == 0)
    assert f"one of {valid} with {num_devices} devices; the model allows 1, 2, 3, 4" in error.value.message


def test_what_transformers_runs_is_cut_by_heads(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "SmolLM2-135M", architectures=["OtherForCausalLM"], model_type="other")
    model = load_model_config(folder, any_architecture=True)
    assert legal_degrees(model, 16) == list(range(1, 10))
    parts = [ModelCut(model, 3).part(rank) for rank in range(3)]
    assert sum(part.kv_bytes_per_token(BF16) for part in parts) == model.kv_bytes_per_token(BF16)
    assert sum(part.weight_bytes("bfloat16") for part in parts) < 1.01 * model.weight_bytes("bfloat16")


def test_modelling_code_has_all_experts_on_each_rank(tmp_path: Path) -> None:
    model = model_of(tmp_path, "Qwen3-4B", **EXPERTS)
    part = ModelCut(model, 2, is_native=False).part()
    assert part.experts() == model.experts()
    assert part.kv_bytes_per_token(BF16) == model.kv_bytes_per_token(BF16) // 2
    assert part.layers[0].attention != model.layers[0].attention


def test_modelling_code_computes_norms_over_all_heads_on_each_rank(tmp_path: Path) -> None:
    """Our own code has a part of such a norm on each rank, and so a head of k."""
    model = model_of(tmp_path, "Qwen3-4B", architectures=["Olmo2ForCausalLM"], model_type="olmo2")
    assert legal_degrees(model, 16) == list(range(1, 9))
    assert legal_degrees(model, 16, is_native=False) == list(range(1, 17))
    assert legal_divisions(model, 16, is_native=False) == [1, 2]
