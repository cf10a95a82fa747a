"""Counts the bytes of tensors that live at the same time while some code runs."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBuffers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results of torch's functions. A result counts from its call until its last reference is gone.

    Views do not count, because they have no memory of their own.

    Attributes:
        num_bytes: the bytes that live now.
        peak_bytes: the most bytes that lived at the same time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes: int = 0
        self.peak_bytes: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch not load its compiler, which would take a second of each start. Nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for tensor in tree_leaves(result):  # a view, and a tensor that was written to, have the memory of an argument
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._drop, num_bytes)

    def _drop(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
