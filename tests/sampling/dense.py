"""The definition of correct for sampling: one row at a time, float64, nothing sparse, no code of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.sampling.batch_params import SamplingState
from quire.sampling_params import SamplingParams


def processed_logits(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
) -> Tensor:
    """Filters and penalties, in vLLM's order."""
    x_V = logits_V.double().clone()
    vocab_size = len(x_V)
    if params.allowed_token_ids:
        forbidden = set(range(vocab_size)) - set(params.allowed_token_ids)
        x_V[sorted(forbidden)] = -math.inf
    for word in params.bad_words_token_ids or []:
        before = list(word[:-1])
        if not before or (len(output) >= len(before) and list(output[len(output) - len(before) :]) == before):
            x_V[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token_id in stop_token_ids:
            x_V[token_id] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x_V[token_id] += bias
    for token_id in range(vocab_size):
        count = list(output).count(token_id)
        if token_id in prompt or count:
            x = x_V[token_id].item()
            x_V[token_id] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x_V[token_id] -= params.frequency_penalty * count
        x_V[token_id] -= params.presence_penalty * (count > 0)
    return x_V


def probabilities(
    logits_V: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
) -> Tensor:
    """The distribution the next token is drawn from: temperature, min-p, top-k, top-p."""
    x_V = processed_logits(logits_V, params, prompt, output, stop_token_ids)
    if params.temperature == 0.0:
        p_V = torch.zeros_like(x_V)
        p_V[int(x_V.argmax())] = 1.0
        return p_V
    p_V = (x_V / params.temperature).softmax(0)
    keep_V = p_V >= params.min_p * p_V.max()
    if params.top_k:
        kth = x_V.sort(descending=True).values[min(params.top_k, len(x_V)) - 1]
        keep_V &= x_V >= kth
    p_V = torch.where(keep_V, p_V, 0.0)
    p_V /= p_V.sum()
    if params.top_p < 1.0:
        mass, kept = 0.0, torch.zeros_like(p_V)
        for token_id in p_V.argsort(descending=True, stable=True).tolist():
            if mass >= params.top_p:
                break
            kept[token_id] = p_V[token_id]
            mass += p_V[token_id].item()
        p_V = kept / kept.sum()
    return p_V


def state_of(
    vocab_size: int,
    *requests: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
) -> SamplingState:
    """A state with one row per request, all with the same tokens."""
    state = SamplingState(len(requests), vocab_size)
    for row, params in enumerate(requests):
        state.add_row(row, params, list(prompt), list(output), list(stop_token_ids))
    return state


def chi_square(observed_V: Tensor, expected_V: Tensor) -> tuple[float, float]:
    """Pearson's statistic over cells that expect at least 5, and its 0.9999 quantile (Wilson and Hilferty 1931)."""
    assert observed_V[expected_V == 0].sum() == 0, "a token of probability 0 was drawn"
    large_V = expected_V >= 5
    observed = torch.cat([observed_V[large_V].double(), observed_V[~large_V].sum(0, keepdim=True).double()])
    expected = torch.cat([expected_V[large_V], expected_V[~large_V].sum(0, keepdim=True)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(len(expected) - 1, 1)
    z = 3.719  # standard normal quantile of 0.9999
    limit = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    return ((observed - expected) ** 2 / expected).sum().item(), limit


def append_token(state: SamplingState, row: int, token_id: int) -> None:
    """A sampled token, counted and known."""
    state.count_tokens(np.array([row]))
    state.learn_token(row, token_id)
