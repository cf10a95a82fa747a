"""Sampling on ranks that share a model: the first one samples, the others learn its tokens.

Dimensions: R rows of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import AgreedError, Group
from quire.sampling.batch_params import SamplingState
from quire.sampling.grammars import GrammarMasks
from quire.sampling.sampler import LaunchedTokens, Sampler


class SharedSampler(Sampler):
    """A Sampler of one of several ranks. All ranks know the tokens and the failed rows; the first one also knows the
    reasons.

    Args:
        group: the ranks of the last stage; None: there is one, and the other stages need not know at once.
    """

    def __init__(self, state: SamplingState, logprobs_mode: str, group: Group | None) -> None:
        super().__init__(state, logprobs_mode)
        self._group, self._is_first = group, group is None or group.rank == 0

    def host_parameters(
        self, rows: NDArray[np.int64], offsets_R: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[Any], ...]:
        return super().host_parameters(rows, offsets_R) if self._is_first else ()

    def launch(
        self,
        logits_RV: Tensor,
        rows: Sequence[int],
        parameters: Sequence[Tensor],
        before: Sequence[Sequence[int]] = (),
        masks: GrammarMasks | None = None,
    ) -> LaunchedTokens:
        """As Sampler.launch. An error of the first rank becomes an AgreedError: other stages have ended the step."""
        if not self._is_first:
            told_R2 = self._tell(torch.empty((len(rows), 0), dtype=torch.int64))
            chosen_R = torch.zeros(len(rows)).masked_fill_(told_R2[:, 1] != 0, torch.nan)
            return LaunchedTokens(told_R2[:, 0].contiguous(), chosen_R)
        try:
            launched = super().launch(logits_RV, rows, parameters, before, masks)
        except Exception as error:
            raise AgreedError(str(error)) from error
        has_error_R = ~launched.chosen_R.isfinite() | (launched.token_ids_R < 0)
        has_error_R[list(launched.failed)] = True
        self._tell(torch.stack([launched.token_ids_R, has_error_R.long()], 1))
        return launched

    def _tell(self, part: Tensor) -> Tensor:
        if self._group is None:
            return part
        return self._group.gather(part, [2] + [0] * (self._group.size - 1))
