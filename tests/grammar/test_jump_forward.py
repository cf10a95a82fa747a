"""Tokens that a grammar forces have no steps of their own, however requests are served; no token changes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, demo
from quire.frontend.tokenizer import Tokenizer
from quire.grammar.matchers import RowGrammar
from quire.lora.request import LoRARequest
from quire.sampling_params import StructuredOutputsParams as Structured
from quire.scheduler.scheduler import Scheduler
from tests.covering import in_turn
from tests.engine.heads import write_mimo
from tests.examples import IS_FULL
from tests.grammar.test_generate import SETTINGS
from tests.grammar.test_sameness import DRAFTERS, NGRAM

TOKENIZER = Tokenizer.from_folder(demo.path("target"))
WITHIN = "a long text that is known"
KEYS = {"the_first_of_the_keys": {"const": WITHIN}, "ключ": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
STOP_ID = TOKENIZER.encode('{"the_first_of_the_keys": "a long text')[-1]

TRUE_ID = TOKENIZER.encode(": true")[-1]


def params(**given: Any) -> SamplingParams:
    constraint = Structured(json=SCHEMA, disable_any_whitespace=True)
    return SamplingParams(
        **{"temperature": 1.0, "seed": 3, "max_tokens": 100, "structured_outputs": constraint, **given}
    )


REQUESTS = {
    "greedy": params(temperature=0.0),
    "random": params(),
    "n": params(n=3, presence_penalty=1.0),
    "penalty": params(repetition_penalty=1.3, frequency_penalty=0.5),
    "logprobs": params(logprobs=2),
    "prompt logprobs": params(prompt_logprobs=1),
    "filters": params(min_tokens=3, bad_words=["a word"], logit_bias={TRUE_ID: -100.0}),
    "a word is forbidden within": params(bad_words=["known"]),
    "an end is forbidden within": params(stop_token_ids=[STOP_ID], min_tokens=60),
    "others are allowed within": params(allowed_token_ids=TOKENIZER.encode('{"the_first_of_the_keys": "a')),
    "ends within by length": params(max_tokens=9),
    "ends within by text": params(stop=["text"]),
    "ends within by token": params(stop_token_ids=[STOP_ID]),
    "spaces": params(structured_outputs=Structured(json=SCHEMA)),
    "free": params(structured_outputs=None, max_tokens=50),
}
DRAFTS = {"none": None, "ngram": NGRAM, **DRAFTERS}


def answers(engine: LLM, adapters: list[LoRARequest | None] | None = None) -> tuple[list[Any], int]:
    """The results of all requests, in one batch and then one after the other, and the number of steps."""
    scheduler, found = engine.llm_engine.core.scheduler, list[Any]()
    assert isinstance(scheduler, Scheduler)
    first = scheduler._next_step_id
    outputs = engine.generate(
        ["Answer:"] * len(REQUESTS), list(REQUESTS.values()), use_tqdm=False, lora_request=adapters
    )
    for name in ("random", "n", "ends within by length", "filters"):
        outputs += engine.generate("Answer:", REQUESTS[name], use_tqdm=False)
    for output in outputs:
        ends = [(o.text, o.token_ids, o.logprobs, o.finish_reason, o.stop_reason) for o in output.outputs]
        found.append((ends, output.prompt_logprobs, output.error))
    assert scheduler.kv.pool.num_used_blocks == 0
    return found, scheduler._next_step_id - first


def stepped(adapters: list[LoRARequest | None] | None = None, **arguments: Any) -> tuple[list[Any], int]:
    """The same with a step for each token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowGrammar, "forced_token", lambda self: None)
        return answers(LLM(**{"dtype": "float32", **SETTINGS, **arguments}), adapters)


@pytest.fixture(scope="module")
def plainly() -> tuple[list[Any], int]:
    """By the demo model, without a drafter, with a step for each token."""
    return stepped()


