"""Sampling on ranks that share a model: each rank samples some rows, and all ranks get all results.

Dimensions: R rows of a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.distributed.group import AgreedError, Group
from quire.sampling.batch_params import SamplingState
from quire.sampling.grammars import GrammarMasks
from quire.sampling.sampler import LaunchedTokens, SampledTokens, Sampler


@dataclass(slots=True)
class JoinedTokens(LaunchedTokens):
    """Tokens that all ranks have on the host."""

    sampled: SampledTokens = field(kw_only=True)

    def tensors(self) -> list[Tensor]:
        return []

    def finish(self, on_host: Iterator[Tensor]) -> SampledTokens:
        return self.sampled


class ShardedSampler(Sampler):
    """A Sampler of one of several ranks. A token depends on its own row alone, so any rank may sample it.

    Rows with a grammar belong to the first rank, because only it has their grammars.

    Args:
        group: the ranks of the last stage.
    """

    def __init__(self, state: SamplingState, logprobs_mode: str, group: Group) -> None:
        super().__init__(state, logprobs_mode)
        self._group = group

    def owners(self, rows: Sequence[int]) -> Tensor:
        """The rank that samples each row, int32. Ranks have equal numbers of rows up to one, apart from grammars."""
        return torch.from_numpy(self._owners(rows))

    def start_masks(self, rows: Sequence[int], before: Sequence[Sequence[int]] = ()) -> GrammarMasks:
        own = self._own(self._owners(rows))
        return super().start_masks(_of(rows, own), _of(before, own))

    def launch(
        self,
        logits_RV: Tensor,
        rows: Sequence[int],
        parameters: Sequence[Tensor],
        before: Sequence[Sequence[int]] = (),
        masks: GrammarMasks | None = None,
    ) -> JoinedTokens:
        """See Sampler.launch. An error becomes an AgreedError, because other stages have ended the step.

        Args:
            logits_RV: the logits of the rows that this rank owns, in their order.
        """
        owners_R = self._owners(rows)
        own, sampled = self._own(owners_R), SampledTokens([])
        try:
            if own:
                given = [parameter[own] for parameter in parameters]
                launched = super().launch(logits_RV, _of(rows, own), given, _of(before, own), masks)
                sampled = launched.finish(iter(launched.tensors()))
        except Exception as error:
            raise AgreedError(str(error)) from error
        joined = self._joined(owners_R, sampled)
        return JoinedTokens(torch.tensor(joined.token_ids), torch.empty(0), sampled=joined)

    def _owners(self, rows: Sequence[int]) -> NDArray[np.int32]:
        constrained, size = self.state.constrained, self._group.size
        if constrained.isdisjoint(rows):
            return np.arange(len(rows), dtype=np.int32) % size
        counts, owners_R = [0] * size, np.zeros(len(rows), dtype=np.int32)
        counts[0] = sum(row in constrained for row in rows)
        for index, row in enumerate(rows):
            if row not in constrained:
                owners_R[index] = owner = counts.index(min(counts))
                counts[owner] += 1
        return owners_R

    def _own(self, owners_R: NDArray[np.int32]) -> list[int]:
        own: list[int] = np.flatnonzero(owners_R == self._group.rank).tolist()
        return own

    def _joined(self, owners_R: NDArray[np.int32], sampled: SampledTokens) -> SampledTokens:
        """The results of all ranks, from the results of this one."""
        group, told = self._group, torch.frombuffer(bytearray(_encode(sampled)), dtype=torch.uint8)
        lengths = group.gather(torch.tensor([[len(told)]]), [1] * group.size)[0].tolist()
        parts = torch.split(group.gather(told[None], lengths)[0], lengths)
        joined = SampledTokens([0] * len(owners_R))
        for rank, part in enumerate(parts):
            of_rank, indices = _decode(part.numpy().tobytes()), np.flatnonzero(owners_R == rank).tolist()
            for index, token_id in zip(indices, of_rank.token_ids, strict=True):
                joined.token_ids[index] = token_id
            joined.logprobs |= {indices[own]: logprobs for own, logprobs in of_rank.logprobs.items()}
            joined.errors |= {indices[own]: why for own, why in of_rank.errors.items()}
            joined.error_codes |= {indices[own]: code for own, code in of_rank.error_codes.items()}
        return joined


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SampledTokens).decode


T = TypeVar("T")


def _of(values: Sequence[T], indices: list[int]) -> list[T]:
    """Some items of a sequence. An empty sequence stays empty."""
    return [values[index] for index in indices] if values else []
