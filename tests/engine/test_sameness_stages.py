"""Stages of a pipeline, and ranks that share a stage, give the tokens and logprobs of one process, to the bit.

Ranks are threads here; tests/engine/test_rank_processes.py has processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import ConfigError
from quire.grammar.matchers import RowGrammar
from quire.grammar.text import grammar_text
from quire.kernels import cpu
from quire.messages import AddRequest, UseTokenizer
from quire.model_config import load_model_config
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.speculative_config import SpeculativeConfig
from tests.engine.harness import EOS, Prompt, run
from tests.engine.ranks import fail_at, started
from tests.engine.test_kv_groups import CONFIG as WINDOWS
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_latent import CONFIG as LATENT
from tests.engine.test_sameness_ranks import CHECKPOINTS, FORMS, Answer, answers, expected
from tests.engine.test_sameness_ranks_drafters import of_one, speculation
from tests.examples import IS_FULL
from tests.models.test_families import CASES
from tests.models.tiny_models import SIZES

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

NUM_LAYERS = load_model_config(quire.demo.path("target")).num_layers
GRIDS = [(1, 2), (1, 3), (2, 2)]  # ranks of a stage, stages
KEYS = {"the_first_of_the_keys": {"const": "a text that is known"}, "ключ": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
GRAMMAR = grammar_text(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))


def of_stages(width: int, num_stages: int, folder: Path | None = None, **arguments: Any) -> Answer:
    engine = started(width, folder, num_stages=num_stages, **arguments)
    try:
        return answers(engine.core)
    finally:
        engine.core.shutdown()


# What stages pass on does not depend on the form of the weights.
@pytest.mark.parametrize(
    ("form", "width", "num_stages"),
    [
        *(("bfloat16", *grid) for grid in GRIDS),
        *(pytest.param("int4", *grid, marks=pytest.mark.slow) for grid in GRIDS[:-1]),
        ("int4", *GRIDS[-1]),
    ],
)
def test_chunks_and_logprobs(form: str, width: int, num_stages: int) -> None:
    """Chunks of one prompt follow each other through the stages."""
    found = of_stages(width, num_stages, max_num_batched_tokens=17, **FORMS[form])
    assert found == expected(form, cpu.isa())


@pytest.mark.parametrize("name", ["Q4_K", "GPTQ with act-order"])
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    """Tensors of other stages are not read."""
    folder = CHECKPOINTS[name](tmp_path)
    assert of_stages(1, 2, folder) == of_stages(1, 1, folder)


def layers_of(engine: StartedEngine) -> list[int]:
    return [len(worker.model.config.layers) for worker in engine.executor.workers]  # type: ignore[attr-defined]


def test_hits_and_preemption() -> None:
    engine = started(1, num_stages=2)
    assert sum(layers_of(engine)) == NUM_LAYERS

    def preempt(core: EngineCore, step: int) -> None:
        while step == 9 and core.scheduler.num_running:
            core.scheduler.preempt_last()

    assert run(engine.core, brief(), before_step=preempt) == of_one()
    assert run(engine.core, brief()[::-1], prefix="again") == of_one()[::-1]
    engine.core.shutdown()


def test_too_few_blocks_for_all() -> None:
    engine = started(1, num_stages=3, num_gpu_blocks_override=6, max_model_len=96)
    assert run(engine.core, brief()) == of_one()
    engine.core.shutdown()


def test_drafts_of_text() -> None:
    """Drafts that hold come back to all stages: the tokens behind them depend on it."""
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, adaptive=False)
    repeated = [Prompt(prompt.token_ids * 3, prompt.params) for prompt in brief()]
    # An answer that repeats its beginning, until its last tokens: drafts hold, and then other tokens come.
    few = SamplingParams(temperature=0.0, max_tokens=24, allowed_token_ids=[5, 7], frequency_penalty=2.0)
    repeated.append(Prompt((5, 7) * 6, few))
    wanted = run(started(1).core, repeated)
    for width in (1, 2):
        engine, held = started(width, num_stages=2, speculative_config=ngram), list[int]()

        def note(core: EngineCore, step: int, held: list[int] = held) -> None:
            held.append(0 if core.last_record is None else core.last_record.num_accepted_tokens)

        assert run(engine.core, repeated, before_step=note) == wanted
        assert sum(held) > 8
        engine.core.shutdown()


def _config(family: str, **changes: Any) -> dict[str, Any]:
    import transformers

    sizes = SIZES | {"vocab_size": 5000, "num_hidden_layers": 5} | changes
    config: dict[str, Any] = transformers.AutoConfig.for_model(family, **sizes).to_dict()
    config["architectures"] = [f"{family.title().replace('_', '')}ForCausalLM"]
    return config


FAMILIES = {
    "windows in several block tables": lambda: WINDOWS | {"num_hidden_layers": 7, "vocab_size": 5000},
    "dense layers, then experts; latent attention": lambda: (
        LATENT
        | {"num_hidden_layers": 5, "vocab_size": 5000, "first_k_dense_replace": 2, "n_routed_experts": 8}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    ),
    "norms behind layers": lambda: _config("olmo2"),
    "experts, and layer norms with biases": lambda: _config(
        "phimoe", **CASES["phimoe"].settings | {"num_hidden_layers": 3}
    ),
    "a factor on embeddings": lambda: _config("granite", embedding_multiplier=3.0, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """In two stages or in three, in turn."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]()))
    limits = {"load_format": "dummy", "max_model_len": 128, "max_num_batched_tokens": 17}
    limits["num_gpu_blocks_override"] = 400
    one = of_stages(1, 1, tmp_path, **limits)
    assert len({tuple(tokens) for tokens, _ in one}) > 1
    for num_stages in (2, 3) if IS_FULL else (2 + [*FAMILIES].index(name) % 2,):
        assert of_stages(1, num_stages, tmp_path, **limits) == one, num_stages


