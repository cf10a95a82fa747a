"""Reported log probabilities: raw or processed, for sampled tokens and prompts, by value, order and rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.sampling.logprobs import entries, scores
from quire.sampling.sampler import LOGPROBS_MODES, Sampler
from quire.sampling_params import SamplingParams
from quire.schedule import TokenLogprobs
from tests.sampling.dense import probabilities, processed_logits, state_of

V = 50
HISTORY: dict[str, list[int]] = {"prompt": [1, 2], "output": [3, 3, 4]}
CHANGING = {"seed": 3, "temperature": 0.6, "top_k": 10, "presence_penalty": 1.0, "logit_bias": {5: 3.0}}


def logits(num_rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def check(entry: TokenLogprobs, scores_V: Tensor, num_top: int) -> None:
    """The entry lists the sampled token and the num_top best of scores_V."""
    ranking = scores_V.argsort(descending=True, stable=True).tolist()
    chosen = entry.token_ids[0]
    assert entry.token_ids[1:] == ranking[:num_top]
    assert entry.ranks == [ranking.index(chosen) + 1, *range(1, num_top + 1)]
    for token_id, value in zip(entry.token_ids, entry.logprobs, strict=True):
        assert value == pytest.approx(scores_V[token_id].item(), abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 50])
def test_raw_logprobs_ignore_every_parameter(num_top: int) -> None:
    row = logits()
    sampled = Sampler(state_of(V, SamplingParams(logprobs=num_top, **CHANGING), **HISTORY))(row.clone(), [0])
    assert sampled.logprobs[0].token_ids[0] == sampled.token_ids[0]
    check(sampled.logprobs[0], row[0].double().log_softmax(0), num_top)


def test_each_mode_reports_its_scores() -> None:
    row = logits(seed=1)
    params = SamplingParams(logprobs=-1, **CHANGING)
    adjusted_V = processed_logits(row[0], params, **HISTORY)
    p_V = probabilities(row[0], params, **HISTORY)
    scaled_V = torch.where(p_V > 0, adjusted_V / 0.6, -math.inf)
    expected = {
        "raw_logprobs": row[0].double().log_softmax(0),
        "processed_logprobs": p_V.log(),
        "raw_logits": row[0].double(),
        "processed_logits": scaled_V,
    }
    assert set(expected) == set(LOGPROBS_MODES)
    for mode, scores_V in expected.items():
        sampled = Sampler(state_of(V, params, **HISTORY), logprobs_mode=mode)(row.clone(), [0])
        check(sampled.logprobs[0], scores_V, V)


def test_processed_logprobs_of_a_greedy_row_are_not_scaled() -> None:
    row = logits(seed=2)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={5: 2.0})
    sampled = Sampler(state_of(V, params), logprobs_mode="processed_logprobs")(row.clone(), [0])
    check(sampled.logprobs[0], processed_logits(row[0], params).log_softmax(0), 3)


def test_rows_ask_for_different_numbers() -> None:
    wanted = [None, 0, 2, 7, -1, 2, None, 50]
    requests = [SamplingParams(seed=i, logprobs=number) for i, number in enumerate(wanted)]
    logits_RV = logits(8)
    sampled = Sampler(state_of(V, *requests))(logits_RV.clone(), range(8))
    assert set(sampled.logprobs) == {1, 2, 3, 4, 5, 7}
    for index, entry in sampled.logprobs.items():
        number = wanted[index]
        assert number is not None
        check(entry, logits_RV[index].double().log_softmax(0), V if number == -1 else number)
        alone = Sampler(state_of(V, requests[index]))(logits_RV[index : index + 1].clone(), [0])
        assert alone.logprobs[0] == entry, "logprobs depend on the other rows of the batch"


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_logprob_token_ids_reports_exactly_these(mode: str) -> None:
    row = logits(seed=4)
    params = SamplingParams(seed=0, logprob_token_ids=[7, 3, 49])
    sampled = Sampler(state_of(V, params), logprobs_mode=mode)(row.clone(), [0])
    entry = sampled.logprobs[0]
    assert entry.token_ids == [sampled.token_ids[0], 7, 3, 49]
    scores_V = row[0].double() if mode.endswith("logits") else row[0].double().log_softmax(0)
    ranking = scores_V.argsort(descending=True).tolist()
    for token_id, value, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
        assert value == pytest.approx(scores_V[token_id].item(), abs=1e-5)
        assert rank == ranking.index(token_id) + 1


def test_ties_share_a_rank_and_list_the_lowest_id_first() -> None:
    row = torch.zeros(1, V)
    row[0, [9, 4, 30]] = 2.0
    sampled = Sampler(state_of(V, SamplingParams(temperature=0.0, logprobs=4)))(row, [0])
    assert sampled.token_ids == [4]
    assert sampled.logprobs[0].token_ids == [4, 4, 9, 30, 0]
    assert sampled.logprobs[0].ranks[0] == 1


def _reported(logits_XV: torch.Tensor, token_ids_X: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    return entries(token_ids_X, *scores(logits_XV, token_ids_X, num_top, as_logits=False))


@pytest.mark.parametrize("num_top", [0, 3, -1])
def test_prompt_logprobs(num_top: int) -> None:
    logits_XV = logits(6, seed=5)
    next_token_ids = torch.tensor([3, 0, 49, 7, 7, 1])
    found = _reported(logits_XV, next_token_ids, num_top)
    assert [entry.token_ids[0] for entry in found] == next_token_ids.tolist()
    for entry, logits_V in zip(found, logits_XV, strict=True):
        check(entry, logits_V.double().log_softmax(0), V if num_top == -1 else num_top)
    one_by_one = [_reported(logits_XV[i : i + 1], next_token_ids[i : i + 1], num_top)[0] for i in range(6)]
    assert one_by_one == found, "prompt logprobs depend on the chunk"
