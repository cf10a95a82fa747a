"""The layers of pipeline stages: no other cut has a smaller largest share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.model_config import ModelConfig, load_model_config
from quire.planning.cut_stages import part_of_rank, stage_layers
from tests.planning.test_cut_model import EXPERTS
from tests.real_models import write_config

NUM_LAYERS = 9


def sizes_of(model: ModelConfig, num_stages: int) -> list[int]:
    return [len(layers) for layers in stage_layers(model, EngineConfig(pipeline_parallel_size=num_stages))]


def largest_share(model: ModelConfig, num_stages: int) -> float:
    """Of a stage: its part of all bytes, or of all bytes that a token reads: layers, and on the last one the output."""
    config, held, read = EngineConfig(pipeline_parallel_size=num_stages), [], []
    for rank in range(num_stages):
        sizes = part_of_rank(model, config, rank).weight_bytes_by_kind("bfloat16")
        held.append(sizes.blocks + sizes.output + sizes.embeddings)
        read.append(sizes.blocks + (sizes.output if rank == 0 else 0))  # rank 0 has the last stage
    return max(max(held) / sum(held), max(read) / sum(read))


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B", "Gemma-2-9B"])
def test_the_largest_share_is_as_small_as_it_can_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where embeddings and output are as large as several layers."""
    model = load_model_config(write_config(tmp_path, name, num_hidden_layers=NUM_LAYERS))
    chosen = {2: (sizes_of(model, 2), largest_share(model, 2)), 3: (sizes_of(model, 3), largest_share(model, 3))}
    others: dict[int, list[list[int]]] = {
        2: [[first, NUM_LAYERS - first] for first in range(1, NUM_LAYERS)],
        3: [[a, b, NUM_LAYERS - a - b] for a in range(1, NUM_LAYERS) for b in range(1, NUM_LAYERS - a)],
    }
    for num_stages, (sizes, share) in chosen.items():
        assert sizes in others[num_stages]
        for other in others[num_stages]:
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, other)))
            assert sizes_of(model, num_stages) == other, "the variable decides"
            assert share <= largest_share(model, num_stages) + 1e-9, (sizes, other)
        monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")


def test_layers_of_experts_hold_more_and_read_less(tmp_path: Path) -> None:
    """Six dense layers and six of experts. By bytes alone it would be 9 and 3, and by what a token reads 5 and 7."""
    sizes = {"num_hidden_layers": 12, "vocab_size": 1000, "mlp_only_layers": list(range(6))}
    model = load_model_config(write_config(tmp_path, "Qwen3-4B", **EXPERTS | sizes))
    assert sizes_of(model, 2) == [8, 4]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_drafter_counts_in_the_last_stage(is_shared: bool, tmp_path: Path) -> None:
    """It has the bytes of 8 of 12 layers. Each of two ranks holds a half of it, or all of it.

    With 7 and 5 layers, the larger share is 13 of 20 layers, or 21 of 28; with 8 and 4 it is 8 of 12, or 20 of 28.
    """
    sizes = {"num_hidden_layers": 12, "vocab_size": 1000}
    model = load_model_config(write_config(tmp_path, "Qwen3-4B", **sizes))
    drafter = replace(model, layers=model.layers[:8], is_shared=is_shared)
    config = EngineConfig(pipeline_parallel_size=2, tensor_parallel_size=2)
    plain, drafting = (stage_layers(each, config) for each in (model, replace(model, drafter=drafter)))
    assert [len(layers) for layers in plain] == [6, 6]
    assert [len(layers) for layers in drafting] == ([7, 5] if is_shared else [8, 4])
    parts = [part_of_rank(replace(model, drafter=drafter), config, rank) for rank in range(4)]
    assert [part.drafter is not None for part in parts] == [True, True, False, False]
