"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quantization.scheme import FLOATS


@dataclass(slots=True)
class WeightSlot:
    """The shape and dtypes a layer expects under one name, and what takes the tensor."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]  # may raise WeightsError about the values
    accepts: tuple[torch.dtype, ...] = FLOATS
    is_required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()  # that are as good
    is_loaded: bool = False


WeightSlots = Iterable[tuple[str, WeightSlot]]  # (name relative to the layer, slot)
