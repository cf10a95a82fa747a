"""Filters, penalties, errors and row bookkeeping, against the dense definition and transformers' processors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.sampling.batch_params import SamplingState
from quire.sampling.filters import apply_filters
from quire.sampling.penalties import RowPenalties, apply_penalties
from quire.sampling.sampler import LOGPROBS_MODES, LaunchedTokens, Sampler, highest_without_token
from quire.sampling_params import SamplingParams
from tests.examples import examples
from tests.sampling.dense import append_token, probabilities, processed_logits, state_of

V = 40
tokens = st.integers(0, V - 1)


def logits(num_rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits_1V: Tensor, params: SamplingParams, **token_ids: Any) -> set[int]:
    """Tokens the sampler may draw, read from processed logprobs."""
    params.logprobs = -1
    sampled = Sampler(state_of(V, params, **token_ids), logprobs_mode="processed_logprobs")(logits_1V.clone(), [0])
    entry = sampled.logprobs[0]
    return {i for i, logprob in zip(entry.token_ids, entry.logprobs, strict=True) if logprob > -math.inf}


requests = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 17, 100]),
    top_p=st.sampled_from([0.05, 0.6, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -0.7, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.9]),
    min_tokens=st.integers(0, 5),
    logit_bias=st.none() | st.dictionaries(tokens, st.integers(-8, 8).map(float), max_size=5),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=8),
    bad_words_token_ids=st.none() | st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4),
)


@settings(max_examples=examples(300), derandomize=True)  # float32 against float64: ties at a limit may differ
@given(
    params=requests,
    seed=st.integers(0, 1000),
    prompt=st.lists(tokens, max_size=8),
    output=st.lists(tokens, max_size=8),
    stop_token_ids=st.lists(tokens, max_size=2),
)
def test_any_parameters_match_the_dense_definition(
    params: SamplingParams, seed: int, prompt: list[int], output: list[int], stop_token_ids: list[int]
) -> None:
    history = {"prompt": prompt, "output": output, "stop_token_ids": stop_token_ids}
    logits_1V = logits(seed=seed)
    expected_V = processed_logits(logits_1V[0], params, **history)
    state = state_of(V, params, **history)
    actual_1V = logits_1V.clone()
    apply_filters(actual_1V, [0], state.filters)
    apply_penalties(actual_1V, [0], state.penalties)
    torch.testing.assert_close(actual_1V[0].double(), expected_V, rtol=1e-5, atol=1e-5)
    if (row_filter := state.filters.get(0)) is not None:
        assert [row_filter.allows(token_id) for token_id in range(V)] == actual_1V[0].isfinite().tolist()
    sampled = Sampler(state)(logits_1V.clone(), [0])
    if expected_V.max() == -math.inf:
        assert "No token is left" in sampled.errors[0]
        return
    assert probabilities(logits_1V[0], params, **history)[sampled.token_ids[0]] > 0


@settings(max_examples=examples(100), derandomize=True)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 100]),
    top_p=st.sampled_from([0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
)
def test_kept_tokens_are_those_of_the_dense_definition(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(seed=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = set(probabilities(logits(seed=seed)[0], params).nonzero()[:, 0].tolist())
    assert kept(logits(seed=seed), params) == expected


def hf_kept(processors: list[Any], logits_1V: Tensor, input_ids: list[int]) -> set[int]:
    scores = logits_1V.clone()
    for processor in processors:
        scores = processor(torch.tensor([input_ids]), scores)
    return set((scores[0] > -math.inf).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(5))
def test_filters_keep_what_transformers_keeps(seed: int) -> None:
    row = logits(seed=seed)
    temperature = transformers.TemperatureLogitsWarper(0.7)
    for fields, processors in (
        ({"top_k": 7}, [transformers.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [transformers.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.05}, [transformers.MinPLogitsWarper(0.05)]),
        ({"top_k": 12, "top_p": 0.8}, [transformers.TopKLogitsWarper(12), transformers.TopPLogitsWarper(0.8)]),
        (
            {"bad_words_token_ids": [[5], [8, 6], [7, 8, 9]]},
            [transformers.NoBadWordsLogitsProcessor([[5], [8, 6], [7, 8, 9]], eos_token_id=0)],
        ),
        ({"min_tokens": 3}, [transformers.MinNewTokensLengthLogitsProcessor(0, 3, [0, 1])]),
    ):
        params = SamplingParams(seed=0, temperature=0.7, **fields)
        expected = hf_kept([temperature, *processors], row, [7, 8])
        assert kept(row, params, output=[7, 8], stop_token_ids=[0, 1]) == expected, fields


def test_repetition_penalty_is_transformers() -> None:
    row = logits(seed=3)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 9]]), row.clone())
    state = state_of(V, SamplingParams(seed=0, repetition_penalty=1.7), prompt=[1, 2], output=[2, 9])
    actual = row.clone()
    apply_penalties(actual, [0], state.penalties)
    assert torch.equal(actual, expected)


def test_penalties_grow_with_the_output() -> None:
    params = SamplingParams(seed=0, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    generator = torch.Generator().manual_seed(0)
    large = 5000
    prompt = torch.randint(large, (90,), generator=generator).tolist()
    added = torch.randint(large, (700,), generator=generator).tolist()
    stepwise = RowPenalties.of(params, prompt, [])
    assert stepwise is not None
    for token_id in added:
        stepwise.append(token_id)
    at_once = RowPenalties.of(params, prompt, added)
    assert at_once is not None
    row = torch.randn(1, large, generator=generator)
    results = []
    for penalties in (stepwise, at_once):
        results.append(row.clone())
        apply_penalties(results[-1], [0], {0: penalties})
    assert torch.equal(*results)
    assert not torch.equal(results[0], row)


def test_rows_without_filters_or_penalties_are_not_touched() -> None:
    special = SamplingParams(seed=0, presence_penalty=2.0, logit_bias={1: 5.0}, allowed_token_ids=[1, 2])
    state = state_of(V, SamplingParams(seed=0), special, SamplingParams(temperature=0.0), prompt=[1], output=[2])
    before = logits(3)
    after = before.clone()
    Sampler(state)(after, [0, 1, 2])
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


def test_min_tokens_ends_and_bad_words_follow_the_output() -> None:
    state = state_of(V, SamplingParams(temperature=0.0, min_tokens=2), stop_token_ids=[5, V + 100])
    row = torch.zeros(1, V)
    row[0, 5], row[0, 6] = 9.0, 8.0
    chosen = []
    for _ in range(3):
        chosen += Sampler(state)(row.clone(), [0]).token_ids
        append_token(state, 0, chosen[-1])
    assert chosen == [6, 6, 5]
    state = state_of(V, SamplingParams(temperature=0.0, bad_words_token_ids=[[6, 6, 6]]))
    row[0, 5] = 0.0
    chosen = []
    for _ in range(6):
        chosen += Sampler(state)(row.clone(), [0]).token_ids
        append_token(state, 0, chosen[-1])
    assert chosen == [6, 6, 0, 6, 6, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_logprobs", [None, 2])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_a_broken_row_fails_alone(temperature: float, num_logprobs: int | None, mode: str) -> None:
    params = [SamplingParams(seed=i, temperature=temperature, top_p=0.9, logprobs=num_logprobs) for i in range(6)]
    params[4].allowed_token_ids = [3]
    params[4].bad_words_token_ids = [[3]]
    healthy = Sampler(state_of(V, *params), mode)(logits(6), range(6))
    broken_RV = logits(6)
    broken_RV[0] = math.nan
    broken_RV[1, 7] = math.nan
    broken_RV[2, 7] = math.inf
    broken = Sampler(state_of(V, *params), mode)(broken_RV, range(6))
    assert sorted(broken.errors) == [0, 1, 2, 4]
    assert "NaN" in broken.errors[0]
    assert "NaN" in broken.errors[1]
    assert "infinite" in broken.errors[2]
    assert "No token is left" in broken.errors[4]
    for index in (3, 5):
        assert broken.token_ids[index] == healthy.token_ids[index]
        assert broken.logprobs.get(index) == healthy.logprobs.get(index)
    assert set(broken.logprobs) == ({3, 5} if num_logprobs else set())


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_the_next_step_may_overwrite_the_logits(mode: str) -> None:
    """A worker keeps their memory, and a step's samples may be taken in when the next one has begun."""
    params = [SamplingParams(seed=i, temperature=1.0, top_p=0.9, logprobs=2) for i in range(4)]
    params[3].allowed_token_ids = [3]
    params[3].bad_words_token_ids = [[3]]
    given_RV = logits(4)
    given_RV[1, 7] = math.nan
    wanted = Sampler(state_of(V, *params), mode)(given_RV.clone(), range(4))
    sampler = Sampler(state_of(V, *params), mode)
    arrays = sampler.host_parameters(np.arange(4))
    launched = sampler.launch(given_RV, range(4), [torch.from_numpy(array) for array in arrays])
    given_RV.zero_()
    assert launched.finish(iter(launched.tensors())) == wanted
    assert sorted(wanted.errors) == [1, 3]


