"""Attention over a KV cache that several ranks share.

Dimensions: T tokens, H query heads of this rank, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.paged import PagedAttention
from quire.distributed.group import Group
from quire.forward_batch import ForwardBatch, LayerCache


class DividedAttention(PagedAttention):
    """PagedAttention for ranks that share one KV cache: each rank has some pages of it (context parallelism).

    Every rank gets the queries of all its neighbours and attends to its own pages. `Group.attend` joins the results.

    Args:
        heads: the number of query heads of each rank of the group.
        num_owners: the number of neighbouring ranks that share one cache.
    """

    def __init__(self, spec: AttentionSpec, group: Group, heads: Sequence[int], num_owners: int) -> None:
        super().__init__(spec)
        self._group, self._heads, self._num_owners = group, tuple(heads), num_owners
        first = group.rank - group.rank % num_owners
        self._before, self._together = sum(heads[:first]), sum(heads[first : first + num_owners])

    def forward(self, q_THE: Tensor, cache: LayerCache, batch: ForwardBatch, sinks_H: Tensor | None = None) -> Tensor:
        T, H, E = q_THE.shape
        all_TW = self._group.gather(q_THE.view(T, H * E), [count * E for count in self._heads])
        own = all_TW.narrow(1, self._before * E, self._together * E).view(T, self._together, E)
        return self._group.attend(own, cache, batch, self._rule, self._heads, self._num_owners, sinks_H)
