"""Ranks share models that run through transformers' modelling code: tokens and logprobs of one rank, to the bit.

Ranks are threads here, and processes in one test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.messages import AddRequest, RequestDelta
from quire.models.transformers_backend import TransformersModel
from quire.sampling import following
from quire.sampling.following import SharedSampler
from quire.sampling_params import SamplingParams
from quire.speculative_config import SpeculativeConfig
from tests.engine.harness import EOS, Prompt, run, tokens_and_logprobs
from tests.engine.ranks import fail_at, started
from tests.engine.test_rank_processes import in_processes
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.models.test_transformers_backend import checkpoint

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

# A panel of 64 outputs for each of four ranks in all linear layers but those of few KV heads, which all ranks hold.
COMMON: dict[str, Any] = {
    "vocab_size": 5000,  # the prompts' tokens
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GQA = {**COMMON, "num_key_value_heads": 2}
GPT2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 5000, "eos_token_id": None}
EXPERTS = {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
# By what makes each different: q, k and v in one layer, head by head; outputs that are columns of the file, learned
# positions, embeddings that are the output too; norms of heads; a window; factors of logits; all heads of q and one of
# k and v; an activation of its own; experts in one tensor.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", COMMON),
    "gpt2": ("GPT2", GPT2),
    "stablelm": ("StableLm", {**GQA, "use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": 20}),
    "cohere": ("Cohere", {**GQA, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCode", {**GPT2, "n_inner": 512}),
    "llama-relu2": ("Llama", {**GQA, "hidden_act": "relu2"}),
}
# Families that our own code could run.
NATIVE = {"qwen3": ("Qwen3", {**GQA, "head_dim": 64}), "qwen3_moe": ("Qwen3Moe", EXPERTS)}
FORCED: dict[str, Any] = {"model_impl": "transformers"}
LIMITS: dict[str, Any] = {"max_model_len": 128}
FORMS = ("float32", "bfloat16")
CASES = [
    pytest.param(name, form, num_ranks, marks=() if (at + num_ranks + form_at) % 6 == 0 else pytest.mark.slow)
    for at, name in enumerate([*ARCHITECTURES, "qwen3"])
    for form_at, form in enumerate(FORMS)
    for num_ranks in (2, 3, 4)
]


def settings_of(name: str) -> dict[str, Any]:
    return LIMITS | (FORCED if name in NATIVE else {})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        checkpoint(folder, *(ARCHITECTURES | NATIVE)[name])
        return folder

    return cache(write)


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str, str], Answer]:
    """Of one rank."""
    return cache(lambda name, form: of_ranks(1, folder_of(name), dtype=form, **settings_of(name)))


def models_of(engine: StartedEngine) -> list[TransformersModel]:
    models = [worker.model for worker in engine.executor.workers]  # type: ignore[attr-defined]
    assert all(isinstance(model, TransformersModel) for model in models)
    return models


@pytest.mark.parametrize(("name", "form", "num_ranks"), CASES)
def test_architectures(
    name: str, form: str, num_ranks: int, folder_of: Callable[[str], Path], expected: Callable[[str, str], Answer]
) -> None:
    """With chunks of prompts and two batches in flight; then again, with prefixes from the cache."""
    schedule = {"max_num_batched_tokens": 17, "async_scheduling": True}
    engine = started(num_ranks, folder_of(name), dtype=form, **schedule, **settings_of(name))
    one = expected(name, form)
    try:
        models_of(engine)
        assert len({tuple(tokens) for tokens, _ in one}) > 2
        assert answers(engine.core) == one
        hits: list[int] = []
        prompts = [Prompt(prompt.token_ids, SamplingParams(temperature=0.0, max_tokens=4)) for prompt in brief()]

        def note(core: EngineCore, step: int) -> None:
            hits.append(0 if core.last_record is None else core.last_record.prefix_cache_hits)

        first, again = (run(engine.core, prompts, prefix=prefix, before_step=note) for prefix in ("first", "again"))
        assert first == again
        assert sum(hits) >= 32, "no prefix came from the cache"
    finally:
        engine.core.shutdown()


def test_experts_in_the_same_steps(folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    """torch multiplies by experts: exact only in the same steps. Each rank has all of them."""
    caplog.set_level(logging.INFO, "quire")
    one, two = (of_ranks(num_ranks, folder_of("qwen3_moe"), **settings_of("qwen3_moe")) for num_ranks in (1, 2))
    assert len({tuple(tokens) for tokens, _ in one}) > 2
    assert one == two
    assert "ranks share 10 layers; each rank holds " in caplog.text
    assert " MiB that is not shared: Qwen3MoeExperts " in caplog.text


@pytest.mark.parametrize("name", ["llama-relu2", "gpt_neox"])
def test_ranks_divide_weights_and_cache(name: str, folder_of: Callable[[str], Path]) -> None:
    """Norms, biases and few heads of k and v are whole on each rank."""
    held = []
    for num_ranks in (1, 2):
        engine = started(num_ranks, folder_of(name), dtype="bfloat16", **LIMITS)
        caches = [worker.cache.num_bytes for worker in engine.executor.workers]  # type: ignore[attr-defined]
        held.append(([model.weight_bytes() for model in models_of(engine)], caches))
        for model in models_of(engine):
            planned = model.config.weight_bytes("bfloat16")
            assert 0.8 * planned < model.weight_bytes() < 1.2 * planned
        engine.core.shutdown()
    ((whole,), (whole_cache,)), (parts, caches) = held
    assert sum(caches) == whole_cache
    assert whole <= sum(parts) < 1.01 * whole
    assert max(parts) < 0.52 * whole


def test_ranks_divide_the_kv_cache(folder_of: Callable[[str], Path], expected: Callable[[str, str], Answer]) -> None:
    """Four ranks with two heads of k and v: neighbours hold the same one, and each has one of two blocks."""
    engine = started(4, folder_of("llama-relu2"), dtype="float32", decode_context_parallel_size=2, **LIMITS)
    assert answers(engine.core) == expected("llama-relu2", "float32")
    engine.core.shutdown()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_sampling(is_sharded: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank samples some rows, or the first one all; with drafts. All ranks get all logits in any case.

    So ranks do not also exchange the highest logits of greedy rows.
    """
    monkeypatch.setattr(following, "FEWEST_OF_PARTS", 1)
    calls = fail_at(monkeypatch, SharedSampler, "_launch_greedy", 0, AssertionError("logits are joined already"))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [Prompt(prompt.token_ids[:20] * 2, params) for prompt in brief()[:4]]
    asked = LIMITS | {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)}
    one = started(1, folder_of("gpt2"), **asked)
    engine = started(3, folder_of("gpt2"), enable_batch_sharded_sampling=is_sharded, **asked)
    for each in (prompts, list(brief())):
        assert run(engine.core, each) == run(one.core, each)
    assert calls == []
    engine.core.shutdown()


