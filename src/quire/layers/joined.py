"""Layers that are cut over ranks by their outputs. Ranks join the inputs before such a layer, and the outputs after it.

Dimensions: T tokens, K in-features, N out-features, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.distributed.group import Gathering, Group
from quire.kernels.fp8 import Rows
from quire.layer_spec.cuts import Share
from quire.layers.embedding import Lookup
from quire.layers.linear import Projection
from quire.layers.norm import RMSNorm


class JoinedLinear:
    """A linear layer of several ranks: each brings some in-features and computes some out-features.

    All ranks get all out-features.

    Args:
        keeps_part: whether each rank gets only its own out-features.
    """

    def __init__(self, linear: Projection, share: Share, group: Group, *, keeps_part: bool = False) -> None:
        self._linear, self._inputs, self._outputs, self._group = linear, share.inputs, share.widths(0), group
        self._keeps_part = keeps_part

    def __call__(self, x_TK: Rows, *, adapter_slots_T: Tensor | None = None) -> Tensor:
        """[T, K of this rank] -> [T, N]."""
        assert isinstance(x_TK, Tensor), "it quantizes no rows"
        part_TN = self._linear(self._group.gather(x_TK, self._inputs), adapter_slots_T=adapter_slots_T)
        return part_TN if self._keeps_part else self._group.gather(part_TN, self._outputs)

    def quantizes(self, x: Tensor) -> bool:
        """See Linear. It is false, because ranks join rows that are not quantized."""
        return False


class JoinedNorm:
    """A norm over the heads of all ranks. Every rank computes the whole norm and keeps the columns of its heads."""

    def __init__(self, norm: RMSNorm, share: Share, shard: int, group: Group) -> None:
        self._norm, self._own, self._widths, self._group = norm, share.own_rows(shard), share.widths(shard), group

    def __call__(self, x_TN: Tensor) -> Tensor:
        """The columns of this rank, normed."""
        all_TN = self._group.gather(x_TN, self._widths)
        return self._norm(all_TN, out=all_TN).narrow(1, self._own.start, len(self._own))


class JoinedLookup(Lookup):
    """A Lookup of several ranks: each has the rows of some tokens, and all ranks get all rows that are asked for.

    Args:
        lookup: looks this rank's rows up: int64 numbers of own rows [T] -> [T, D].
    """

    def __init__(
        self, lookup: Callable[[Tensor], Tensor], share: Share, group: Gathering, device: torch.device
    ) -> None:
        self._lookup, self._own, self._group = lookup, share.own_rows(0), group
        self._starts = torch.tensor([rows.start for rows in share.rows[0][1:]], device=device)

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        own_TD = self._lookup(token_ids_T.clamp(self._own.start, self._own.stop - 1) - self._own.start)
        T, D = own_TD.shape
        all_TRD = self._group.gather(own_TD, [D] * self._group.size).view(T, self._group.size, D)
        ranks_T = torch.bucketize(token_ids_T, self._starts, right=True)
        return all_TRD.gather(1, ranks_T.view(T, 1, 1).expand(T, 1, D))[:, 0]
