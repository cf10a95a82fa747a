"""Logits in, tokens out: filters, penalties, choice, logprobs.

What a row gets is a function of its own logits, parameters, seed and number of output tokens, never of its batch mates:
the same tokens come out under any schedule. Dimensions: R rows of a call, L rows with logprobs, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import gpu, ops
from quire.sampling.batch_params import SamplingState
from quire.sampling.filters import apply_filters
from quire.sampling.logprobs import entries, most_likely, of_tokens, processed, scores
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


@dataclass(slots=True)
class _Report:
    """Logprobs of one row on their way: of the most likely tokens as `scores` has them, or of the tokens `others`."""

    index: int
    others: list[int] | None
    numbers: list[Tensor]


@dataclass(slots=True)
class LaunchedTokens:
    """What `Sampler.launch` leaves on the device."""

    token_ids_R: Tensor  # int64; -1: there is no distribution
    chosen_R: Tensor  # float32: the chosen tokens' logits, after filters and penalties
    reports: list[_Report] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """All that the host wants to know, for `finish`."""
        return [self.token_ids_R, self.chosen_R, *(number for report in self.reports for number in report.numbers)]

    def finish(self, on_host: Iterator[Tensor]) -> SampledTokens:
        """The tokens, once the `tensors()` are on the host, in their order."""
        token_ids_R, chosen_R = next(on_host), next(on_host)
        failed_R = ~torch.isfinite(chosen_R) | (token_ids_R < 0)
        sampled = SampledTokens(token_ids_R.tolist())
        for index in failed_R.nonzero()[:, 0].tolist():
            sampled.errors[index] = _reason_of_choice(sampled.token_ids[index], float(chosen_R[index]))
        for report in self.reports:
            numbers = [next(on_host) for _ in report.numbers]
            index, token_id = report.index, sampled.token_ids[report.index]
            if index in sampled.errors:
                continue
            if report.others is None:
                (sampled.logprobs[index],) = entries(token_ids_R[index : index + 1], *numbers)
            else:
                values, ranks = (number.tolist() for number in numbers)
                sampled.logprobs[index] = TokenLogprobs([token_id, *report.others], values, ranks)
        return sampled


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

    def launch(self, logits_RV: Tensor, rows: Sequence[int], parameters: Sequence[Tensor]) -> LaunchedTokens:
        """The same on a GPU, without waiting for it.

        The processed_* logprob modes are the exception: they look at what they sort.

        Args:
            parameters: `host_parameters` of the rows, on the device; empty where all rows are greedy.
        """
        state = self.state
        assert logits_RV.shape == (len(rows), state.vocab_size), (
            f"logits are {tuple(logits_RV.shape)} for {len(rows)} rows"
        )
        wanted = [index for index, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        is_modified = bool(state.filters or state.penalties)
        wanted_L = gpu.place(torch.tensor(wanted), logits_RV.device) if wanted else None
        scores_LV = None
        if wanted_L is not None and is_modified and self.reports_raw:
            scores_LV = logits_RV.index_select(0, wanted_L)
        apply_filters(logits_RV, rows, state.filters)
        apply_penalties(logits_RV, rows, state.penalties)
        token_ids_R = ops.sample(logits_RV, *parameters) if parameters else ops.greedy(logits_RV)
        chosen_R = logits_RV.gather(1, token_ids_R.clamp(min=0)[:, None])[:, 0]
        launched = LaunchedTokens(token_ids_R, chosen_R)
        if wanted_L is None:
            return launched
        if scores_LV is None:
            scores_LV = logits_RV.index_select(0, wanted_L)
        if not self.reports_raw:
            scores_LV = processed(scores_LV, *self._parameters([rows[index] for index in wanted], torch.device("cpu")))
        for member, index in enumerate(wanted):
            launched.reports.append(self._launch_report(scores_LV[member], index, rows[index], token_ids_R))
        return launched

    def _launch_report(self, scores_V: Tensor, index: int, row: int, token_ids_R: Tensor) -> _Report:
        """The logprobs of one row."""
        token_id_1 = token_ids_R[index : index + 1].clamp(min=0)
        others = self.state.logprob_token_ids.get(row)
        if others is None:
            numbers = scores(scores_V[None], token_id_1, self.state.num_logprobs[row], self.reports_logits)
            return _Report(index, None, list(numbers))
        token_ids_K = torch.cat((token_id_1, gpu.place(torch.tensor(others, dtype=torch.int64), scores_V.device)))
        logprobs_K, ranks_K, _, _ = ops.logprobs(scores_V.expand(len(token_ids_K), -1), token_ids_K, 0)
        return _Report(index, others, [scores_V[token_ids_K] if self.reports_logits else logprobs_K, ranks_K])

    def host_parameters(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """What ops.sample takes beside the logits; empty where every row of the state is greedy."""
        state = self.state
        if state.num_random == 0:
            return ()
        arrays = (state.temperature_C, state.top_k_C, state.top_p_C, state.min_p_C)
        uniform_R = uniforms(state.seed_C[rows], state.num_output_tokens_C[rows])
        return (*(array[rows] for array in arrays), uniform_R)

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
    token_ids = token_ids_R.numpy()  # numpy's calls touch less memory, which other work of a step has evicted
    is_sampled = np.isfinite(logits_RV.numpy()[np.arange(len(token_ids)), token_ids]) & (token_ids >= 0)
    if is_sampled.all():
        return {}
    return {index: _reason(logits_RV[index]) for index in np.flatnonzero(~is_sampled).tolist()}


_IS_INFINITE = "The model's logits for this request are infinite. No token can be sampled."
_NOTHING_LEFT = "No token is left to sample: allowed_token_ids, bad_words and min_tokens exclude the whole vocabulary."


def _reason(logits_V: Tensor) -> str:
    if bool(logits_V.isnan().any()):
        return "The model's logits for this request are not numbers (NaN). No token can be sampled."
    return _IS_INFINITE if bool(logits_V.isposinf().any()) else _NOTHING_LEFT


def _reason_of_choice(token_id: int, chosen: float) -> str:
    """The same where the row is not looked at: a kernel that finds no distribution does not say why."""
    if token_id < 0:
        return (
            "The model's logits for this request are not numbers (NaN) or infinite, or allowed_token_ids, bad_words "
            "and min_tokens exclude the whole vocabulary. No token can be sampled."
        )
    return _IS_INFINITE if chosen > 0 else _NOTHING_LEFT
