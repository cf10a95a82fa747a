"""Memory that runs out at one allocation of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode


class FailingAllocations(TorchDispatchMode):
    """The k-th tensor operation or numpy array of a step finds no memory."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.num_left = k
        self._numpy = {name: getattr(np, name) for name in ("zeros", "empty", "repeat", "array", "flatnonzero")}

    def count(self, error: Exception) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> FailingAllocations:
        for name, function in self._numpy.items():
            setattr(np, name, self._counted(function))
        super().__enter__()
        return self

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count(MemoryError("Unable to allocate 9 bytes"))
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for name, function in self._numpy.items():
            setattr(np, name, function)
