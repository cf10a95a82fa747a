"""Samples tokens from logits: filters, penalties, choice, logprobs.

The token of a row depends only on the row's own logits, parameters, seed and number of output tokens. So the tokens are
the same under any schedule.

Dimensions: R rows of a call, L rows with logprobs, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConstraintError
from quire.kernels import gpu, ops
from quire.sampling.batch_params import SamplingState
from quire.sampling.filters import apply_filters
from quire.sampling.grammars import GrammarMasks
from quire.sampling.logprobs import entries, processed, scores
from quire.sampling.penalties import apply_penalties
from quire.sampling.random import uniforms
from quire.schedule import TokenLogprobs

LOGPROBS_MODES: Final = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class SampledTokens:
    """One token per row of the call. The keys of the dicts are the row's index in the call."""

    token_ids: list[int]  # without meaning if errors has an entry
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    error_codes: dict[int, str] = field(default_factory=dict)  # QuireError.code, if the request is to blame


@dataclass(slots=True)
class _Report:
    """Logprobs on the device: of rows that ask for the same number of tokens, or of one row that names its tokens."""

    indices: list[int]  # the indices of the rows in the call
    others: list[int] | None  # the named tokens
    numbers: list[Tensor]  # the result of `scores`; for named tokens: values and ranks


@dataclass(slots=True)
class LaunchedTokens:
    """The result of `Sampler.launch` on the device."""

    token_ids_R: Tensor  # int64; -1: the row has no distribution
    chosen_R: Tensor  # float32: the chosen tokens' logits, after filters and penalties; see `excludes`
    reports: list[_Report] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # row of the call -> why its grammar allows no token
    reasons: dict[int, str] = field(default_factory=dict)  # the same of other rows; empty on a GPU, which would wait
    excludes: bool = False  # tokens may be excluded: without a distribution, chosen_R has the row's highest logit

    def tensors(self) -> list[Tensor]:
        """All tensors that `finish` needs on the host."""
        return [self.token_ids_R, self.chosen_R, *(number for report in self.reports for number in report.numbers)]

    def finish(self, on_host: Iterator[Tensor]) -> SampledTokens:
        """The sampled tokens. `on_host` gives the `tensors()` on the host, in their order."""
        token_ids_R, chosen_R = next(on_host).numpy(), next(on_host).numpy()
        sampled = SampledTokens(token_ids_R.tolist())
        failed_R = ~np.isfinite(chosen_R) | (token_ids_R < 0)
        for index in np.flatnonzero(failed_R).tolist() if failed_R.any() else ():
            sampled.errors[index] = self._reason(index, float(chosen_R[index]))
        sampled.errors |= self.failed
        for index, why in sampled.errors.items():
            if index in self.failed or why == _NOTHING_LEFT:
                sampled.error_codes[index] = ConstraintError.code
        for report in self.reports:
            numbers = [next(on_host) for _ in report.numbers]
            if report.others is None:
                found = entries(torch.from_numpy(token_ids_R[report.indices]), *numbers)
            else:
                values, ranks = (number.tolist() for number in numbers)
                found = [TokenLogprobs([sampled.token_ids[report.indices[0]], *report.others], values, ranks)]
            for index, entry in zip(report.indices, found, strict=True):
                if index not in sampled.errors:
                    sampled.logprobs[index] = entry
        return sampled

    def _reason(self, index: int, chosen: float) -> str:
        """The reason why a row has no valid token. It is found here, because a kernel gives no reason."""
        if index in self.reasons:
            return self.reasons[index]
        if self.token_ids_R[index] < 0 and not (self.excludes and chosen == -np.inf):
            return _NO_DISTRIBUTION
        return _IS_INFINITE if chosen > 0 else _NOTHING_LEFT


