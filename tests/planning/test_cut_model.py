"""The part of a model on one of several devices, beside the pieces that loading would cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.formats.stored_linear import legal_cuts
from quire.model_config import ModelConfig, load_model_config
from quire.planning.cut_model import ModelCut, check_degree, legal_degrees
from tests.real_models import write_config

AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
BF16 = kv_format("auto", "bfloat16")


def model_of(folder: Path, name: str, **more: Any) -> ModelConfig:
    return load_model_config(write_config(folder, name, **more))


@pytest.mark.parametrize(
    ("name", "degree", "more"),
    [("Llama-3-70B", 4, {}), ("Phi-4", 2, {}), ("Llama-3-70B", 8, AWQ), ("Gemma-2-9B", 2, {})],
)
def test_a_part_holds_its_pieces(name: str, degree: int, more: dict[str, Any], tmp_path: Path) -> None:
    """The linear layers of all parts together are those of the model, to a byte, where no head is held twice."""
    model = model_of(tmp_path, name, **more)
    method = None if model.quantized is None else model.quantized.method
    part = ModelCut(model, method, degree).part()
    cut = {stored.shape.names: legal_cuts(stored, degree)[0].stored for stored in model.stored_linears(method)}
    for stored in part.stored_linears(method):
        piece = cut[stored.shape.names]
        sizes = (stored.shape.out_features, stored.shape.in_features)
        assert sizes == (piece.shape.out_features, piece.shape.in_features)
    whole, one = (each.weight_bytes_by_kind("bfloat16", method, is_packed=False) for each in (model, part))
    assert degree * one.blocks == whole.blocks
    assert degree * one.output == whole.output
    assert degree * part.kv_bytes_per_token(BF16) == model.kv_bytes_per_token(BF16)
    assert part.hidden_size == model.hidden_size


def test_few_heads_are_held_several_times(tmp_path: Path) -> None:
    """8 heads of keys and values on 16 devices: one on each."""
    model = model_of(tmp_path, "Llama-3-70B")
    part = ModelCut(model, None, 16).part()
    assert part.kv_bytes_per_token(BF16) == model.kv_bytes_per_token(BF16) // 8
    assert 16 * part.weight_bytes("bfloat16") > model.weight_bytes("bfloat16")


@pytest.mark.parametrize(
    ("name", "more", "method", "legal"),
    [
        ("Llama-3-70B", {}, None, [1, 2, 4, 8, 16]),
        ("Llama-3.1-405B", {}, None, [1, 2, 4, 8, 16]),
        ("SmolLM2-135M", {}, None, [1, 3]),
        ("Phi-4", {}, None, [1, 2]),  # 10 heads of keys and values, but 100,352 tokens are no multiple of 5
        ("Qwen2.5-7B", {}, None, [1, 2, 4]),
        ("Llama-3-70B", AWQ, "awq", [1, 2, 4, 8, 16]),
        ("Qwen2.5-72B", {"intermediate_size": 29568} | AWQ, "awq", [1]),  # 231 groups of 128 columns
    ],
)
def test_legal_degrees(name: str, more: dict[str, Any], method: str | None, legal: list[int], tmp_path: Path) -> None:
    """Heads, groups and words must stay whole."""
    assert legal_degrees(model_of(tmp_path, name, **more), method, 16) == legal


@pytest.mark.parametrize(
    ("degree", "num_devices", "words"),
    [
        (3, 3, "cannot be cut in 3"),
        (4, 6, "6 devices do not make whole copies"),
        (0, 2, "at least one device"),
        (-1, 2, "at least one device"),
    ],
)
def test_a_wrong_degree_is_refused_with_the_valid_ones(
    degree: int, num_devices: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_degree(model_of(tmp_path, "Llama-3-70B"), None, degree, num_devices)
    valid = ", ".join(str(each) for each in (1, 2, 4, 8, 16, 32, 64) if num_devices % each == 0)
    assert f"one of {valid} with {num_devices} devices; the model allows 1, 2, 4, 8, 16, 32, 64" in error.value.message


def test_what_transformers_runs_is_not_cut(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Llama-3.2-1B", architectures=["OtherForCausalLM"], model_type="other")
    model = load_model_config(folder, any_architecture=True)
    assert legal_degrees(model, None, 8) == [1]
