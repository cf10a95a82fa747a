"""Sparse presence, frequency and repetition penalties: a row costs its number of distinct tokens, never V.

Definitions (vLLM's and OpenAI's): with c the count of a token in the output,
    repetition: logit / r if logit > 0 else logit * r     for tokens in the prompt or the output
    then        logit - frequency * c - presence * (c > 0)

Dimensions: R rows of a call, V vocabulary, N distinct tokens of the penalised rows of a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import gpu
from quire.sampling_params import SamplingParams


class RowPenalties:
    """One row's penalties, and the counts of penalised tokens in its output."""

    def __init__(self, params: SamplingParams, counts: dict[int, int]) -> None:
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.num_tokens = len(counts)
        capacity = max(64, 2 * self.num_tokens)
        self.token_ids = np.zeros(capacity, dtype=np.int64)
        self.counts = np.zeros(capacity, dtype=np.float32)  # counts in the output; 0: only in the prompt
        self.token_ids[: self.num_tokens] = list(counts)
        self.counts[: self.num_tokens] = list(counts.values())
        self._index_of = {token_id: index for index, token_id in enumerate(counts)}

    @classmethod
    def of(
        cls, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> RowPenalties | None:
        """The penalties of a request, or None if it has none."""
        repeats = params.repetition_penalty != 1.0
        if not (repeats or params.frequency_penalty or params.presence_penalty):
            return None
        counts = dict.fromkeys(prompt_token_ids, 0) if repeats else {}
        return cls(params, counts | Counter(output_token_ids))

    def append(self, token_id: int) -> None:
        """Count a sampled token."""
        index = self._index_of.get(token_id)
        if index is not None:
            self.counts[index] += 1
            return
        if self.num_tokens == len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self._index_of[token_id] = self.num_tokens
        self.token_ids[self.num_tokens] = token_id
        self.counts[self.num_tokens] = 1
        self.num_tokens += 1

    def counted(self, before: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct penalised tokens and their counts in the output and `before`."""
        token_ids, counts = self.token_ids[: self.num_tokens], self.counts[: self.num_tokens]
        if not before:
            return token_ids, counts
        counts, new = counts.copy(), Counter[int]()
        for token_id in before:
            if (index := self._index_of.get(token_id)) is None:
                new[token_id] += 1
            else:
                counts[index] += 1
        new_ids, new_counts = np.array(list(new), dtype=np.int64), np.array(list(new.values()), dtype=np.float32)
        return np.concatenate([token_ids, new_ids]), np.concatenate([counts, new_counts])


def apply_penalties(
    logits_RV: Tensor, rows: Sequence[int], penalties: dict[int, RowPenalties], before: Sequence[Sequence[int]] = ()
) -> None:
    """Apply the penalties of rows in place. `logits_RV[i]` belongs to `rows[i]`; `before`: see Sampler."""
    found = [(index, penalties[row]) for index, row in enumerate(rows) if row in penalties]
    if not found:
        return
    counted = [row.counted(before[index] if before else ()) for index, row in found]
    lengths = [len(token_ids) for token_ids, _ in counted]

    def on_device(array: NDArray[Any]) -> Tensor:
        return gpu.place(torch.from_numpy(array), logits_RV.device)

    def per_token(values: list[float] | list[int], dtype: type) -> Tensor:
        return on_device(np.repeat(np.array(values, dtype=dtype), lengths))

    index_N = per_token([index for index, _ in found], np.int64)
    repetition_N = per_token([row.repetition for _, row in found], np.float32)
    frequency_N = per_token([row.frequency for _, row in found], np.float32)
    presence_N = per_token([row.presence for _, row in found], np.float32)
    token_ids_N = on_device(np.concatenate([token_ids for token_ids, _ in counted]))
    counts_N = on_device(np.concatenate([counts for _, counts in counted]))
    logits_N = logits_RV[index_N, token_ids_N]
    logits_N = torch.where(logits_N > 0, logits_N / repetition_N, logits_N * repetition_N)
    logits_N -= frequency_N * counts_N
    logits_N -= presence_N * (counts_N > 0)
    logits_RV[index_N, token_ids_N] = logits_N
