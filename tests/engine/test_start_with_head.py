"""A start with a head: it loads, plans and serves, and refuses heads that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import demo
from quire.config import EngineConfig
from quire.engine.start import start_engine
from quire.entry.launch import find_model, open_model
from quire.errors import ConfigError, QuireError
from quire.life_cycle import Worker
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.head import Head
from quire.planning.memory_plan import planned_weight_bytes
from quire.speculative_config import SpeculativeConfig
from quire.worker.head_drafter import HeadDrafter
from quire.worker.worker import DeviceWorker
from tests.engine import heads
from tests.engine.heads import EAGLE3, HIDDEN, MTP, SPECULATORS, TARGET, eagle3_tensors, load, mtp_tensors
from tests.engine.test_start_with_draft_model import drafted, ignore


def config_with(method: Any, head: Path | None, model: Path | None = None, **limits: Any) -> EngineConfig:
    speculation = SpeculativeConfig(
        method=method, model=None if head is None else str(head), num_speculative_tokens=4, adaptive=False
    )
    limits = {"max_num_seqs": 24, "max_num_batched_tokens": 96, "max_model_len": 256, "device": "cpu"} | limits
    return EngineConfig.from_kwargs(
        model=None if model is None else str(model), speculative_config=speculation, num_threads=1, **limits
    )


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
@pytest.mark.parametrize("method", ["eagle3", "speculators", "mtp"])
def test_the_plan_is_what_is_allocated_and_it_serves(method: str, quantization: Any, tmp_path: Path) -> None:
    if method == "mtp":
        target, head = heads.write_mimo(tmp_path), None
    elif method == "eagle3":
        target, head = demo.path("target"), heads.write(tmp_path, EAGLE3, eagle3_tensors())
    else:
        tensors = eagle3_tensors(prefix="layers.0.", is_whole=True)
        target, head = demo.path("target"), heads.write(tmp_path, SPECULATORS, tensors)
    workers: list[DeviceWorker] = []

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        workers.append(DeviceWorker(model_config, progress))
        return workers

    limits = {"num_gpu_blocks_override": 100, "quantization": quantization}
    config = config_with("mtp" if method == "mtp" else "eagle3", head, target, **limits)
    parts = open_model(config, ignore)
    plain_config = EngineConfig.from_kwargs(model=str(target), quantization=quantization)
    plain = start_engine(plain_config, target, is_server=True, progress=ignore)
    engine = start_engine(
        config,
        target,
        is_server=True,
        progress=ignore,
        make_workers=make,
        drafter_folder=parts.model_config.drafter_folder,
    )
    expected, none = drafted(plain.core)
    tokens, num_drafts = drafted(engine.core)
    assert tokens == expected
    assert none == 0 < num_drafts
    (worker,) = workers
    assert isinstance(worker.drafter, Head)
    drafter = worker.runner.drafting.drafter
    assert isinstance(drafter, HeadDrafter)
    assert drafter.forward_pass.captured is not None
    settings, memory = engine.resolved.settings, engine.resolved.memory
    assert worker.cache.num_bytes == memory.kv_cache_bytes
    assert settings["drafter_weight_bytes"].value == worker.drafter.weight_bytes()
    assert settings["drafter_hidden_bytes"].value == drafter.num_bytes
    own = worker.model.weight_bytes() + worker.drafter.weight_bytes()
    assert memory.weight_bytes == own == planned_weight_bytes(engine.resolved, parts.model_config)


def changed(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    found = tensors | {name.replace("__", "."): value for name, value in changes.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (EAGLE3 | {"vocab_size": 4100}, ["vocab_size = 4100", "4096, the model's vocab_size"]),
        (EAGLE3 | {"draft_vocab_size": 5000}, ["illegal draft_vocab_size", "5000", "4096"]),
        (
            EAGLE3 | {"hidden_size": 128},
            ["hidden_size = 128", "256, the model's hidden_size", "no embed_tokens.weight"],
        ),
        (EAGLE3 | {"target_hidden_size": 512}, ["target_hidden_size = 512", "256, the model's hidden_size"]),
        (
            EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}},
            ["layer 7 of eagle_aux_hidden_state_layer_ids = [2, 3, 7]", "0 to 6: the model has 6 layers"],
        ),
        (EAGLE3 | {"eagle_config": {"use_aux_hidden_state": False}}, ["illegal use_aux_hidden_state"]),
        (SPECULATORS | {"norm_before_residual": None}, ["lacks norm_before_residual"]),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(config: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    folder = heads.write(tmp_path, config, eagle3_tensors())
    with pytest.raises(QuireError) as caught:
        find_model(config_with("eagle3", folder), None, weights=False)
    for part in parts:
        assert part in str(caught.value)


D2T = eagle3_tensors()["d2t"]


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        (changed(eagle3_tensors(), midlayer__hidden_norm__weight=None), ["1 missing (", "hidden_norm.weight"]),
        (changed(eagle3_tensors(), d2t=None), ["1 missing (d2t)"]),
        (
            changed(eagle3_tensors(), fc__weight=torch.zeros(HIDDEN, 2 * HIDDEN)),
            ["fc.weight has shape [256, 512] instead of [256, 768]"],
        ),
        (changed(eagle3_tensors(), lm_head__weight=None), ["draft_vocab_size = 500", "no lm_head.weight"]),
        (
            changed(eagle3_tensors(), d2t=D2T.index_fill(0, torch.tensor([499]), 4000)),
            ["d2t", "entry 499 is token 4499, but the model has 4096 tokens"],
        ),
        (changed(eagle3_tensors(), fc_norm__weight=torch.ones(HIDDEN)), ["1 unexpected (fc_norm.weight)"]),
    ],
    ids=lambda each: None if isinstance(each, dict) else each[0],
)
def test_tensors_that_do_not_fit(tensors: dict[str, Tensor], parts: list[str], tmp_path: Path) -> None:
    heads.write(tmp_path, EAGLE3, tensors)
    with pytest.raises(QuireError) as caught:
        load(tmp_path, "eagle3")
    for part in parts:
        assert part in str(caught.value)


def test_layers_for_multi_token_prediction_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers = None") as caught:
        find_model(config_with("mtp", None), None, weights=True)
    assert "model_type = llama" in str(caught.value)
    without = heads.write_mimo(tmp_path / "a")
    config = {**TARGET, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    heads.write(without, config, changed(mtp_tensors(), **{MTP + "input_proj.weight": None}))
    with pytest.raises(QuireError, match=r"1 missing \(.*input_proj.weight"):
        load(without, "mtp", target=None)


def test_dummy_weights(tmp_path: Path) -> None:
    folder = heads.write(tmp_path, EAGLE3, {})
    config = config_with("eagle3", folder, load_format="dummy", num_gpu_blocks_override=50)
    engine = start_engine(config, demo.path("target"), is_server=True, progress=ignore, drafter_folder=folder)
    assert drafted(engine.core)[1] > 0