def test_a_device_that_does_not_wait_says_who_is_to_blame() -> None:
    """Of random rows: without a token, the highest logit tells an empty choice from a model that has failed."""
    logits_RV = torch.tensor([[-torch.inf] * 3, [-torch.inf, torch.nan, -torch.inf], [1.0, 2.0, -torch.inf]])
    token_ids_R, chosen_R = torch.tensor([-1, -1, 1]), torch.tensor([-torch.inf, -torch.inf, 2.0])
    chosen_R = highest_without_token(logits_RV, token_ids_R, chosen_R)
    sampled = LaunchedTokens(token_ids_R, chosen_R, excludes=True).finish(iter([token_ids_R, chosen_R]))
    assert sampled.error_codes == {0: "constraint_failed"}
    assert "No token is left" in sampled.errors[0]
    assert "not numbers" in sampled.errors[1]
    assert sorted(sampled.errors) == [0, 1]


def test_removed_rows_leave_nothing_behind() -> None:
    params = SamplingParams(
        seed=1,
        presence_penalty=1.0,
        logit_bias={1: 1.0},
        logprob_token_ids=[1],
        bad_words_token_ids=[[1]],
        min_tokens=2,
    )
    state = SamplingState(4, V)
    for row in range(4):
        state.add_row(row, params, [1], [], [2])
    for row in range(4):
        state.remove_row(row)
    assert [state.filters, state.penalties, state.num_logprobs, state.logprob_token_ids] == [{}, {}, {}, {}]
    assert state.num_random == 0


def test_growing_keeps_the_rows() -> None:
    requests = [SamplingParams(seed=i, top_k=5) for i in range(8)]
    small = state_of(V, *requests)
    before = Sampler(small)(logits(8), range(8)).token_ids
    small.grow(16)
    assert Sampler(small)(logits(8), range(8)).token_ids == before
    small.add_row(15, requests[0], [], [], [])
    assert Sampler(small)(logits(8)[:1], [15]).token_ids == before[:1]
