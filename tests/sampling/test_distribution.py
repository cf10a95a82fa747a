"""Draws follow the distribution that the parameters define, and depend on nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import ops
from quire.sampling.batch_params import SamplingState
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from tests.examples import IS_FULL
from tests.sampling.dense import append_token, chi_square, probabilities, state_of

V = 60


def logits(num_rows: int = 1, seed: int = 0, vocab_size: int = V, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_k_above_vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.7},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p_one": {"min_p": 1.0},
    "everything": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "negative_penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {3: 2.5, 4: -100.0}},
    "allowed": {"allowed_token_ids": [1, 5, 9, 33]},
    "bad_words": {"bad_words_token_ids": [[2], [8, 7, 11], [8, 12], [7, 13]]},
    "min_tokens": {"min_tokens": 6},
    "all_of_it": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": {9: 1.0},
        "bad_words_token_ids": [[7, 9], [8, 7, 10]],
        "min_tokens": 9,
    },
}
TOKENS: dict[str, list[int]] = {"prompt": [1, 2, 3, 3, 20], "output": [4, 4, 9, 8, 7], "stop_token_ids": [0, 9]}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_dense_definition(name: str) -> None:
    num_draws = 6000 if IS_FULL else 1200
    requests = [SamplingParams(seed=seed, **CASES[name]) for seed in range(num_draws)]
    state = state_of(V, *requests, **TOKENS)
    row_1V = logits(seed=1)
    drawn = Sampler(state)(row_1V.repeat(num_draws, 1), range(num_draws))
    assert not drawn.errors
    expected_V = probabilities(row_1V[0], requests[0], **TOKENS) * num_draws
    statistic, limit = chi_square(torch.bincount(torch.tensor(drawn.token_ids), minlength=V), expected_V)
    assert statistic < limit, f"{name}: chi-square {statistic:.1f} above {limit:.1f}"


def test_successive_tokens_of_one_request_are_independent_draws() -> None:
    num_draws = 6000
    params = SamplingParams(seed=1234)
    state = state_of(V, params)
    sampler = Sampler(state)
    row_1V = logits(seed=2)
    drawn = []
    for _ in range(num_draws):
        (token_id,) = sampler(row_1V.clone(), [0]).token_ids
        append_token(state, 0, token_id)
        drawn.append(token_id)
    ids = torch.tensor(drawn)
    p_V = probabilities(row_1V[0], params)
    statistic, limit = chi_square(torch.bincount(ids, minlength=V), p_V * num_draws)
    assert statistic < limit
    pairs = torch.bincount(ids[:-1] * V + ids[1:], minlength=V * V)
    statistic, limit = chi_square(pairs, (p_V[:, None] * p_V).flatten() * (num_draws - 1))
    assert statistic < limit, f"pairs of successive tokens: chi-square {statistic:.1f} above {limit:.1f}"


def mixed_requests(count: int) -> list[SamplingParams]:
    names = list(CASES)
    requests = []
    for i in range(count):
        fields = dict(CASES[names[i % len(names)]])
        if i % 3 == 0:
            fields["temperature"] = 0.0
        requests.append(SamplingParams(seed=i, logprobs=i % 4 if i % 2 else None, **fields))
    return requests


def run(order: list[int], requests: list[SamplingParams], num_steps: int, batch: int, preempt: bool) -> dict[int, Any]:
    """Sample `num_steps` tokens for each request, in batches; a preempted request resumes on another row."""
    state = SamplingState(2 * len(requests), V)
    sampler = Sampler(state)
    row_of = {request: position for position, request in enumerate(order)}
    outputs: dict[int, list[int]] = {request: [] for request in order}
    reported: dict[int, Any] = {request: [] for request in order}
    for request in order:
        state.add_row(row_of[request], requests[request], TOKENS["prompt"], [], TOKENS["stop_token_ids"])
    for step in range(num_steps):
        for begin in range(0, len(order), batch):
            members = order[begin : begin + batch]
            logits_RV = torch.cat([logits(seed=1000 * request + step) for request in members])
            sampled = sampler(logits_RV, [row_of[request] for request in members])
            assert not sampled.errors
            for index, request in enumerate(members):
                outputs[request].append(sampled.token_ids[index])
                reported[request].append(sampled.logprobs.get(index))
                append_token(state, row_of[request], sampled.token_ids[index])
        if preempt:
            for request in order[step % 3 :: 3]:
                state.remove_row(row_of[request])
                row_of[request] = (row_of[request] + len(order)) % (2 * len(order))
                params, output = requests[request], outputs[request]
                state.add_row(row_of[request], params, TOKENS["prompt"], list(output), TOKENS["stop_token_ids"])
    return {request: (outputs[request], reported[request]) for request in order}


def test_a_request_gets_the_same_tokens_under_any_schedule() -> None:
    requests = mixed_requests(41)
    order = list(range(41))
    together = run(order, requests, num_steps=6, batch=41, preempt=False)
    shuffled = random.Random(3).sample(order, len(order))
    for batch, preempt in ((1, False), (7, True), (41, True)):
        assert run(shuffled, requests, 6, batch, preempt) == together, f"batches of {batch}, preemption {preempt}"


def test_seeds_decide() -> None:
    same = state_of(V, *[SamplingParams(seed=5)] * 8)
    assert len(set(Sampler(same)(logits().repeat(8, 1), range(8)).token_ids)) == 1
    other = state_of(V, *[SamplingParams(seed=seed) for seed in (-(2**63), -1 - 2**40, 0, 1, 2, 3, 2**63 - 1, 7)])
    assert len(set(Sampler(other)(logits().repeat(8, 1), range(8)).token_ids)) > 1


def test_greedy_rows_among_random_rows_are_argmax() -> None:
    requests = [SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i) for i in range(50)]
    logits_RV = logits(50, seed=4)
    token_ids = Sampler(state_of(V, *requests))(logits_RV.clone(), range(50)).token_ids
    assert token_ids[1::2] == logits_RV.argmax(1).tolist()[1::2]
    assert token_ids[::2] != logits_RV.argmax(1).tolist()[::2]


def test_plain_greedy_batch_only_takes_the_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plain greedy batch went through random sampling")

    state = state_of(V, SamplingParams(seed=1), SamplingParams(temperature=0.0), SamplingParams(temperature=0.0))
    state.remove_row(0)
    monkeypatch.setattr(ops, "sample", refuse)
    logits_RV = logits(2)
    before_RV = logits_RV.clone()
    assert Sampler(state)(logits_RV, [1, 2]).token_ids == before_RV.argmax(1).tolist()
    assert torch.equal(logits_RV, before_RV)


def test_random_request_without_a_seed_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="seed"):
        state_of(V, SamplingParams())