def test_a_step_that_cannot_be_sampled_is_void_in_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(1, num_stages=2)
    runner = engine.executor.workers[0].runner  # type: ignore[attr-defined]
    calls = fail_at(monkeypatch, runner.sampler, "choose", 3, OSError("no numbers today"))
    assert run(engine.core, brief()) == of_one()
    assert len(calls) > 3
    engine.core.shutdown()


def test_a_stage_holds_its_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings are in the first stage, the output in the last one, tied ones in both. Pages have its layers only."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", f"1,1,{NUM_LAYERS - 2}")
    engine, one = started(1, num_stages=3), started(1)
    last, middle, first = (worker for worker in engine.executor.workers)  # type: ignore[attr-defined]
    (whole,) = one.executor.workers  # type: ignore[attr-defined]
    assert layers_of(engine) == [whole.model.config.num_layers - 2, 1, 1]
    tied = "model.embed_tokens.weight"
    assert [tied in worker.model.expected_weights() for worker in (first, middle, last)] == [True, False, True]
    assert first.cache.num_bytes == middle.cache.num_bytes
    assert first.cache.num_bytes + middle.cache.num_bytes + last.cache.num_bytes == whole.cache.num_bytes
    assert middle.model.weight_bytes() < first.model.weight_bytes() < whole.model.weight_bytes()
    for worker in (first, middle, last):
        config = worker.model.config
        assert worker.model.weight_bytes() == config.weight_bytes("bfloat16", is_packed=True)
    engine.core.shutdown()


def test_what_cannot_be_cut_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"it has {NUM_LAYERS} layers") as error:
        started(1, num_stages=NUM_LAYERS + 1, load_format="safetensors")
    assert f"1 to {NUM_LAYERS}" in error.value.message
    for arguments, words in (
        ({"distributed_executor_backend": "uni"}, "uni"),
        ({"pipeline_parallel_size": 65}, "1 to 64"),
        ({"model_impl": "transformers"}, "modelling code"),
    ):
        with pytest.raises(ConfigError, match=words):
            started(1, num_stages=2, **arguments)
    for partition in ("1,1", f"0,{NUM_LAYERS}", f"{NUM_LAYERS}"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        with pytest.raises(ConfigError, match="2 positive numbers that add up to"):
            started(1, num_stages=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "some")
    with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION"):
        started(1, num_stages=2)


def constrained(width: int, num_stages: int = 1, **arguments: Any) -> tuple[list[list[int]], int]:
    """Tokens of three requests, two of them with a grammar, and the number of answers that gave them."""
    engine = started(width, num_stages=num_stages, **arguments)
    core = engine.core
    tokenizer = (quire.demo.path("target") / "tokenizer.json").read_text()
    try:
        core.use_tokenizer(UseTokenizer(tokenizer, [EOS]))
        found: dict[str, list[int]] = {}
        for index, grammar in enumerate((GRAMMAR, GRAMMAR, None)):
            params = SamplingParams(temperature=1.0, seed=index, grammar=grammar, presence_penalty=0.5)
            core.add(AddRequest(f"r{index}", [5, 6, 7 + index], params, 40, stop_token_ids=[EOS]))
            found[f"r{index}"] = []
        num_answers = 0
        while core.has_work():
            for delta in core.step():
                assert delta.error is None, delta.error
                found[delta.request_id] += delta.token_ids
                num_answers += bool(delta.token_ids)
        return list(found.values()), num_answers
    finally:
        core.shutdown()


FORCING: list[dict[str, Any]] = [
    {"width": 1},
    {"width": 2},
    {"width": 1, "num_stages": 2},
    {"width": 2, "async_scheduling": True},
    {"width": 2, "async_scheduling": True, "enable_batch_sharded_sampling": True},
]
# A draft model drafts by the code of a head.
DRAFTING: list[dict[str, Any]] = [
    speculation("ngram", None),
    {"drafter_folder": quire.demo.path("eagle3")} | speculation("eagle3", quire.demo.path("eagle3")),
]
if IS_FULL:
    DRAFTING.append({"drafter_folder": quire.demo.path("draft")} | speculation("draft_model", quire.demo.path("draft")))


def test_tokens_that_a_grammar_forces_take_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that samples takes them; the others are told with the row's next step."""
    jumped = [constrained(**how) for how in FORCING]
    drafted = [constrained(**{"width": 2} | how) for how in DRAFTING]
    drafted += [constrained(1, 2, **how) for how in DRAFTING]
    monkeypatch.setattr(RowGrammar, "forced_token", lambda grammar: None)
    tokens, num_answers = constrained(1)
    assert [found for found, _ in (*jumped, *drafted)] == [tokens] * (len(FORCING) + 2 * len(DRAFTING))
    assert num_answers == sum(map(len, tokens))
    assert {count for _, count in jumped} == {jumped[0][1]}
    assert jumped[0][1] < num_answers - 10
    stepped = [constrained(**{"width": 2} | how) for how in DRAFTING]
    assert all(count < slow - 5 for (_, count), (_, slow) in zip(drafted, stepped, strict=False))
