"""A stage of a pipeline has no embeddings: it receives the residual stream of the stage before it.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.group import Link
from quire.layers.embedding import Lookup


class ReceivedRows(Lookup):
    """The rows that another rank sends, one for each token, whichever it is."""

    def __init__(self, link: Link, hidden_size: int, dtype: torch.dtype) -> None:
        self._link, self._hidden_size, self._dtype = link, hidden_size, dtype

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        return self._link.receive(len(token_ids_T), self._hidden_size, self._dtype)
