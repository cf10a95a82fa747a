"""Limits on the tokens of a row: allowed_token_ids, bad_words, min_tokens, thinking_token_budget; and logit_bias.

Dimensions: R rows of a call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.kernels import gpu
from quire.sampling.bad_words import BadWords
from quire.sampling.thinking import ThinkingBudget
from quire.sampling_params import SamplingParams


class RowFilter:
    """One row's constraints, and the progress of its output through forbidden words."""

    def __init__(
        self,
        allowed_ids: Tensor | None,
        bad_words: BadWords | None,
        stop_ids: Tensor | None,
        num_tokens_to_min: int,
        bias: tuple[Tensor, Tensor] | None,
        thinking: ThinkingBudget | None,
    ) -> None:
        self.allowed_ids = allowed_ids
        self.bad_words = bad_words
        self.forbidden_ids = torch.tensor(bad_words.always) if bad_words is not None and bad_words.always else None
        self.stop_ids = stop_ids
        self.num_tokens_to_min = num_tokens_to_min  # output tokens still missing to min_tokens
        self.bias = bias
        self.thinking = thinking

    @classmethod
    def of(
        cls, params: SamplingParams, output_token_ids: Sequence[int], stop_token_ids: Iterable[int], vocab_size: int
    ) -> RowFilter | None:
        """The filter of a request, or None if nothing constrains it (any longer)."""
        sequences = params.bad_words_token_ids or []
        has_bad_words = bool(sequences) or params.bad_words_spelled is not None
        missing = params.min_tokens - len(output_token_ids)
        # An end-of-sequence id beyond the logits cannot be sampled, so it need not be forbidden.
        stop_ids = [token_id for token_id in stop_token_ids if token_id < vocab_size] if missing > 0 else []
        thinking = ThinkingBudget.of(params, output_token_ids)
        if not (params.allowed_token_ids or has_bad_words or stop_ids or params.logit_bias or thinking is not None):
            return None
        bias = params.logit_bias
        return cls(
            allowed_ids=torch.tensor(params.allowed_token_ids) if params.allowed_token_ids else None,
            bad_words=BadWords(params.bad_words_spelled, sequences, output_token_ids, vocab_size)
            if has_bad_words
            else None,
            stop_ids=torch.tensor(stop_ids) if stop_ids else None,
            num_tokens_to_min=max(missing, 0),
            bias=(torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)) if bias else None,
            thinking=thinking,
        )

    @property
    def needs_tokens(self) -> bool:
        """Whether the forbidden tokens depend on the output so far."""
        return (
            self.num_tokens_to_min > 0
            or (self.bad_words is not None and self.bad_words.needs_tokens)
            or (self.thinking is not None and self.thinking.needs_tokens)
        )

    def append(self, token_id: int) -> None:
        """Record a token of the output."""
        self.num_tokens_to_min -= 1
        if self.bad_words is not None:
            self.bad_words.append(token_id)
        if self.thinking is not None:
            self.thinking.append(token_id)

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next: `apply` leaves its logit finite."""
        return not (
            (self.allowed_ids is not None and token_id not in self.allowed_ids)
            or (self.forbidden_ids is not None and token_id in self.forbidden_ids)
            or (self.bad_words is not None and token_id in self.bad_words.forbidden_after(()))
            or (self.stop_ids is not None and self.num_tokens_to_min > 0 and token_id in self.stop_ids)
            or (self.thinking is not None and self.thinking.forced_after(()) not in (None, token_id))
        )

    def apply(self, logits_V: Tensor, before: Sequence[int] = ()) -> None:
        """Modify one row's logits in place. The order is vLLM's: allowed, bad words, min_tokens, bias, thinking.

        Args:
            before: drafts; the row is filtered as if they were appended to the output.
        """
        device = logits_V.device
        if self.allowed_ids is not None:
            allowed_ids = gpu.place(self.allowed_ids, device)
            kept = logits_V[allowed_ids]
            logits_V.fill_(-math.inf)
            logits_V[allowed_ids] = kept
        if self.forbidden_ids is not None:
            logits_V[gpu.place(self.forbidden_ids, device)] = -math.inf
        if self.bad_words is not None and (now := self.bad_words.forbidden_after(before)):
            logits_V[gpu.place(torch.tensor(now), device)] = -math.inf
        if self.stop_ids is not None and self.num_tokens_to_min > len(before):
            logits_V[gpu.place(self.stop_ids, device)] = -math.inf
        if self.bias is not None:
            ids, values = (gpu.place(x, device) for x in self.bias)
            logits_V[ids] += values
        if self.thinking is not None and (forced := self.thinking.forced_after(before)) is not None:
            kept = logits_V[forced].clone()
            logits_V.fill_(-math.inf)
            logits_V[forced] = kept


def apply_filters(
    logits_RV: Tensor, rows: Sequence[int], filters: dict[int, RowFilter], before: Sequence[Sequence[int]] = ()
) -> None:
    """Constrain in place the rows with a filter. `logits_RV[i]` belongs to `rows[i]`; `before`: see Sampler."""
    for index, row in enumerate(rows):
        if (row_filter := filters.get(row)) is not None:
            row_filter.apply(logits_RV[index], before[index] if before else ())
