"""The place in a layer for one tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quantization.scheme import FLOATS


@dataclass(slots=True)
class WeightSlot:
    """The shape and dtypes that a layer expects under one name, and the function that takes the tensor."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]  # may raise WeightsError about the values
    accepts: tuple[torch.dtype, ...] = FLOATS
    is_required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes that are accepted too
    is_loaded: bool = False


WeightSlots = Iterable[tuple[str, WeightSlot]]  # (name relative to the layer, slot)
