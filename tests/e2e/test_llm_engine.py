"""LLMEngine: requests that come and go between its steps, alone and beside requests of the LLM around it."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, LLMEngine, RequestOutput, SamplingParams
from quire.errors import ConfigError, InvalidRequestError, UnsupportedFieldError
from quire.sampling_params import RequestOutputKind
from tests.e2e import reference

QUESTIONS = reference.prompts()[:2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    return llm.llm_engine


def _run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step to the end -> the outputs of every request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_tokens_are_those_of_an_llm(engine: LLMEngine) -> None:
    assert engine.add_request("a", QUESTIONS[0], GREEDY) == "a"
    engine.step()
    engine.add_request("b", QUESTIONS[1], GREEDY)
    assert engine.get_num_unfinished_requests() == 2
    outputs = _run(engine)
    for name, question in zip("ab", QUESTIONS, strict=True):
        assert outputs[name][-1].outputs[0].token_ids == reference.greedy(question, 12)
        assert [output.finished for output in outputs[name]] == [False] * (len(outputs[name]) - 1) + [True]
    assert engine.step() == []


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_output_kinds(engine: LLMEngine, kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, output_kind=kind)
    engine.add_request("a", QUESTIONS[0], params)
    counts = [len(output.outputs[0].token_ids) for output in _run(engine)["a"]]
    expected = {
        RequestOutputKind.CUMULATIVE: [1, 2, 3, 4, 5],
        RequestOutputKind.DELTA: [1] * 5,
        RequestOutputKind.FINAL_ONLY: [5],
    }
    assert counts == expected[kind]


def test_an_aborted_request_gives_no_further_output(engine: LLMEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, QUESTIONS[0], ENDLESS)
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("b")
    assert {output.request_id for output in engine.step()} == {"c"}
    engine.abort_request("c")
    assert not engine.has_unfinished_requests()


def test_an_id_in_use_is_refused_and_its_request_goes_on(engine: LLMEngine) -> None:
    engine.add_request("a", QUESTIONS[0], GREEDY)
    with pytest.raises(InvalidRequestError, match="id is in use"):
        engine.add_request("a", QUESTIONS[1], GREEDY)
    assert _run(engine)["a"][-1].outputs[0].token_ids == reference.greedy(QUESTIONS[0], 12)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("tokenization_kwargs", {"truncation": True}), ("arrival_time", 1.0)],
)
def test_unsupported_arguments_are_refused(engine: LLMEngine, argument: str, value: Any) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        engine.add_request("a", QUESTIONS[0], GREEDY, **{argument: value})
    assert caught.value.param == argument
    assert not engine.has_unfinished_requests()


def test_requests_end_while_the_llm_waits_for_its_own(llm: LLM, engine: LLMEngine) -> None:
    engine.add_request("mine", QUESTIONS[0], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    (output,) = llm.generate(QUESTIONS[1], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(QUESTIONS[1], 12)
    (mine,) = engine.step()
    assert (mine.request_id, mine.finished, len(mine.outputs[0].token_ids)) == ("mine", True, 2)


def test_deltas_wait_while_the_llm_waits_for_its_own(llm: LLM, engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("mine", QUESTIONS[0], params)
    llm.generate(QUESTIONS[1], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    deltas = [token_id for output in _run(engine)["mine"] for token_id in output.outputs[0].token_ids]
    assert deltas == reference.greedy(QUESTIONS[0], 9)


def test_an_llm_finds_its_queued_requests_after_the_engine_was_stepped(llm: LLM, engine: LLMEngine) -> None:
    llm.enqueue(QUESTIONS[0], GREEDY)
    engine.add_request("mine", QUESTIONS[1], GREEDY)
    assert set(_run(engine)) == {"mine"}
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(QUESTIONS[0], 12)


def test_prompt_logprobs_come_as_a_list_at_the_end(engine: LLMEngine) -> None:
    engine.add_request("a", QUESTIONS[0], SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1))
    last = _run(engine)["a"][-1]
    assert isinstance(last.prompt_logprobs, list)
    assert len(last.prompt_logprobs) == len(last.prompt_token_ids)


def test_no_metrics_without_log_stats(engine: LLMEngine) -> None:
    with pytest.raises(ConfigError, match="disable_log_stats"):
        engine.get_metrics()
