"""Which tensors the GPU kernels take. They are imported on first use: without a GPU, Triton need not be installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_is_deterministic = False


def be_deterministic() -> None:
    """From now on, kernels are chosen of which a row's bits depend on nothing but the row, in this whole process.

    There is no way back: what one engine has promised, a later one in the same process does not break.
    """
    global _is_deterministic
    _is_deterministic = True


def is_deterministic() -> bool:
    """Whether a row's bits must not depend on the batch, at whatever cost in speed."""
    return _is_deterministic


def serves(device: torch.device) -> bool:
    """True when ops on tensors of this device run on the Triton kernels."""
    return device.type == "cuda"


def takes(x: Tensor) -> bool:
    """True when ops on this tensor run on the Triton kernels."""
    return serves(x.device)


def place(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, by a copy that nobody waits for; on CPU the tensor itself.

    The caller may drop `x`, but not change it.
    """
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


@cache
def kernels() -> Any:
    """The module of all GPU kernels. ImportError where Triton is not installed."""
    return import_module("quire.kernels.triton.kernels")
