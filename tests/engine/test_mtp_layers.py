"""Layers for multi-token prediction of DeepSeek-V3 and GLM-4.5 draft what transformers' modules draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.entry.launch import find_model
from quire.errors import QuireError
from quire.kernels import cpu
from quire.model_config import load_head_config, load_model_config
from quire.planning.memory_plan import planned_weight_bytes
from tests.engine import mtp_layers
from tests.engine.harness import run
from tests.engine.mtp_layers import LAYER
from tests.engine.ranks import started
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks_drafters import drafted, speculation
from tests.engine.test_sameness_stages_drafters import noting
from tests.engine.test_start_with_head import config_with

LIMITS: dict[str, Any] = {"max_model_len": 128, "dtype": "float32"}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("chunk", [17, 64])
def test_drafts_are_those_of_the_twin(family: str, chunk: int, tmp_path: Path) -> None:
    """The layer has experts, and attention of both kinds. With small pieces it reads prompts that nobody drafts for."""
    twin = mtp_layers.write(family, tmp_path)
    given = speculation("mtp", None, draft_sample_method="greedy")
    plain = started(1, tmp_path, **LIMITS)
    engine = started(1, tmp_path, tmp_path, **given, **LIMITS | {"max_num_batched_tokens": chunk})
    drafts = noting(engine)
    assert run(engine.core, brief()) == run(plain.core, brief())
    assert len(drafts) > 20
    assert len({token_id for found in drafts.values() for token_id in found}) > 20
    for number, (token_ids, found) in enumerate(drafts.items()):
        count = len(found) if number % 4 == 0 else 1
        assert tuple(found[:count]) == twin.drafts(token_ids, count), (number, len(token_ids))
    (worker,) = engine.executor.workers  # type: ignore[attr-defined]
    planned = planned_weight_bytes(engine.resolved, worker._model_config)
    assert planned == worker.model.weight_bytes() + worker.drafter.weight_bytes()
    assert worker.cache.num_bytes == engine.resolved.memory.kv_cache_bytes


@pytest.mark.skipif(not cpu.available(), reason="quantized weights and ranks need the compiled kernels")
@pytest.mark.parametrize(
    "more", [{"quantization": "int4"}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}]
)
def test_other_forms(more: dict[str, Any], tmp_path: Path) -> None:
    """Brought to int4 on load; and on two ranks, each with all of the layer."""
    mtp_layers.write("deepseek_v3", tmp_path)
    limits = {"max_model_len": 128, "dtype": "bfloat16"} | more
    width = limits.pop("tensor_parallel_size", 1)
    engine = started(width, tmp_path, tmp_path, **speculation("mtp", None), **limits)
    plain = started(1, tmp_path, **limits | {"enable_expert_parallel": False})
    tokens, num_drafts, _ = drafted(engine)
    assert tokens == run(plain.core, brief())
    assert num_drafts > 20
    engine.core.shutdown()


def test_what_is_not_there(tmp_path: Path) -> None:
    mtp_layers.write("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuireError, match=rf"lacks the layer for multi-token prediction.*no tensor of {LAYER}"):
        find_model(config_with("mtp", None, tmp_path), None, weights=False)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuireError, match="model_type = glm4_moe, num_nextn_predict_layers = 0"):
        find_model(config_with("mtp", None, tmp_path), None, weights=False)


@pytest.mark.parametrize(
    ("names", "is_float"), [((), True), (("weight",), True), (("weight", "weight_scale_inv"), False)]
)
def test_a_quantized_checkpoint_may_leave_the_join_as_it_is(
    names: tuple[str, ...], is_float: bool, tmp_path: Path
) -> None:
    """DeepSeek-V3's own checkpoint quantizes everything else of the layer, and its config does not say so."""
    mtp_layers.write("deepseek_v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    target = load_model_config(tmp_path)
    head = load_head_config(tmp_path, "mtp", target, [f"{LAYER}eh_proj.{name}" for name in names])
    assert head.head is not None
    assert head.quantized is not None
    (stored,) = head.stored(head.head.input)
    assert (stored.source is None) == is_float
    (output,) = head.stored(head.layers[0].attention.output)  # type: ignore[union-attr]
    assert output.source is not None
