"""Logits in, tokens out: filters, penalties, choice, logprobs.

What a row gets is a function of its own logits, parameters, seed and number of output tokens, never of its batch mates:
the same tokens come out under any schedule. Dimensions: R rows of a call, L rows with logprobs, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quire.kernels import ops
from quire.sampling.batch_params import SamplingState
from quire.sampling.filters import apply_filters
from quire.sampling.logprobs import most_likely, of_tokens, processed
from quire.sampling.penalties import apply_penalties
from quire.sampling.random import uniforms
from quire.schedule import TokenLogprobs

LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class SampledTokens:
    """One token per row of the call; `logprobs` and `errors` are keyed by the row's index in the call."""

    token_ids: list[int]  # meaningless where errors has an entry
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples one token for each given row of a SamplingState. Does not change the state.

    Args:
        logprobs_mode: what is reported as logprobs. raw_*: the model's own scores; processed_*: after filters,
            penalties, temperature, min-p, top-k and top-p (what these leave out has -inf). *_logits: not normalised.
    """

    def __init__(self, state: SamplingState, logprobs_mode: str = "raw_logprobs") -> None:
        assert logprobs_mode in LOGPROBS_MODES, logprobs_mode
        self.state = state
        self.reports_raw = logprobs_mode.startswith("raw")
        self.reports_logits = logprobs_mode.endswith("logits")

    def __call__(self, logits_RV: Tensor, rows: Sequence[int]) -> SampledTokens:
        """Sample one token per row; `logits_RV[i]`, float32, belongs to `rows[i]` and may be modified."""
        state = self.state
        assert logits_RV.shape == (len(rows), state.vocab_size), (
            f"logits are {tuple(logits_RV.shape)} for {len(rows)} rows"
        )
        wanted = [index for index, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        is_modified = bool(state.filters or state.penalties)
        raw_LV = logits_RV[wanted] if wanted and is_modified and self.reports_raw else None
        apply_filters(logits_RV, rows, state.filters)
        apply_penalties(logits_RV, rows, state.penalties)
        token_ids_R = self._choose(logits_RV, rows)
        sampled = SampledTokens(token_ids_R.tolist(), errors=_errors(logits_RV, token_ids_R))
        if wanted:
            valid = [member for member, index in enumerate(wanted) if index not in sampled.errors]
            wanted = [wanted[member] for member in valid]
            scores_LV = logits_RV[wanted] if raw_LV is None else raw_LV[valid]
            if not self.reports_raw:
                scores_LV = processed(scores_LV, *self._parameters([rows[index] for index in wanted], scores_LV.device))
            self._report(scores_LV, wanted, rows, sampled)
        return sampled

    def _parameters(self, rows: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature (0: greedy), top-k, top-p and min-p of the rows."""
        state, index_R = self.state, np.asarray(rows, dtype=np.int64)
        arrays = (state.temperature_C, state.top_k_C, state.top_p_C, state.min_p_C)
        temperature_R, top_k_R, top_p_R, min_p_R = (torch.from_numpy(array[index_R]).to(device) for array in arrays)
        return temperature_R, top_k_R, top_p_R, min_p_R

    def _choose(self, logits_RV: Tensor, rows: Sequence[int]) -> Tensor:
        """Token ids, int64; -1 where the kernel found no distribution."""
        state = self.state
        if state.num_random == 0:
            return ops.greedy(logits_RV)
        index_R = np.asarray(rows, dtype=np.int64)
        uniform_R = torch.from_numpy(uniforms(state.seed_C[index_R], state.num_output_tokens_C[index_R]))
        return ops.sample(logits_RV, *self._parameters(rows, logits_RV.device), uniform_R.to(logits_RV.device))

    def _report(self, scores_LV: Tensor, wanted: list[int], rows: Sequence[int], sampled: SampledTokens) -> None:
        """Fill in the logprobs of the rows with index `wanted`, batched by how many tokens they ask for."""
        state = self.state
        members_of: defaultdict[int, list[int]] = defaultdict(list)
        for member, index in enumerate(wanted):
            others = state.logprob_token_ids.get(rows[index])
            if others is None:
                members_of[state.num_logprobs[rows[index]]].append(member)
            else:
                token_id = sampled.token_ids[index]
                sampled.logprobs[index] = of_tokens(scores_LV[member], token_id, others, self.reports_logits)
        for num_top, members in members_of.items():
            scores_RV = scores_LV if len(members) == len(wanted) else scores_LV[members]
            token_ids_R = torch.tensor(
                [sampled.token_ids[wanted[member]] for member in members], device=scores_LV.device
            )
            entries = most_likely(scores_RV, token_ids_R, num_top, self.reports_logits)
            sampled.logprobs.update(zip((wanted[member] for member in members), entries, strict=True))


def _errors(logits_RV: Tensor, token_ids_R: Tensor) -> dict[int, str]:
    """Rows without a valid choice, with the reason. Looks at a whole row only if its choice is not valid."""
    chosen_R = logits_RV.gather(1, token_ids_R.clamp(min=0)[:, None])[:, 0]
    failed_R = ~torch.isfinite(chosen_R) | (token_ids_R < 0)
    if not bool(failed_R.any()):
        return {}
    return {index: _reason(logits_RV[index]) for index in failed_R.nonzero()[:, 0].tolist()}


def _reason(logits_V: Tensor) -> str:
    if bool(logits_V.isnan().any()):
        return "The model's logits for this request are not numbers (NaN). No token can be sampled."
    if bool(logits_V.isposinf().any()):
        return "The model's logits for this request are infinite. No token can be sampled."
    return "No token is left to sample: allowed_token_ids, bad_words and min_tokens exclude the whole vocabulary."
