"""The input of a pipeline stage without embeddings: it receives the residual stream of the previous stage.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.group import Link
from quire.layers.embedding import Lookup


class ReceivedRows(Lookup):
    """A Lookup that receives the rows from another rank, one for each token. The token ids do not matter."""

    def __init__(self, link: Link, hidden_size: int, dtype: torch.dtype) -> None:
        self._link, self._hidden_size, self._dtype = link, hidden_size, dtype

    def _rows(self, token_ids_T: Tensor) -> Tensor:
        return self._link.receive(len(token_ids_T), self._hidden_size, self._dtype)
