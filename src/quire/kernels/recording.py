"""The kernel calls of a piece of code, recorded once and repeated without the Python between them.

Two runs of the same layers on the same number of rows differ only in what their inputs hold. What Python does for each
kernel (checks, views, memory for results) comes to 2 ms a step of 28 layers: 7 % of a step on one row with bfloat16
weights of 0.6B parameters, 19 % with 4-bit ones (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.kernels import cpu
from quire.kernels.memory_piece import MemoryPiece

_ALIGNMENT = 64


class Arena:
    """Memory for results of recorded calls, whose addresses stay valid for as long as the arena lives.

    A piece is handed out again when no tensor is in it any more, as a caching allocator would. Several recordings may
    share an arena if no result of one is read after another was repeated.
    """

    def __init__(self) -> None:
        self._pieces: list[MemoryPiece] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        free = (piece for piece in self._pieces if piece.is_free)
        piece = next((piece for piece in free if num_bytes <= len(piece) <= 2 * num_bytes), None)
        if piece is None:
            memory = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
            begin = -memory.ctypes.data % _ALIGNMENT
            piece = MemoryPiece(memory[begin : begin + num_bytes])
            self._pieces.append(piece)
        return piece.take(num_bytes).view(dtype).view(shape)


# What a recorded run may do beside kernels: look at tensors, and make views of them.
_HARMLESS = {
    Tensor.dim,
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.is_contiguous,
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.split_with_sizes,
    Tensor.stride,
    Tensor.view,
}


class _Watch(TorchFunctionMode):
    """Takes memory from the arena, and notices work of torch's that is no kernel of ours."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.foreign: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match args, kwargs:
            case [tuple(shape)], {"dtype": dtype, "device": _} if func is torch.empty and len(kwargs) == 2:
                return self._arena.empty(shape, dtype)
        if func not in _HARMLESS:
            self.foreign = getattr(func, "__qualname__", str(func))
        return func(*args, **kwargs)


def record(run: Callable[[], Tensor], arena: Arena) -> tuple[Tensor, list[Callable[[], Any]] | None]:
    """The result of `run`, which computes on CPU tensors, and the calls that write it anew into the same memory.

    None instead of the calls: torch did something else than make views. What `run` reads has to stay where it is, and
    may be made of tensors only: what other libraries compute is not noticed. The caller keeps it alive, and the arena.
    """
    with cpu.recorded_calls() as calls, _Watch(arena) as watch:
        result = run()
    return result, calls if watch.foreign is None else None
