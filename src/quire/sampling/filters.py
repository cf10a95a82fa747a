"""Which tokens a row may sample at all: allowed_token_ids, bad_words, min_tokens, and the additive logit_bias.

Dimensions: R rows of a call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.kernels import gpu
from quire.sampling_params import SamplingParams


class RowFilter:
    """One row's constraints and the end of its output, which multi-token bad words are compared with."""

    def __init__(
        self,
        allowed_ids: Tensor | None,
        forbidden_ids: Tensor | None,
        bad_sequences: list[tuple[list[int], int]],
        stop_ids: Tensor | None,
        num_tokens_to_min: int,
        bias: tuple[Tensor, Tensor] | None,
        output_tail: list[int],
    ) -> None:
        self.allowed_ids = allowed_ids
        self.forbidden_ids = forbidden_ids  # bad words of one token
        self.bad_sequences = bad_sequences  # (ids before, last id)
        self.stop_ids = stop_ids
        self.num_tokens_to_min = num_tokens_to_min  # output tokens still missing to min_tokens
        self.bias = bias
        self.output_tail = output_tail
        self.max_tail = max((len(before) for before, _ in bad_sequences), default=0)

    @classmethod
    def of(
        cls, params: SamplingParams, output_token_ids: Sequence[int], stop_token_ids: Iterable[int], vocab_size: int
    ) -> RowFilter | None:
        """The filter of a request, or None if nothing constrains it (any more)."""
        sequences = params.bad_words_token_ids or []
        single = [ids[0] for ids in sequences if len(ids) == 1]
        multiple = [(ids[:-1], ids[-1]) for ids in sequences if len(ids) > 1]
        missing = params.min_tokens - len(output_token_ids)
        # An end-of-sequence id beyond the logits cannot be sampled, so there is nothing to forbid.
        stop_ids = [token_id for token_id in stop_token_ids if token_id < vocab_size] if missing > 0 else []
        if not (params.allowed_token_ids or sequences or stop_ids or params.logit_bias):
            return None
        bias = params.logit_bias
        tail = max((len(before) for before, _ in multiple), default=0)
        return cls(
            allowed_ids=torch.tensor(params.allowed_token_ids) if params.allowed_token_ids else None,
            forbidden_ids=torch.tensor(single) if single else None,
            bad_sequences=multiple,
            stop_ids=torch.tensor(stop_ids) if stop_ids else None,
            num_tokens_to_min=max(missing, 0),
            bias=(torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)) if bias else None,
            output_tail=list(output_token_ids[-tail:]) if tail else [],
        )

    @property
    def needs_tokens(self) -> bool:
        """Whether what it forbids depends on the output so far."""
        return bool(self.max_tail) or self.num_tokens_to_min > 0

    def append(self, token_id: int) -> None:
        """Record a sampled token."""
        self.num_tokens_to_min -= 1
        if self.max_tail:
            self.output_tail.append(token_id)
            del self.output_tail[: -self.max_tail]

    def apply(self, logits_V: Tensor) -> None:
        """Modify one row's logits in place. The order is vLLM's: allowed, bad words, min_tokens, bias."""
        device = logits_V.device
        if self.allowed_ids is not None:
            allowed_ids = gpu.place(self.allowed_ids, device)
            kept = logits_V[allowed_ids]
            logits_V.fill_(-math.inf)
            logits_V[allowed_ids] = kept
        if self.forbidden_ids is not None:
            logits_V[gpu.place(self.forbidden_ids, device)] = -math.inf
        for before, last in self.bad_sequences:
            if self.output_tail[-len(before) :] == before:
                logits_V[last] = -math.inf
        if self.stop_ids is not None and self.num_tokens_to_min > 0:
            logits_V[gpu.place(self.stop_ids, device)] = -math.inf
        if self.bias is not None:
            ids, values = (gpu.place(x, device) for x in self.bias)
            logits_V[ids] += values


def apply_filters(logits_RV: Tensor, rows: Sequence[int], filters: dict[int, RowFilter]) -> None:
    """Constrain in place the rows that have a filter: `logits_RV[i]` belongs to `rows[i]`."""
    for index, row in enumerate(rows):
        if (row_filter := filters.get(row)) is not None:
            row_filter.apply(logits_RV[index])
