"""Records the kernel calls of some code once, and repeats them without the Python code between them.

Two runs of the same layers on the same number of rows differ only in the values of their inputs. Python's work for each
kernel (checks, views, memory for results) takes 2 ms in a step of 28 layers: 7 % of a step on one row with bfloat16
weights of 0.6B parameters, and 19 % with 4-bit weights (benchmarks/NOTES.md, Zen 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.kernels import cpu
from quire.kernels.memory_piece import MemoryPiece

_ALIGNMENT = 64


class Arena:
    """Memory for the results of recorded calls. Its addresses stay valid as long as the arena lives.

    A piece is used again when its tensor is gone, as in a caching allocator. Several recordings may share an arena. But
    then nobody may read a result of one recording after another recording was repeated.
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


# A recorded run may do these things beside kernel calls: look at tensors, and make views of them.
_HARMLESS = {
    Tensor.data_ptr,
    Tensor.dim,
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.is_contiguous,
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.narrow,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.split_with_sizes,
    Tensor.stride,
    Tensor.view,
}


# These in-place computations of torch are recorded like kernel calls.
_IN_PLACE = {Tensor.add_, Tensor.clamp_, Tensor.copy_, Tensor.mul_}


class _Watch(TorchFunctionMode):
    """Takes memory from the arena, records some work of torch in place, and notices torch's other computations."""

    def __init__(self, arena: Arena, calls: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._arena, self._calls = arena, calls
        self.foreign: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        match args, kwargs:
            case [tuple(shape)], {"dtype": dtype, "device": _} if func is torch.empty and len(kwargs) == 2:
                return self._arena.empty(shape, dtype)
        if func in _IN_PLACE and not kwargs:
            self._calls.append(partial(func, *args))
            return func(*args)
        if func not in _HARMLESS:
            self.foreign = getattr(func, "__qualname__", str(func))
        return func(*args, **kwargs)


def record(run: Callable[[], Tensor], arena: Arena) -> tuple[Tensor, list[Callable[[], Any]] | None]:
    """Run code that computes on CPU tensors, and record its kernel calls.

    The inputs of `run` must stay at their addresses, and only operations on tensors may change them, because work of
    other libraries is not noticed. The caller keeps the inputs and the arena alive.

    Returns:
        The result of `run`, and calls that compute a new result in the same memory. The calls are None if torch itself
        has computed something.
    """
    with cpu.recorded_calls() as calls, _Watch(arena, calls) as watch:
        result = run()
    return result, calls if watch.foreign is None else None
