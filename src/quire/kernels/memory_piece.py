"""Memory that can be used again when its tensor is gone."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor


class MemoryPiece:
    """Some memory (uint8) that knows whether a tensor is in it."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._user: weakref.ref[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]. All views of the tensor share its storage, and the storage holds the watched array."""
        array = self._memory[:num_bytes]
        self._user = weakref.ref(array)
        return torch.from_numpy(array)
