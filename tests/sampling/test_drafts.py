"""A row with drafts before it is sampled as the same row with the drafts in its output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.sampling.sampler import SampledTokens, Sampler
from quire.sampling_params import SamplingParams
from tests.sampling.dense import state_of

V = 40
PROMPT, OUTPUT, STOP = [1, 2, 3, 3], [4, 5, 4], [9, 10]
DRAFTS = [6, 5, 39, 6]
KINDS: dict[str, dict[str, Any]] = {
    "random": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "min tokens": {"min_tokens": 6, "logit_bias": {9: 50.0, 10: 40.0}},
    "bad words": {"bad_words_token_ids": [[4, 6, 8], [5, 39, 7], [6, 11], [12]], "allowed_token_ids": [7, 8, 11, 12]},
    "logprobs": {"logprobs": 5, "presence_penalty": 1.0},
}


def test_each_place_sees_the_drafts_before_it() -> None:
    """All kinds in one call, among rows without drafts."""
    params = [SamplingParams(seed=index, **fields) for index, fields in enumerate(KINDS.values())]
    history: dict[str, Any] = {"prompt": PROMPT, "stop_token_ids": STOP}
    places = [(row, offset) for row in range(len(params)) for offset in range(len(DRAFTS) + 1 if row % 2 == 0 else 1)]
    places += [(row, offset) for row in range(1, len(params), 2) for offset in range(1, len(DRAFTS) + 1)]
    generator = torch.Generator().manual_seed(0)
    logits_RV = 4 * torch.randn(len(places), V, generator=generator)
    sampler = Sampler(state_of(V, *params, output=OUTPUT, **history), "processed_logprobs")
    rows = [row for row, _ in places]
    parameters = sampler.host_parameters(np.array(rows), np.array([offset for _, offset in places]))
    before = [DRAFTS[:offset] for _, offset in places]
    launched = sampler.launch(logits_RV.clone(), rows, [torch.from_numpy(array) for array in parameters], before)
    together = launched.finish(iter(launched.tensors()))
    assert not together.errors
    for index, (row, offset) in enumerate(places):
        state = state_of(V, *params, output=OUTPUT + DRAFTS[:offset], **history)
        alone: SampledTokens = Sampler(state, "processed_logprobs")(logits_RV[index : index + 1].clone(), [row])
        assert together.token_ids[index] == alone.token_ids[0], (list(KINDS)[row], offset)
        assert together.logprobs.get(index) == alone.logprobs.get(0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_drafts_matter(kind: str) -> None:
    """Otherwise the test above shows nothing: some place has another token than without the drafts."""
    differs = False
    for seed in range(30):
        logits_RV = 3 * torch.randn(len(DRAFTS) + 1, V, generator=torch.Generator().manual_seed(seed))
        state = state_of(V, SamplingParams(seed=0, **KINDS[kind]), prompt=PROMPT, output=OUTPUT, stop_token_ids=STOP)
        with_drafts = Sampler(state)
        rows, offsets = [0] * len(logits_RV), np.arange(len(logits_RV))
        found = []
        for before, places in (([DRAFTS[:offset] for offset in offsets], offsets), ((), None)):
            parameters = [torch.from_numpy(array) for array in with_drafts.host_parameters(np.array(rows), places)]
            found.append(with_drafts.launch(logits_RV.clone(), rows, parameters, before).token_ids_R.tolist())
        differs |= found[0] != found[1]
    assert differs
