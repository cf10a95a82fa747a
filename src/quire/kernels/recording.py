"""The kernel calls of a piece of code, recorded once and repeated without the Python between them.

Two runs of the same layers on the same number of rows differ only in what their inputs hold. What Python does for each
kernel (checks, views, memory for results) comes to 2 ms a step of 28 layers: 7 % of a step on one row with bfloat16
weights of 0.6B parameters, 19 % with 4-bit ones (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.kernels import cpu

_ALIGNMENT = 64
_FREE_REFERENCES = 3  # to a piece that no tensor is in: the list's, the loop's and getrefcount's


class Arena:
    """Memory for results of recorded calls, whose addresses stay valid for as long as the arena lives.

    A piece is handed out again when no tensor is in it any more, as a caching allocator would. Several recordings may
    share an arena if no result of one is read after another was repeated.
    """

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._take(num_bytes))[:num_bytes].view(dtype).view(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        for piece in self._pieces:
            if num_bytes <= piece.nbytes <= 2 * num_bytes and sys.getrefcount(piece) == _FREE_REFERENCES:
                return piece
        memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        self._pieces.append(memory[begin : begin + num_bytes])
        return self._pieces[-1]


# What a recorded run may do beside kernels: look at tensors, and make views of them.
_HARMLESS = {
    Tensor.data_ptr,
    Tensor.dim,
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.is_contiguous,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.split_with_sizes,
    Tensor.stride,
    Tensor.view,
}


class _Watch(TorchFunctionMode):
    """Takes memory from the arena, and notices work that is no kernel of ours."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.foreign: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return self._arena.empty(args[0], kwargs["dtype"])
        if func not in _HARMLESS:
            self.foreign = getattr(func, "__qualname__", str(func))
        return func(*args, **kwargs)


def record(run: Callable[[], Tensor], arena: Arena) -> tuple[Tensor, list[Callable[[], Any]] | None]:
    """The result of `run`, which computes on CPU tensors, and the calls that write it anew into the same memory.

    None instead of the calls: something else than views and the compiled kernels was at work. The caller keeps alive
    whatever `run` reads, and the arena.
    """
    with cpu.recorded_calls() as calls, _Watch(arena) as watch:
        result = run()
    return result, calls if watch.foreign is None else None