def test_torch_shares_large_steps_among_threads(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32,768 elements and more. With as many threads of each rank, the same elements are computed together."""
    asked = LIMITS | {"max_num_batched_tokens": 512, "dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    prompts = [[(7 * index + 13 * at) % 5000 for at in range(100)] for index in range(4)]
    found, sizes = [], []
    for num_ranks, num_threads in ((1, 3), (2, 3), (2, 1)):
        engine = started(num_ranks, folder_of("stablelm"), num_threads=num_threads, **asked)
        for index, token_ids in enumerate(prompts):
            engine.core.add(AddRequest(f"r{index}", token_ids, params, 8, stop_token_ids=[EOS]))
        step = engine.core.step

        def noted(core: EngineCore = engine.core, step: Callable[[], list[RequestDelta]] = step) -> list[RequestDelta]:
            deltas = step()
            sizes.append(0 if core.last_record is None else core.last_record.num_prefill_tokens)
            return deltas

        monkeypatch.setattr(engine.core, "step", noted)
        found.append(list(tokens_and_logprobs(engine.core).values()))
        engine.core.shutdown()
    assert sizes.count(400) == 3, "all prompts are in one step: 204,800 elements"
    assert found[0] == found[1]
    assert [tokens for tokens, _ in found[2]] == [tokens for tokens, _ in found[0]], "other threads round alike"


def test_processes(folder_of: Callable[[str], Path]) -> None:
    """Two of one thread, which load one after the other, give the tokens of one process with two threads."""
    one = started(1, folder_of("stablelm"), num_threads=2, **LIMITS)
    wanted = run(one.core, brief())
    engine = in_processes(folder_of("stablelm"), tensor_parallel_size=2, max_parallel_loading_workers=1, **LIMITS)
    try:
        assert run(engine.core, brief()) == wanted
    finally:
        engine.core.shutdown()


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("gpt_neox", {"tensor_parallel_size": 5}, "it has 4 heads.*one of 1, 2, 3, 4"),
        ("gpt_neox", {"pipeline_parallel_size": 2}, "into 2 stages: transformers' modelling code"),
        ("qwen3_moe", {"enable_expert_parallel": True}, "each rank has all of its experts"),
        ("llama-relu2", {"decode_context_parallel_size": 2}, "ranks hold different heads of k and v"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_weights_are_read(
    name: str, asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, *(ARCHITECTURES | NATIVE)[name])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=words):
        started(2, tmp_path, **settings_of(name), **asked)
