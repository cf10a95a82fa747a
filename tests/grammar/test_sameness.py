"""Constraints with every way to draft, every form of weights, and adapters: the tokens equal plain steps' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, demo
from quire.lora.request import LoRARequest
from tests.covering import in_turn
from tests.engine.heads import write_mimo
from tests.gguf.writing import write_gguf
from tests.grammar.test_generate import DRAFT_MODEL, REQUESTS, SETTINGS, answers
from tests.quantization.checkpoints import write_quantized
from tests.quantization.test_checkpoints import FORMATS

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {**NGRAM, "method": "suffix"},
    "EAGLE-3": {"method": "eagle3", "model": str(demo.path("eagle3")), "num_speculative_tokens": 3, "adaptive": False},
    "MTP": {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False},
    "draft model": DRAFT_MODEL,
}


def num_drafts(engine: LLM) -> float:
    (metric,) = (metric for metric in engine.get_metrics() if metric.name == "vllm:spec_decode_num_draft_tokens")
    return metric.value


@pytest.fixture(scope="module")
def plainly() -> list[Any]:
    """By the demo model, without a drafter."""
    return answers(LLM(dtype="float32", **SETTINGS))


@pytest.mark.parametrize(
    ("drafter", "async_scheduling"), in_turn([[(drafter,)] for drafter in DRAFTERS], [True, False])
)
def test_drafters(drafter: str, async_scheduling: bool, tmp_path: Path, plainly: list[Any]) -> None:
    """Drafts follow the grammar, and its state advances with the accepted ones."""
    model = {"model": str(write_mimo(tmp_path))} if drafter == "MTP" else {}
    drafting = LLM(
        dtype="float32",
        **SETTINGS,
        **model,
        speculative_config=DRAFTERS[drafter],
        async_scheduling=async_scheduling,
        disable_log_stats=False,
    )
    expected = answers(LLM(dtype="float32", **SETTINGS, **model)) if model else plainly
    assert answers(drafting) == expected
    assert num_drafts(drafting) > 0


def written(name: str, folder: Path) -> str:
    """The demo model in a form of weights."""
    if name == "GGUF":
        write_gguf(folder / "demo.gguf", demo.path("target"), "Q4_K")
        return str(folder / "demo.gguf")
    write_quantized(demo.path("target"), folder, FORMATS[name])
    return str(folder)


SLOW_FORMS = {"awq", "w4a16"}  # groups of 4-bit codes, as GPTQ's are


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_FORMS else ())
        for name in ("awq", "gptq-order-zeros", "w4a16", "w8a8", "GGUF")
    ],
)
def test_forms_of_weights(name: str, tmp_path: Path) -> None:
    """Few rows, short steps and drafts give the tokens of one batch."""
    model = written(name, tmp_path)
    expected = answers(LLM(model=model, **SETTINGS))
    schedule = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "speculative_config": NGRAM}
    assert answers(LLM(model=model, **SETTINGS, **schedule)) == expected


def test_adapters_and_drafts() -> None:
    """Rows with and without an adapter, in one batch and one after the other."""
    prompts, params = (list(each) for each in zip(*REQUESTS, strict=True))
    adapter = LoRARequest("json", 1, str(demo.path("lora")))
    adapters = [adapter if index % 2 else None for index in range(len(prompts))]

    def run(**schedule: Any) -> list[Any]:
        engine = LLM(dtype="float32", enable_lora=True, max_lora_rank=8, **SETTINGS, **schedule)
        outputs = engine.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        return [[(list(c.token_ids), c.finish_reason, c.logprobs) for c in output.outputs] for output in outputs]

    expected = run()
    for schedule in ({"max_num_seqs": 2, "speculative_config": NGRAM}, {"speculative_config": DRAFTERS["EAGLE-3"]}):
        assert run(**schedule) == expected
