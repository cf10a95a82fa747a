"""LLM on the demo model against transformers: tokens, log probabilities, beams."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from tests.e2e import reference

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
# Largest difference of a log probability between our float32 kernels and transformers' (design: 1e-4 on logits).
LOGPROB_TOLERANCE = 1e-4
# bfloat16 keeps 8 bits: logits of about 20 are rounded by up to 0.06, several times on the way.
BFLOAT16_TOLERANCE = 0.25


def _expected(prompt: str) -> list[int]:
    assert GREEDY.max_tokens is not None
    return reference.greedy(prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("index", range(len(reference.prompts())))
def test_greedy_tokens_alone(llm: LLM, index: int) -> None:
    prompt = reference.prompts()[index]
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == _expected(prompt)


def test_greedy_tokens_in_a_batch(llm: LLM) -> None:
    outputs = llm.generate(list(reference.prompts()), GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [_expected(prompt) for prompt in reference.prompts()]
    reasons = {output.outputs[0].finish_reason for output in outputs}
    assert reasons == {"stop", "length"}, "the prompts do not show both ends"


def test_chat_is_generate_on_the_rendered_template(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": question}] for question in reference.QUESTIONS]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [_expected(text) for text in reference.chat_prompts()]


def test_bfloat16_tokens_are_the_best_within_rounding() -> None:
    """The checkpoint's own dtype: every token is the best one of float32, or as good within bfloat16's precision."""
    llm = LLM(kv_cache_memory_bytes=1 << 24, num_threads=1)
    assert llm.resolved.model.dtype == "bfloat16"
    for output in llm.generate(list(reference.prompts()), GREEDY, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        scores = reference.logprobs(output.prompt_token_ids + tokens)[len(output.prompt_token_ids) - 1 : -1]
        missing = scores.max(dim=-1).values - scores[torch.arange(len(tokens)), tokens]
        assert missing.max() < BFLOAT16_TOLERANCE, f"{output.prompt!r} at {missing.argmax()}"


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(reference.prompts()[0], params, use_tqdm=False)
    completion = output.outputs[0]
    expected = reference.logprobs(output.prompt_token_ids + completion.token_ids)
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None, "nothing predicts the first token"
    positions = output.prompt_logprobs[1:] + completion.logprobs
    tokens = output.prompt_token_ids[1:] + completion.token_ids
    num_prompt = len(output.prompt_token_ids) - 1
    for index, (position, token) in enumerate(zip(positions, tokens, strict=True)):
        assert position is not None
        num_top = 2 if index < num_prompt else 3
        assert next(iter(position)) == token, "the token itself comes first"
        best = expected[index].topk(num_top).indices.tolist()
        assert set(position) == {token, *best}, f"position {index}"
        for token_id, entry in position.items():
            assert entry.logprob == pytest.approx(expected[index, token_id].item(), abs=LOGPROB_TOLERANCE)
            assert entry.rank == (expected[index] > expected[index, token_id]).sum() + 1
            assert entry.decoded_token == reference.tokenizer().token_text(token_id)
    assert completion.cumulative_logprob == pytest.approx(
        sum(position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_beam_search(llm: LLM, width: int, length_penalty: float) -> None:
    prompts = [reference.prompts()[1], reference.TEXTS[0]]
    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=length_penalty)
    for prompt, result in zip(prompts, llm.beam_search(prompts, params), strict=True):
        ids = reference.tokenizer().encode(prompt)
        expected = reference.beam_search(ids, width, 6, length_penalty)
        assert [sequence.tokens for sequence in result.sequences] == expected
        for sequence in result.sequences:
            scores = reference.logprobs(sequence.tokens)
            total = sum(scores[at - 1, sequence.tokens[at]].item() for at in range(len(ids), len(sequence.tokens)))
            assert sequence.cum_logprob == pytest.approx(total, abs=10 * LOGPROB_TOLERANCE)
            taken = zip(sequence.tokens[len(ids) :], sequence.logprobs, strict=True)
            assert sequence.cum_logprob == pytest.approx(sum(position[token].logprob for token, position in taken))
            assert sequence.text == reference.tokenizer().decode(sequence.tokens)


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 4.0])
def test_beam_search_ranks_ends_and_cuts_together(llm: LLM, length_penalty: float) -> None:
    """Beams that end in EOS at different lengths, and beams cut by max_tokens."""
    question = min(reference.chat_prompts(), key=lambda text: len(reference.greedy(text, 100)))
    ids = reference.tokenizer().encode(question) + reference.greedy(question, 100)[:-3]
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=length_penalty)
    (result,) = llm.beam_search([{"prompt_token_ids": ids}], params)
    expected = reference.beam_search(ids, 3, 6, length_penalty)
    assert [sequence.tokens for sequence in result.sequences] == expected
    ends = [("stop", reference.EOS) if tokens[-1] == reference.EOS else ("length", None) for tokens in expected]
    assert [(sequence.finish_reason, sequence.stop_reason) for sequence in result.sequences] == ends
    assert ("stop", reference.EOS) in ends, "no beam ended"


def test_beam_search_in_turns(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    prompts = list(reference.TEXTS)
    assert llm.beam_search(prompts, params, concurrency_limit=1) == llm.beam_search(prompts, params)