class Sampler:
    """Samples one token for each given row of a SamplingState. It does not change the state.

    A row may be given several times with drafts before the token. The token is sampled as if the drafts were appended.

    Args:
        logprobs_mode: raw_* reports the model's own scores; processed_* reports the scores after filters, penalties,
            temperature, min-p, top-k and top-p (excluded tokens have -inf). *_logits are not normalised.
    """

    def __init__(self, state: SamplingState, logprobs_mode: str = "raw_logprobs") -> None:
        assert logprobs_mode in LOGPROBS_MODES, logprobs_mode
        self.state = state
        self.reports_raw = logprobs_mode.startswith("raw")
        self.reports_logits = logprobs_mode.endswith("logits")
        self._masks_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-masks")

    def __call__(self, logits_RV: Tensor, rows: Sequence[int]) -> SampledTokens:
        """Sample one token per row and wait for it: `launch` and `finish`."""
        device = logits_RV.device
        parameters = self.host_parameters(np.asarray(rows, dtype=np.int64))
        launched = self.launch(logits_RV, rows, [torch.from_numpy(array).to(device) for array in parameters])
        return launched.finish(iter([tensor.cpu() for tensor in launched.tensors()]))

    def owners(self, rows: Sequence[int]) -> Tensor | None:
        """The rank that samples each row, int32; None: the first rank samples all rows."""
        return None

    def takes_parts(self, rows: Sequence[int]) -> bool:
        """Whether `launch` takes logits of the tokens that this rank has, instead of those of all tokens."""
        return False

    def start_masks(self, rows: Sequence[int], before: Sequence[Sequence[int]] = ()) -> GrammarMasks:
        """Start to compute the masks of the next `launch`, beside the caller's work until then."""
        return GrammarMasks(rows, self.state.grammars, before, self.state.vocab_size, self._masks_thread)

    def launch(
        self,
        logits_RV: Tensor,
        rows: Sequence[int],
        parameters: Sequence[Tensor],
        before: Sequence[Sequence[int]] = (),
        masks: GrammarMasks | None = None,
    ) -> LaunchedTokens:
        """Sample one token per row. On a GPU it does not wait, except in the processed_* logprob modes.

        Args:
            logits_RV: float32; row i belongs to `rows[i]` and may be modified.
            parameters: `host_parameters` of the rows, on the device; empty if all rows are greedy.
            before: per row of the call, the drafts that count as appended to the row's output; (): no row has drafts.
            masks: the masks of these rows and drafts; None: they are computed here.
        """
        state = self.state
        assert logits_RV.shape == (len(rows), state.vocab_size), (
            f"logits are {tuple(logits_RV.shape)} for {len(rows)} rows"
        )
        wanted = [index for index, row in enumerate(rows) if row in state.num_logprobs] if state.num_logprobs else []
        is_modified = state.follows_tokens
        raw_LV = _rows_of(logits_RV, wanted) if wanted and is_modified and self.reports_raw else None
        if masks is None and state.grammars:
            masks = GrammarMasks(rows, state.grammars, before, state.vocab_size)
        failed = {} if masks is None else masks.apply(logits_RV)
        token_ids_R, chosen_R = self.choose(logits_RV, rows, parameters, before)
        on_host = logits_RV.device.type == "cpu"
        excludes = not on_host and bool(parameters) and bool(state.filters or state.grammars)
        if excludes:
            chosen_R = highest_without_token(logits_RV, token_ids_R, chosen_R)
        reasons = _reasons(logits_RV, token_ids_R, chosen_R) if on_host else {}
        launched = LaunchedTokens(token_ids_R, chosen_R, failed=failed, reasons=reasons, excludes=excludes)
        if wanted:
            scores_LV = _rows_of(logits_RV, wanted) if raw_LV is None else raw_LV
            if not self.reports_raw:
                bounds = self._bounds(np.asarray([rows[index] for index in wanted], dtype=np.int64))
                scores_LV = processed(scores_LV, *map(torch.from_numpy, bounds))
            launched.reports = list(self._reports(scores_LV, wanted, rows, token_ids_R))
        return launched

    def choose(
        self, logits_RV: Tensor, rows: Sequence[int], parameters: Sequence[Tensor], before: Sequence[Sequence[int]] = ()
    ) -> tuple[Tensor, Tensor]:
        """A token per row (int64; -1: there is no distribution), and its logit after filters and penalties.

        Args: see `launch`.
        """
        token_ids_R = self.draw(logits_RV, rows, parameters, before)
        logits_of = _logits_on_host if logits_RV.device.type == "cpu" else logits_of_tokens
        return token_ids_R, logits_of(logits_RV, token_ids_R)

    def draw(
        self, logits_RV: Tensor, rows: Sequence[int], parameters: Sequence[Tensor], before: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """The tokens of `choose` alone."""
        apply_filters(logits_RV, rows, self.state.filters, before)
        apply_penalties(logits_RV, rows, self.state.penalties, before)
        return ops.sample(logits_RV, *parameters) if parameters else ops.greedy(logits_RV)

    def _reports(
        self, scores_LV: Tensor, wanted: list[int], rows: Sequence[int], token_ids_R: Tensor
    ) -> Iterator[_Report]:
        """The logprobs of the rows with index `wanted`, batched by the number of tokens that they ask for."""
        state = self.state
        members_of: defaultdict[int, list[int]] = defaultdict(list)
        for member, index in enumerate(wanted):
            others = state.logprob_token_ids.get(rows[index])
            if others is None:
                members_of[state.num_logprobs[rows[index]]].append(member)
                continue
            scores_V, token_id_1 = scores_LV[member], token_ids_R[index : index + 1].clamp(min=0)
            token_ids_K = torch.cat((token_id_1, gpu.place(torch.tensor(others, dtype=torch.int64), scores_V.device)))
            logprobs_K, ranks_K, _, _ = ops.logprobs(scores_V.expand(len(token_ids_K), -1), token_ids_K, 0)
            yield _Report([index], others, [scores_V[token_ids_K] if self.reports_logits else logprobs_K, ranks_K])
        for num_top, members in members_of.items():
            indices = [wanted[member] for member in members]
            scores_RV = scores_LV if len(members) == len(wanted) else _rows_of(scores_LV, members)
            chosen_R = _rows_of(token_ids_R, indices).clamp(min=0)
            yield _Report(indices, None, list(scores(scores_RV, chosen_R, num_top, self.reports_logits)))

    def host_parameters(
        self, rows: NDArray[np.int64], offsets_R: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[Any], ...]:
        """The arguments of ops.sample after the logits; empty if every row of the state is greedy.

        Args:
            offsets_R: the number of drafts before the token of each row; None: no row has drafts.
        """
        state = self.state
        if state.num_random == 0:
            return ()
        indices_R = state.num_output_tokens_C[rows]
        if offsets_R is not None:
            indices_R += offsets_R
        return (*self._bounds(rows), uniforms(state.seed_C[rows], indices_R))

    def _bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Temperature (0: greedy), top-k, top-p and min-p of the rows."""
        state = self.state
        return state.temperature_C[rows], state.top_k_C[rows], state.top_p_C[rows], state.min_p_C[rows]


def highest_without_token(logits_RV: Tensor, token_ids_R: Tensor, chosen_R: Tensor) -> Tensor:
    """The logits of the chosen tokens. For a row without a token (-1), it is the highest logit: -inf or NaN."""
    return torch.where(token_ids_R < 0, logits_RV.amax(1), chosen_R)


def logits_of_tokens(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """The logit of each row's token, [R]. For -1 it is that of token 0."""
    return logits_RV.gather(1, token_ids_R.clamp(min=0)[:, None])[:, 0]


def _logits_on_host(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """The same. numpy's calls touch less memory, which the weights of a step have driven out of the caches."""
    token_ids = token_ids_R.numpy()
    return torch.from_numpy(logits_RV.numpy()[np.arange(len(token_ids)), np.maximum(token_ids, 0)])


def _reasons(logits_RV: Tensor, token_ids_R: Tensor, chosen_R: Tensor) -> dict[int, str]:
    """Why rows have no valid token, by row. On the host."""
    found = {}
    failed_R = ~np.isfinite(chosen_R.numpy()) | (token_ids_R.numpy() < 0)
    for index in np.flatnonzero(failed_R).tolist() if failed_R.any() else ():
        logits_V = logits_RV[index]
        if bool(logits_V.isnan().any()):
            found[index] = NOT_NUMBERS
        else:
            found[index] = _IS_INFINITE if bool(logits_V.isposinf().any()) else _NOTHING_LEFT
    return found


def _rows_of(values_R: Tensor, indices: list[int]) -> Tensor:
    """A copy of some rows. It does not wait for the device."""
    return values_R.index_select(0, gpu.place(torch.tensor(indices), values_R.device))


NOT_NUMBERS = "The model's logits for this request are not numbers (NaN). No token can be sampled."
_IS_INFINITE = "The model's logits for this request are infinite. No token can be sampled."
_NOTHING_LEFT = (
    "No token is left to sample: allowed_token_ids, bad_words, min_tokens and structured_outputs exclude the whole "
    "vocabulary."
)
_NO_DISTRIBUTION = "The model's logits for this request are not numbers (NaN) or infinite. No token can be sampled."
