"""Keeps rows with a grammar to the tokens that it allows.

Dimensions: R rows of a call, M of them with a grammar, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.grammar.matchers import RowGrammar, token_masks
from quire.kernels import gpu, ops

# With at least this number of rows, a thread for the masks saves time. With 32 rows of a 0.6B model on 2 cores, masks
# after the forward pass made a step of 114 ms longer by 6 ms, and masks computed beside it by 4 ms. With one row, the
# hand-over to the thread costs 0.1 ms more than it saves (benchmarks/NOTES.md).
_ENOUGH_FOR_A_THREAD = 8


class GrammarMasks:
    """The tokens that the grammars of a call's rows allow next.

    Each grammar must have got all earlier tokens before. No grammar may get another token before `apply`.

    Args:
        rows: the rows of the call.
        before: see Sampler.launch. The rows of logits of a request come one after the other.
        thread: computes the masks of many rows beside the caller; None: they are computed here.
    """

    def __init__(
        self,
        rows: Sequence[int],
        grammars: dict[int, RowGrammar],
        before: Sequence[Sequence[int]],
        vocab_size: int,
        thread: Executor | None = None,
    ) -> None:
        self._asked: list[tuple[RowGrammar, int, Sequence[int]]] = []
        self._indices: list[int] = []  # the index of each mask in the call
        self._masks_MW: NDArray[np.int32] | Future[NDArray[np.int32]]
        for index, row in enumerate(rows):
            if (grammar := grammars.get(row)) is None:
                continue
            drafts = before[index] if before else ()
            if drafts:  # the longest mask of a row counts: it comes last
                self._asked[-1] = (grammar, self._asked[-1][1], drafts)
            else:
                self._asked.append((grammar, len(self._indices), ()))
            self._indices.append(index)
        work = (self._asked, len(self._indices), vocab_size)
        if thread is None or len(self._asked) < _ENOUGH_FOR_A_THREAD:
            self._masks_MW = token_masks(*work)
        else:
            self._masks_MW = thread.submit(token_masks, *work)

    def apply(self, logits_RV: Tensor) -> dict[int, str]:
        """Forbid in place the tokens that the grammars do not allow. `logits_RV[i]` belongs to `rows[i]`.

        Returns:
            The index in the call of each row whose grammar has failed, with the reason.
        """
        if not self._indices:
            return {}
        masks_MW = self._masks_MW.result() if isinstance(self._masks_MW, Future) else self._masks_MW
        device, rows_M = logits_RV.device, torch.tensor(self._indices, dtype=torch.int32)
        ops.forbid_tokens(logits_RV, gpu.place(torch.from_numpy(masks_MW), device), gpu.place(rows_M, device))
        return {
            self._indices[first]: error for grammar, first, _ in self._asked if (error := grammar.error) is not None
        }
