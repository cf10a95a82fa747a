"""Chooses GPU kernels. They are imported at the first use, so a machine without a GPU needs no Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_is_deterministic = False


def be_deterministic() -> None:
    """From now on, use only deterministic kernels in this process: the bits of a row depend only on the row.

    This cannot be undone, because a later engine in the same process must not break the promise of an earlier one.
    """
    global _is_deterministic
    _is_deterministic = True


def is_deterministic() -> bool:
    """Whether the bits of a row must not depend on the batch, even if this costs speed."""
    return _is_deterministic


def serves(device: torch.device) -> bool:
    """Whether ops on tensors of this device run on the Triton kernels."""
    return device.type == "cuda"


def takes(x: Tensor) -> bool:
    """Whether ops on this tensor run on the Triton kernels."""
    return serves(x.device)


def place(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without waiting. On a CPU, it returns the tensor itself.

    The caller may drop `x`, but must not change it.
    """
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


@cache
def kernels() -> Any:
    """The module of all GPU kernels. Raises ImportError without Triton."""
    return import_module("quire.kernels.triton.kernels")
