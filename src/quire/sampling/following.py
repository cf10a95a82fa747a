"""Sampling on ranks that share a model: the first rank samples, and the others learn its tokens.

If many rows are sampled and all are greedy, each rank finds the highest logit among its own tokens. Then no logits are
sent to the first rank. For 32 rows and 152,000 tokens, sending them took 4 of 40 ms of a step (benchmarks/NOTES.md).

Dimensions: R rows of a call, V vocabulary, G ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import AgreedError, Group
from quire.layer_spec.cuts import Share
from quire.sampling.batch_params import SamplingState
from quire.sampling.grammars import GrammarMasks
from quire.sampling.sampler import NOT_NUMBERS, LaunchedTokens, Sampler

# With fewer rows, it costs less to join logits than to exchange the highest ones. Measured with two ranks, as speed
# over that of one process: one row had 0.88 with highest logits and 0.96 with joined ones. With 8 and 32 rows, the
# exchange of highest logits was faster (benchmarks/NOTES.md).
FEWEST_OF_PARTS = 8


class SharedSampler(Sampler):
    """The Sampler of one of several ranks. All ranks know the tokens and the failed rows; only the first knows reasons.

    Args:
        group: the ranks of the last stage; None: the last stage has one rank, and other stages learn the tokens later.
        vocab_share: the tokens of each rank of the group; None: every rank computes the logits of all tokens.
    """

    def __init__(
        self, state: SamplingState, logprobs_mode: str, group: Group | None, vocab_share: Share | None
    ) -> None:
        super().__init__(state, logprobs_mode)
        self._group, self._is_first = group, group is None or group.rank == 0
        own = None if vocab_share is None else vocab_share.own_rows(0)
        self._first_token = 0 if own is None else own.start
        self._has_parts = vocab_share is not None and min(vocab_share.widths(0)) > 0

    def takes_parts(self, rows: Sequence[int]) -> bool:
        is_possible = self._group is not None and self._has_parts
        return is_possible and len(rows) >= FEWEST_OF_PARTS and self.state.are_greedy(rows)

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
        """See Sampler.launch. An error of a rank that samples becomes an AgreedError, because other stages have ended
        the step.

        Args:
            logits_RV: with `takes_parts`, the logits of the tokens that this rank has.
        """
        if self.takes_parts(rows):
            return self._launch_greedy(logits_RV, rows)
        if not self._is_first:
            told_R2 = self._tell(logits_RV.new_empty((len(rows), 0), dtype=torch.int64))
            chosen_R = torch.zeros_like(told_R2[:, 0], dtype=torch.float32).masked_fill_(told_R2[:, 1] != 0, torch.nan)
            return LaunchedTokens(told_R2[:, 0].contiguous(), chosen_R)
        try:
            launched = super().launch(logits_RV, rows, parameters, before, masks)
        except Exception as error:
            raise AgreedError(str(error)) from error
        has_error_R = ~launched.chosen_R.isfinite() | (launched.token_ids_R < 0)
        if launched.failed:
            has_error_R[list(launched.failed)] = True
        self._tell(torch.stack([launched.token_ids_R, has_error_R.long()], 1))
        return launched

    def _launch_greedy(self, logits_RV: Tensor, rows: Sequence[int]) -> LaunchedTokens:
        """Sample greedily on all ranks, from the logits of each rank's tokens. The first rank wins ties, because ranks
        have tokens in ascending order.
        """
        assert self._group is not None
        try:
            token_ids_R, highest_R = self.choose(logits_RV, rows, ())
        except Exception as error:
            raise AgreedError(str(error)) from error
        highest_R = highest_R.masked_fill(token_ids_R < 0, torch.nan)
        # float64 holds both exactly.
        told_R2 = torch.stack([highest_R.double(), (token_ids_R + self._first_token).double()], 1)
        size = self._group.size
        told_RG2 = self._group.gather(told_R2, [2] * size).view(-1, size, 2)
        winners_R1 = told_RG2[:, :, 0].argmax(1, keepdim=True)  # NaN counts as the highest, and of equals the first
        chosen_R, token_ids_R = (told_RG2[:, :, i].gather(1, winners_R1)[:, 0] for i in (0, 1))
        is_nan_R = chosen_R.isnan()
        # A GPU would have to be waited for.
        failed = is_nan_R.nonzero()[:, 0].tolist() if logits_RV.device.type == "cpu" else ()
        reasons = dict.fromkeys(failed, NOT_NUMBERS)
        return LaunchedTokens(token_ids_R.long().masked_fill(is_nan_R, -1), chosen_R.float(), reasons=reasons)

    def _tell(self, part: Tensor) -> Tensor:
        if self._group is None:
            return part
        return self._group.gather(part, [2] + [0] * (self._group.size - 1))