@pytest.mark.parametrize(("drafter", "async_scheduling"), in_turn([[(drafter,)] for drafter in DRAFTS], [False, True]))
def test_every_way_of_serving(
    drafter: str, async_scheduling: bool, tmp_path: Path, plainly: tuple[list[Any], int]
) -> None:
    model: dict[str, Any] = {"model": str(write_mimo(tmp_path))} if drafter == "MTP" else {}
    expected, num_slow_steps = stepped(**model) if model else plainly
    how = {**model, "async_scheduling": async_scheduling, "speculative_config": DRAFTS[drafter]}
    jumped, num_steps = answers(LLM(dtype="float32", **SETTINGS, **how))
    assert jumped == expected
    assert num_steps < num_slow_steps / 2
    ends = {name: [(o[0], *o[3:]) for o in found[0]] for name, found in zip(REQUESTS, jumped, strict=False)}
    assert {reason for _, reason, _ in ends["ends within by length"]} == {"length"}
    assert [each[1:] for each in ends["ends within by text"]] == [("stop", "text")]
    assert [each[1:] for each in ends["ends within by token"]] == [("stop", STOP_ID)]
    assert all(WITHIN in text and reason == "stop" for text, reason, _ in ends["n"])
    assert [(WITHIN in text, reason) for text, reason, _ in ends["filters"]] == [(True, "stop")]
    errors = {name: found[2] for name, found in zip(REQUESTS, jumped, strict=False) if found[2] is not None}
    assert list(errors) == [name for name in REQUESTS if name.endswith(("forbidden within", "allowed within"))]
    assert all("No token is left" in error for error in errors.values())


def test_a_filter_costs_no_steps() -> None:
    """As many as without one, where it forbids nothing of the span."""
    engine, counts = LLM(dtype="float32", **SETTINGS), []
    for request in (params(), params(bad_words=["a word"], logit_bias={STOP_ID: -5.0}, min_tokens=3)):
        first = engine.llm_engine.core.scheduler._next_step_id
        (output,) = engine.generate("Answer:", request, use_tqdm=False)
        assert WITHIN in output.outputs[0].text
        counts.append(engine.llm_engine.core.scheduler._next_step_id - first)
    assert counts[0] == counts[1] < len(output.outputs[0].token_ids) / 2


def test_adapters() -> None:
    """Rows with and without one, with async scheduling."""
    adapter = LoRARequest("json", 1, str(demo.path("lora")))
    of_requests = [adapter if index % 2 else None for index in range(len(REQUESTS))]
    how: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    expected, num_slow_steps = stepped(of_requests, **how)
    for drafter in ("none", "EAGLE-3", *(["draft model"] if IS_FULL else [])):
        drafting = {"speculative_config": DRAFTS[drafter], "async_scheduling": True}
        jumped, num_steps = answers(LLM(dtype="float32", **SETTINGS, **how, **drafting), of_requests)
        assert jumped == expected, drafter
        assert num_steps < num_slow_steps / 2, drafter


FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 192, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def with_few_blocks() -> list[Any]:
    return stepped(**FEW_BLOCKS)[0]


# A draft model drafts by the code of a head; test_every_way_of_serving has it.
@pytest.mark.parametrize(
    ("drafter", "async_scheduling"),
    [
        pytest.param(*case, marks=() if case in (("none", True), ("EAGLE-3", False)) else pytest.mark.slow)
        for case in product(("none", "EAGLE-3", "draft model"), (True, False))
    ],
)
def test_few_blocks_and_short_steps(drafter: str, async_scheduling: bool, with_few_blocks: list[Any]) -> None:
    """Requests are preempted, and a span is computed in several steps."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 12, "max_num_seqs": 4, "async_scheduling": async_scheduling}
    settings = SETTINGS | FEW_BLOCKS | limits
    assert answers(LLM(dtype="float32", **settings, speculative_config=DRAFTS[drafter]))[0] == with_few_blocks
