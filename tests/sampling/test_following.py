"""Greedy rows on ranks: each finds the highest logit among its own tokens. The answer is that of one sampler."""

from __future__ import annotations

import math

import pytest
import torch

from quire.distributed.layout import shares
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.kernels import cpu
from quire.layer_spec.cuts import Share
from quire.sampling.batch_params import SamplingState
from quire.sampling.following import FEWEST_OF_PARTS, SharedSampler
from quire.sampling.sampler import SampledTokens, Sampler
from quire.sampling_params import SamplingParams
from tests.distributed.test_shared_memory import Make, together

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

VOCAB = 130


def state_of(*kinds: SamplingParams) -> SamplingState:
    state = SamplingState(16, VOCAB)
    for row, kind in enumerate(kinds):
        state.add_row(row, kind, [5], [], [])
    return state


def logits() -> torch.Tensor:
    """Rows whose highest logit is on each rank, on several, and rows without a token."""
    logits_RV = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1))
    for row, at in enumerate((0, 64, VOCAB - 1)):
        logits_RV[row, at] = 9.0
    logits_RV[3, [60, 100]] = 9.0
    logits_RV[4] = -0.0
    logits_RV[4, 99] = 0.0
    logits_RV[5, 100] = math.nan
    logits_RV[6, 3], logits_RV[6, 120] = math.nan, math.inf
    logits_RV[7, 120] = math.inf
    logits_RV[8] = -math.inf
    return logits_RV


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_highest_of_all_tokens(num_ranks: int) -> None:
    logits_RV, rows = logits(), list(range(9))
    own = shares(VOCAB, num_ranks)

    def sampled(group: SharedMemoryGroup) -> SampledTokens:
        share = Share(group.rank, (tuple(own),), (VOCAB,))
        sampler = SharedSampler(state_of(*[SamplingParams(temperature=0.0)] * 9), "raw_logprobs", group, share)
        assert sampler.takes_parts(rows)
        launched = sampler.launch(logits_RV[:, own[group.rank].start : own[group.rank].stop], rows, ())
        return launched.finish(iter(launched.tensors()))

    expected = Sampler(state_of(*[SamplingParams(temperature=0.0)] * 9))(logits_RV, rows)
    assert set(expected.errors) == {5, 6, 7, 8}
    assert expected.token_ids[:5] == [0, 64, VOCAB - 1, 60, 0]
    assert together(Make(has_machines=False)(num_ranks), sampled) == [expected] * num_ranks


def test_what_needs_the_logits_of_all_tokens() -> None:
    group, share = Make(has_machines=False)(2)[0], Share(0, ((range(64), range(64, VOCAB)),), (VOCAB,))
    greedy, greedy_rows = SamplingParams(temperature=0.0), [0] * FEWEST_OF_PARTS
    for kind in (
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, logprob_token_ids=[5]),
        SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[7]),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=0.0, grammar="start: 'a'"),
    ):
        state = state_of(greedy)
        sampler = SharedSampler(state, "raw_logprobs", group, share)
        assert sampler.takes_parts(greedy_rows)
        assert not sampler.takes_parts(greedy_rows[1:])
        state.add_row(1, kind, [5], [], [7])
        assert sampler.takes_parts(greedy_rows), kind
        assert not sampler.takes_parts([*greedy_rows, 1]), kind
        state.remove_row(1)
        assert sampler.takes_parts([*greedy_rows, 1]), kind
    empty = Share(0, ((range(VOCAB), range(VOCAB, VOCAB)),), (VOCAB,))
    assert not SharedSampler(state_of(greedy), "raw_logprobs", group, empty).takes_parts(greedy_rows)
