"""The counts of experts: against the routing itself, and through the engine to the metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from quire.worker.expert_use import ExpertCounter
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.test_families import CASES, random_hf_model

PROMPT = [5, 17, 23, 99, 101, 42, 7]
NUM_EXPERTS, NUM_ACTIVE = 5, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of three layers have experts."""
    folder = tmp_path_factory.mktemp("model")
    random_hf_model(CASES["qwen3_moe"]).save_pretrained(folder)
    return folder


def test_counts_are_those_of_the_routing(folder: Path) -> None:
    model = load_model(load_model_config(folder), torch.float32)
    assert isinstance(model, Decoder)
    watched = model.watch_experts()
    counter, run = ExpertCounter(watched), PagedRun(model, torch.float32)
    for chunk in (PROMPT[:6], PROMPT[6:]):
        run.step({0: chunk})
        use = counter.count()
        counts = torch.stack([begins for _, begins in watched]).diff().double()
        assert counts.shape == (2, NUM_EXPERTS)
        assert counts.sum(1).tolist() == [len(chunk) * NUM_ACTIVE] * 2
        assert use.distinct == (counts > 0).sum(1).double().mean()
        assert use.of_ranks == 1.0
        assert use.balancedness == pytest.approx((counts.mean(1) / counts.amax(1)).mean())
        assert sorted(use.tokens) in [sorted(row[row > 0].tolist()) for row in counts]
    assert use.tokens == [1] * NUM_ACTIVE
    assert use.distinct == NUM_ACTIVE


@pytest.mark.parametrize(
    ("experts", "tokens"),
    [
        ([0, 1, 2, 3, 4, 0], [5, 3, 1]),
        ([0, 1, 2, 3, 4, 2], [2, 6, 1]),  # moved since
    ],
)
def test_copies_of_an_expert_are_one(experts: list[int], tokens: list[int]) -> None:
    moe: Any = SimpleNamespace(placement=SimpleNamespace(firsts=(0, 3, 6), experts=((0, 1, 2), (3, 4, 0))))
    balancer: Any = SimpleNamespace(experts_at_places=lambda: [np.array(experts)], num_moved=1)
    begins = torch.tensor([0, 2, 2, 5, 5, 6, 9], dtype=torch.int32)
    use = ExpertCounter([(moe, begins)], None if tokens[0] == 5 else balancer).count()
    assert (use.distinct, use.tokens) == (3, tokens)
    assert use.balancedness == pytest.approx(9 / 5 / max(tokens))
    assert use.of_ranks == pytest.approx(4.5 / 5)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_metrics(is_asked_for: bool, folder: Path) -> None:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "num_threads": 1, "skip_tokenizer_init": True}
    llm = LLM(str(folder), dtype="float32", expert_metrics=is_asked_for, disable_log_stats=False, **options)
    llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    found = {metric.name: metric for metric in llm.get_metrics()}
    if not is_asked_for:
        assert not [name for name in found if "expert" in name]
        return
    steps = found["quire_distinct_experts"]
    assert steps.count == 6
    assert NUM_ACTIVE <= steps.sum / steps.count <= NUM_EXPERTS
    assert found["quire_expert_tokens"].sum == NUM_ACTIVE * (len(PROMPT) + 5)
    assert found["quire_expert_balancedness"].value == pytest.approx(NUM_ACTIVE / NUM_EXPERTS), "of a step of one token"
