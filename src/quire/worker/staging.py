"""Staging memory: the host writes the numbers of a step into pinned memory, and one copy brings them to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from quire.worker.accelerator import Accelerator, Event

ALIGNMENT = 16  # bytes: the alignment that kernels expect


def padded(num_bytes: int) -> int:
    """`num_bytes`, rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Staging:
    """StepArrays with one buffer on the device and several on the host: one is filled while others are being copied.

    Arrays lie one after the other. So arrays of the same shapes in the same order have the same addresses on the device
    in every step. The arrays of a step stay until the next `send`. The device copies after all earlier launches.

    Args:
        num_bytes: the bytes of all arrays of a step, each `padded`.
        num_buffers: the number of buffers on the host. With one more than steps in flight, no step waits for a copy.
    """

    def __init__(self, accelerator: Accelerator, num_bytes: int, num_buffers: int) -> None:
        self._accelerator = accelerator
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._buffers = [accelerator.pinned(num_bytes) for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied: list[Event | None] = [None] * num_buffers
        self._current, self._offset = 0, 0
        self._views: dict[tuple[int, int, Any], Tensor] = {}  # kept because making a view takes microseconds

    def begin(self) -> None:
        """Begin to fill the next buffer. It waits until the last copy from this buffer is done."""
        self._current = (self._current + 1) % len(self._buffers)
        if (copied := self._copied[self._current]) is not None:
            copied.synchronize()
        self._offset = 0

    def array(self, count: int, dtype: DTypeLike) -> tuple[NDArray[Any], Tensor]:
        """See StepArrays."""
        numpy_dtype = np.dtype(dtype)
        begin, end = self._offset, self._offset + count * numpy_dtype.itemsize
        self._offset = padded(end)
        assert self._offset <= len(self._on_device), f"a step of more than {len(self._on_device)} bytes"
        key = (begin, count, numpy_dtype)
        if (view := self._views.get(key)) is None:
            view = self._on_device[begin:end].view(getattr(torch, numpy_dtype.name))
            if len(self._views) < _MOST_VIEWS:
                self._views[key] = view
        return self._arrays[self._current][begin:end].view(numpy_dtype), view

    def send(self) -> None:
        """Start the copy of all arrays since `begin`."""
        host = self._buffers[self._current][: self._offset]
        self._copied[self._current] = self._accelerator.upload(host, self._on_device[: self._offset])


_MOST_VIEWS = 4096  # a limit, because steps of prompts have many sizes
